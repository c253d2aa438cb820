import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import masks
from sparseflash import ScoreFunction, lab
from sparseflash.lab.capture import captured, run, within
from sparseflash.nn import SparseAttention, SparseEncoderLayer

TOKENS, HEADS = 64, 2


@pytest.fixture(scope="module")
def language_model():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=HEADS,
        num_key_value_heads=1,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        parameter.data *= 5
    ids = torch.randint(32, (2, TOKENS))
    return model, {"input_ids": ids, "labels": ids}


def test_profile_of_a_transformers_model_leaves_it_as_it_was(language_model):
    model, inputs = language_model
    model.train()
    found = lab.profile(model, ["local(8)"], inputs)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert found.layers == tuple(f"model.layers.{i}.self_attn" for i in range(3))
    assert found.patterns == ("causal()", "local(8)")
    assert found.recall.shape == (3, HEADS, 2)
    assert ((found.recall[..., 1] > 0) & (found.recall[..., 1] < 1)).all()


def test_first_order_loss_is_the_slope_of_the_loss():
    """Along O + t (O_pattern - O) of one head, at t = 0."""
    model = nn.Sequential(*(SparseEncoderLayer(32, HEADS) for _ in range(3))).double()
    x, weight = torch.randn(2, 1, TOKENS, 32, dtype=torch.float64)

    def loss(out):
        return (weight * out).sum()

    def loss_at(t: float, layer: int, head: int) -> float:
        calls = []

        def mix(call):
            out = call.attend(call.base)[0]
            if len(calls) == layer:
                sparse = call.attend(within(masks.local(8), call.base))[0]
                out[:, head] += t * (sparse - out)[:, head]
            calls.append(call.module)
            return out

        with torch.no_grad(), captured(model, mix):
            return float(run(model, x, loss))

    found = lab.profile(model, ["local(8)"], x, loss=loss)
    for layer, head in ((0, 1), (2, 0)):
        slope = (loss_at(1e-5, layer, head) - loss_at(-1e-5, layer, head)) / 2e-5
        assert float(found.loss[layer, head, 1]) == pytest.approx(slope, rel=1e-6)


def test_loss_difference_is_that_of_sparsify(language_model, tmp_path):
    from sparseflash.integrations.huggingface import sparsify

    model, inputs = language_model
    found = lab.profile(model, ["local(8)", "butterfly()"], inputs)
    suggestion = lab.suggest(
        found, max(0.6, float((found.measured_ms / found.measured_ms[0]).min()))
    )
    difference = lab.loss_difference(model, inputs, suggestion.layers)
    before = float(model.eval()(**inputs).loss.detach())
    suggestion.save(tmp_path / "suggestion.json")
    sparse = sparsify(model, tmp_path / "suggestion.json")
    assert float(sparse(**inputs).loss.detach()) - before == pytest.approx(difference, abs=1e-4)
    model.set_attn_implementation("sdpa")
    assert lab.loss_difference(model, inputs, [["full()"] * HEADS] * 3) == pytest.approx(
        0, abs=1e-5
    )


def test_modules_of_sparseflash_are_profiled_within_their_pattern():
    model = nn.Sequential(*(SparseEncoderLayer(32, HEADS, pattern="local(20)") for _ in range(2)))
    x = torch.randn(1, TOKENS, 32)
    before = model.eval()(x)
    found = lab.profile(model, ["local(8)"], x)
    assert found.patterns == ("local(20)", "local(8)")
    assert found.recall.shape == (2, HEADS, 2)
    assert torch.equal(model(x), before)
    loss = lab.profile(model, ["local(8)"], x, loss=lambda out: out.square().sum()).loss
    assert loss is not None


def test_modules_attend_with_their_own_options():
    halved = ScoreFunction.from_torch("halved in the lab", lambda score, *rest: score / 2)
    module = SparseAttention(32, HEADS, softcap=0.2, score=halved, scale=3.0).eval()
    x = torch.randn(1, TOKENS, 32)
    found = []
    with captured(module, lambda call: found.append(call.attend(call.base)[0]) or found[0]):
        assert torch.equal(module(x), module.out_proj(found[0].transpose(1, 2).flatten(2)))
    assert torch.equal(module(x), module.out_proj(found[0].transpose(1, 2).flatten(2)))


class OwnAttention(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, x):
        return self.call(x)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda x: (x @ x.mT).softmax(-1) @ x, "attention of block cannot be hooked"),
        (
            lambda x: scaled_dot_product_attention(x, x, x, torch.zeros(TOKENS, TOKENS)),
            "block has an attn_mask",
        ),
        (lambda x: scaled_dot_product_attention(x[:, :, :9], x, x), "block has 9 queries and 64"),
    ],
)
def test_attention_that_cannot_be_hooked_is_named(call, named):
    block = OwnAttention(call)
    model = nn.Sequential()
    model.add_module("block", block)
    with pytest.raises(ValueError, match=named):
        lab.profile(model, ["local(8)"], torch.randn(1, HEADS, TOKENS, 16))
    assert not block._forward_hooks
    assert not block._forward_pre_hooks


def test_a_layer_that_cannot_be_hooked_is_named_beside_one_that_can():
    class OwnAttn(OwnAttention):
        pass

    model = nn.Sequential(
        OwnAttention(lambda x: scaled_dot_product_attention(x, x, x)),
        OwnAttn(lambda x: (x @ x.mT).softmax(-1) @ x),
    )
    with pytest.raises(ValueError, match="attention of 1 cannot be hooked"):
        lab.profile(model, ["local(8)"], torch.randn(1, HEADS, TOKENS, 16))


def test_attention_of_torch_is_named():
    layer = nn.TransformerEncoderLayer(32, HEADS, batch_first=True)
    with pytest.raises(ValueError, match="self_attn cannot be hooked"):
        lab.profile(layer, ["local(8)"], torch.randn(1, TOKENS, 32))


def test_modules_with_lengths_are_refused_and_restored():
    module = SparseAttention(32, HEADS)
    x = torch.randn(1, TOKENS, 32)
    with pytest.raises(ValueError, match="key_lengths"):
        lab.profile(module, ["local(8)"], {"x": x, "key_lengths": torch.tensor([9])})
    with pytest.raises(ValueError, match="score_tensors"):
        lab.profile(module, ["local(8)"], {"x": x, "score_tensors": [torch.zeros(9)]})
    assert "_attend" not in vars(module)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"inputs": None}, "inputs must be the arguments of the model, got None"),
        ({"loss": 3}, "loss must be a function of the output, got 3"),
        ({"loss": lambda out: 3.0}, "loss must return a tensor, got float"),
        ({"loss": lambda out: out}, r"loss must return one number, got \(1, 64, 32\)"),
    ],
)
def test_inputs_and_losses_of_other_kinds_are_refused(arguments, named):
    good = {"inputs": torch.randn(1, TOKENS, 32), "loss": torch.mean}
    with pytest.raises((TypeError, ValueError), match=named):
        lab.profile(SparseAttention(32, HEADS), ["local(8)"], **(good | arguments))


def test_models_without_a_loss_and_other_layers_are_refused(language_model):
    model, inputs = language_model
    no_labels = {"input_ids": inputs["input_ids"]}
    with pytest.raises(ValueError, match="labels"):
        lab.loss_difference(model, no_labels, [["full()"] * HEADS] * 3)
    with pytest.raises(ValueError, match="layers must have an entry for each"):
        lab.loss_difference(model, inputs, [["full()"] * HEADS] * 2)
