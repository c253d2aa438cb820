"""A model of Hugging Face transformers with a sparsity pattern: train a step, generate.

It needs the extra `hf`: pip install -e '.[hf]'.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sparseflash import huggingface

# Within the model's own causal mask and padding.
huggingface.register("local(64) | global_tokens(16)", name="window-and-sinks")

torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=1000,
)
model = LlamaForCausalLM(config)
tokens = torch.randint(3, 999, (2, 256))

with torch.no_grad():
    dense = model(tokens).logits
model.set_attn_implementation("window-and-sinks")
output = model(tokens, labels=tokens)
output.loss.backward()
difference = (output.logits - dense).abs().amax((0, 2))
print(f"loss {output.loss.item():.3f}")
print(f"the first 64 tokens agree with dense attention: {difference[:64].max():.1e}")
print(f"later ones see less: {difference[100:].max():.1e}")
print("generated", model.generate(tokens[:1], max_new_tokens=4)[0, -4:].tolist())
