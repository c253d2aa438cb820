"""Tiny models of transformers against torch's attention with the same mask written down."""

import inspect
import json
from functools import partial
from pathlib import Path

import pytest
import torch
import torch._dynamo.testing

import masks
import sparseflash

transformers = pytest.importorskip("transformers")

from transformers import AttentionInterface, AttentionMaskInterface  # noqa: E402
from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: E402
from transformers.masking_utils import and_masks, sdpa_mask  # noqa: E402

from sparseflash import huggingface  # noqa: E402
from sparseflash.reference import standard_attention  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = {"vocab_size": 61, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# The name of the argument from transformers 5.24 on, and before.
CACHE = next(
    name
    for name in ("cache", "past_key_values")
    if name in inspect.signature(transformers.LlamaForCausalLM.forward).parameters
)
PATTERN = masks.pattern(lambda q, k: ((q - k).abs() < 6) | (k % 7 == 0))


def bert():
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, **SIZES
    )
    return transformers.BertForMaskedLM(config).to(DEVICE)


def gpt2(**options):
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, **SIZES, **options)
    return transformers.GPT2LMHeadModel(config).to(DEVICE)


def llama(**options):
    config = transformers.LlamaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        **SIZES,
        **options,
    )
    return transformers.LlamaForCausalLM(config).to(DEVICE)


MODELS = {"bert": bert, "gpt2": gpt2, "llama": llama}


@pytest.fixture(autouse=True, scope="module")
def registered():
    """`blocksparse`, and `dense`, which is torch's attention with the same mask."""

    def dense_mask(mask_function, **options):
        both = and_masks(mask_function, lambda b, h, q, k: ((q - k).abs() < 6) | (k % 7 == 0))
        skip = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return sdpa_mask(mask_function=both, **(options | skip))

    AttentionInterface.register("dense", sdpa_attention_forward)
    AttentionMaskInterface.register("dense", dense_mask)
    huggingface.register(PATTERN)


def outputs(model, implementation, ids, **options):
    """Logits, and the gradients of all parameters for the loss over tokens that are no padding."""
    model.set_attn_implementation(implementation)
    model.zero_grad()
    padding = options.get("attention_mask", torch.ones_like(ids))
    labels = torch.where(padding.bool(), ids, -100)
    result = model(ids, labels=labels, **options)
    result.loss.backward()
    logits = result.logits[padding.bool()]
    return logits, *(p.grad.clone() for p in model.parameters() if p.grad is not None)


def compare(model, ids, **options):
    ours, expected = (outputs(model, name, ids, **options) for name in ("blocksparse", "dense"))
    for result, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(result, other, atol=2e-5, rtol=1e-4)
    return ours[0]


@pytest.fixture
def compile_counter():
    torch._dynamo.reset()
    yield torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()


def tokens(batch=3, length=40):
    return torch.randint(3, 61, (batch, length), device=DEVICE)


def padded(lengths, length=40, side="right"):
    """attention_mask of sequences with so many tokens."""
    token = torch.arange(length, device=DEVICE)
    token = token if side == "right" else token.flip(0)
    return (token < torch.tensor(lengths, device=DEVICE)[:, None]).long()


@pytest.mark.parametrize("name", MODELS)
def test_forward_and_backward(name):
    model = MODELS[name]().eval()
    logits = compare(model, tokens())
    model.set_attn_implementation("sdpa")
    assert not torch.allclose(model(tokens()).logits.flatten(0, 1), logits, atol=1e-3)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", MODELS)
def test_padding_is_honoured(name, side):
    compare(MODELS[name]().eval(), tokens(), attention_mask=padded([40, 23, 31], side=side))


def generated(model, implementation, ids, **options):
    model.set_attn_implementation(implementation)
    return model.generate(
        ids,
        max_new_tokens=12,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        eos_token_id=None,
        **options,
    )


def compare_generated(model, ids, **options):
    ours, expected = (generated(model, name, ids, **options) for name in ("blocksparse", "dense"))
    assert torch.equal(ours.sequences, expected.sequences)
    for logits, other in zip(ours.logits, expected.logits, strict=True):
        torch.testing.assert_close(logits, other, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_generation(name, side):
    lengths = [20, 20, 20] if side == "right" else [20, 9, 14]
    padding = padded(lengths, 20, side)
    compare_generated(MODELS[name]().eval(), tokens(length=20), attention_mask=padding)


@torch.no_grad()
def test_a_cache_of_a_fixed_size():
    model, ids = llama().eval(), tokens(length=21)
    logits = []
    for implementation in ("blocksparse", "dense"):
        model.set_attn_implementation(implementation)
        cache = transformers.StaticCache(config=model.config, max_cache_len=40)
        steps = (model(part, **{CACHE: cache}) for part in (ids[:, :20], ids[:, 20:]))
        logits.append(torch.cat([step.logits for step in steps], dim=1))
    torch.testing.assert_close(*logits, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_generation_with_a_cache_of_a_fixed_size(name):
    padding = padded([20, 9, 14], 20, "left")
    static = {"attention_mask": padding, "cache_implementation": "static"}
    compare_generated(MODELS[name]().eval(), tokens(length=20), **static)


def test_the_advice_of_torch_compile_to_use_tf32_is_no_error(monkeypatch):
    """On a GPU, generation with such a cache compiles float32 products, and warnings are errors.
    Only a graph that is not in the cache of the compiler gives this one.
    """
    from torch._inductor import compile_fx  # it takes seconds to import

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    compile_fx._warn_tf32_disabled.__wrapped__()


@torch.no_grad()
def test_a_compiled_model_serves_every_step_with_a_cache_of_a_fixed_size(compile_counter):
    model, ids = llama().eval(), tokens(length=28)
    model.set_attn_implementation("blocksparse")
    compiled, frames = torch.compile(model, backend=compile_counter), []
    logits = []
    for run in (compiled, model):
        cache = transformers.StaticCache(config=model.config, max_cache_len=40)
        model(ids[:, :20], **{CACHE: cache})
        for step in range(20, 28):
            logits.append(run(ids[:, step : step + 1], **{CACHE: cache}).logits)
            frames.append(compile_counter.frame_count)
    torch.testing.assert_close(logits[:8], logits[8:])
    assert frames[2] == frames[7] > 0


def test_steps_of_generation_share_a_compiled_mask():
    compiled = []
    pattern = masks.pattern(lambda q, k: compiled.append(k.shape[1]) or (k <= q) & (k % 3 != 1))
    huggingface.register(pattern, "blocksparse_counted")
    generated(gpt2().eval(), "blocksparse_counted", tokens(length=20))
    assert compiled == [20, 32]


@pytest.mark.slow(20)
def test_a_compiled_model_serves_every_length(compile_counter):
    model = llama().eval()
    model.set_attn_implementation("blocksparse")
    compiled = torch.compile(model, backend=compile_counter)
    frames = []
    with torch.no_grad():
        for length in (20, 28, 35, 41):
            ids = tokens(length=length)
            torch.testing.assert_close(compiled(ids).logits, model(ids).logits)
            frames.append(compile_counter.frame_count)
    assert frames[1] == frames[3]


def test_packed_sequences():
    positions = torch.cat([torch.arange(13), torch.arange(27)])[None].to(DEVICE)
    compare(llama().eval(), tokens(batch=1), position_ids=positions)


def test_a_sliding_window_of_the_model():
    config = transformers.MistralConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, sliding_window=4, **SIZES,
    )  # fmt: skip
    model = transformers.MistralForCausalLM(config).eval().to(DEVICE)
    compare(model, tokens(batch=2))
    compare_generated(model, tokens(batch=2, length=20))


def bart():
    sides = {f"{side}_{x}": n for side in ("encoder", "decoder") for x, n in HALF.items()}
    config = transformers.BartConfig(d_model=32, max_position_embeddings=64, **sides, **SIZES)
    return transformers.BartForConditionalGeneration(config).to(DEVICE)


def bert_decoder():
    own = {"is_decoder": True, "add_cross_attention": True}
    config = transformers.BertConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        **SIZES,
        **own,
    )
    return transformers.BertLMHeadModel(config).to(DEVICE)


def t5gemma():
    """Its encoder and its decoder have configurations of their own."""
    side = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    side |= {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 50, **SIZES}
    config = transformers.T5GemmaConfig(encoder=side, decoder=side, vocab_size=61)
    return transformers.T5GemmaForConditionalGeneration(config).to(DEVICE)


HALF = {"layers": 2, "attention_heads": 4, "ffn_dim": 48}
# What gives a decoder the tokens of an encoder, and its own.
DECODERS = {
    "bart": (
        bart,
        lambda encoded, allowed, ids: {
            "encoder_outputs": (encoded,), "attention_mask": allowed, "decoder_input_ids": ids
        },
    ),
    "t5gemma": (
        t5gemma,
        lambda encoded, allowed, ids: {
            "encoder_outputs": transformers.modeling_outputs.BaseModelOutput(encoded),
            "attention_mask": allowed, "decoder_input_ids": ids,
        },
    ),
    "gpt2": (
        partial(gpt2, add_cross_attention=True),
        lambda encoded, allowed, ids: {
            "encoder_hidden_states": encoded, "encoder_attention_mask": allowed, "input_ids": ids
        },
    ),
    "bert": (
        bert_decoder,
        lambda encoded, allowed, ids: {
            "encoder_hidden_states": encoded, "encoder_attention_mask": allowed, "input_ids": ids
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("length", [11, 40])
@pytest.mark.parametrize("name", DECODERS)
def test_cross_attention_has_no_pattern(name, length):
    """`causal` changes nothing in a decoder but its cross-attention, also with as many keys."""
    make, inputs = DECODERS[name]
    model, ids, encoded = make().eval(), tokens(3, length), torch.randn(3, 40, 32, device=DEVICE)
    for allowed in (None, padded([40, 33, 7], side="left")):
        given = inputs(encoded, allowed, ids)
        model.set_attn_implementation("eager")
        expected = model(**given).logits
        sparseflash.sparsify(model, "causal()")
        torch.testing.assert_close(model(**given).logits, expected, atol=2e-5, rtol=1e-4)
        cache = model(**inputs(encoded, allowed, ids[:, :-1]), use_cache=True)[CACHE]
        step = model(**inputs(encoded, allowed, ids[:, -1:]), **{CACHE: cache}).logits
        torch.testing.assert_close(step[:, 0], expected[:, -1], atol=2e-5, rtol=1e-4)


def test_encoder_and_decoder_have_patterns():
    model, ids = t5gemma().eval(), tokens()
    dense = model.model.encoder(ids)[0]
    sparseflash.sparsify(model, "local(2)")
    assert (model.model.encoder(ids)[0] - dense).abs().max() > 1e-3
    assert model.config.decoder._attn_implementation.startswith("blocksparse")


def test_the_configuration_records_the_pattern():
    pattern = masks.local(5) | masks.strided(2)
    huggingface.register(None, "blocksparse_recorded")
    huggingface.register("local(5) | strided(2)", "blocksparse_by_name")
    model = gpt2(sparse_pattern=masks.to_json(pattern)).eval()
    ids = tokens()
    results = []
    for name in ("blocksparse_recorded", "blocksparse_by_name"):
        model.set_attn_implementation(name)
        results.append(model(ids).logits)
    assert torch.equal(*results)
    model.set_attn_implementation("blocksparse_recorded")
    for text, message in {None: "must be set", "local(3)": "must be what masks.to_json"}.items():
        model.config.sparse_pattern = text
        with pytest.raises(ValueError, match=f"config.sparse_pattern {message}"):
            model(ids)


def test_probabilities_that_are_not_returned_are_missed_aloud(monkeypatch):
    warned = []
    monkeypatch.setattr(huggingface.logger, "warning_once", warned.append, raising=False)
    model = llama().eval()
    model.set_attn_implementation("blocksparse")
    model(tokens())
    assert warned == []
    model(tokens(), output_attentions=True)
    assert "has no output_attentions" in warned[0]


def test_dropout_in_training():
    model = gpt2(attn_pdrop=0.5, embd_pdrop=0.0, resid_pdrop=0.0).train()
    model.set_attn_implementation("blocksparse")
    ids = tokens()
    assert not torch.equal(model(ids).logits, model(ids).logits)


def test_what_is_not_supported_is_refused():
    with pytest.raises(ValueError, match="must not contain"):
        huggingface.register(PATTERN, "my_flash")
    with pytest.raises(ValueError, match=r"backend must be 'auto' or one of .*, got 'cuda'"):
        huggingface.register(PATTERN, backend="cuda")
    model = llama().eval()
    model.set_attn_implementation("blocksparse")
    with pytest.raises(ValueError, match="attention_mask must be 2-dimensional"):
        model(tokens(batch=1), attention_mask=torch.zeros(1, 1, 40, 40, device=DEVICE))
    attend = partial(huggingface._attend, (PATTERN,), "auto", torch.nn.Module())
    tensors = torch.zeros(3, 1, 2, 8, 4).unbind()
    with pytest.raises(ValueError, match="does not support position_bias"):
        attend(*tensors, None, position_bias=torch.zeros(1, 2, 8, 8))


def test_soft_caps_and_sinks_of_a_model():
    tensors = torch.randn(3, 1, 2, 20, 4).unbind()
    sinks = torch.randn(2)
    attend = partial(huggingface._attend, (PATTERN,), "auto", torch.nn.Module())
    out, _ = attend(*tensors, None, softcap=2.0, s_aux=sinks, scaling=0.7)
    expected, _ = standard_attention(
        *tensors, PATTERN(20), softcap=2.0, sinks=sinks, scale=0.7, dtype=torch.float32
    )
    torch.testing.assert_close(out.transpose(1, 2), expected)


def expected_of(patterns, model, ids):
    """Logits by torch's attention under the pattern of each layer and the causal one."""

    def attend(module, query, key, value, attention_mask, scaling=None, **_):
        mask = (patterns[module.layer_idx] & masks.causal())(query.shape[2]).to_dense()
        if mask.dim() == 3:
            mask = mask.repeat_interleave(query.shape[1] // len(mask), 0)
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, mask.to(DEVICE), scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register("dense_layers", attend)
    AttentionMaskInterface.register("dense_layers", sdpa_mask)
    model.set_attn_implementation("dense_layers")
    return model(ids).logits


LOCAL, WIDE = masks.local(3), masks.strided(4)
PER_HEAD = masks.stack([masks.local(3), masks.full(), masks.strided(4), masks.full()])
CHOICES = {
    "one": ("local(3)", {}, [LOCAL, LOCAL]),
    "layers": (["local(3)", WIDE], {}, [LOCAL, WIDE]),
    "dense layer": ([None, WIDE], {}, [masks.full(), WIDE]),
    "some layers": (LOCAL, {"layers": [-1]}, [masks.full(), LOCAL]),
    "key heads": ([LOCAL, ["local(3)", WIDE]], {}, [LOCAL, masks.stack([LOCAL, WIDE])]),
    "some heads": (
        LOCAL,
        {"heads": [0, 2]},
        [masks.stack([LOCAL, masks.full(), LOCAL, masks.full()])] * 2,
    ),
    "profile": (
        {"layers": [{"heads": ["local(3)", None, "strided(4)", None]}, {"heads": [WIDE] * 4}]},
        {},
        [PER_HEAD, WIDE],
    ),
}


@torch.no_grad()
@pytest.mark.parametrize("name", CHOICES)
def test_a_model_attends_by_the_patterns_of_its_layers_and_heads(name):
    pattern, options, expected = CHOICES[name]
    model, ids = llama().eval(), tokens()
    assert sparseflash.sparsify(model, pattern, **options) is model
    logits = model(ids).logits
    wanted = expected_of(expected, model, ids)
    torch.testing.assert_close(logits, wanted, atol=2e-5, rtol=1e-4)


@torch.no_grad()
def test_a_saved_model_keeps_its_patterns(tmp_path):
    model, ids = llama().eval(), tokens()
    logits = sparseflash.sparsify(model, ["local(3)", ["local(9)", "strided(4)"]])(ids).logits
    model.save_pretrained(tmp_path)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval().to(DEVICE)
    assert not torch.allclose(loaded(ids).logits, logits, atol=1e-3)
    torch.testing.assert_close(sparseflash.sparsify(loaded)(ids).logits, logits)


@torch.no_grad()
def test_a_pattern_of_a_function_and_of_small_blocks_is_not_recorded(tmp_path):
    model, ids = llama().eval(), tokens()
    sparseflash.sparsify(model, PATTERN.with_block_size(32))
    assert model.config.sparse_pattern is None
    ours = model(ids).logits
    model.set_attn_implementation("dense")
    torch.testing.assert_close(model(ids).logits, ours, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", [Path, str])
def test_a_profile_in_a_file(tmp_path, kind):
    model = llama()
    profile = {"layers": [{"heads": ["local(3)"] * 4}, {"heads": ["local(5)"] * 4}]}
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(profile))
    sparseflash.sparsify(model, kind(path))
    assert [masks.from_json(text) for text in model.config.sparse_pattern] == [
        masks.local(3),
        masks.local(5),
    ]


@pytest.fixture
def hostile(tmp_path):
    """(the name of a pattern in a file that leaves a trace when it is run, the trace)"""
    file, trace = tmp_path / "hostile.py", tmp_path / "ran"
    file.write_text(f"import masks\nopen({str(trace)!r}, 'w').close()\nfound = masks.full()\n")
    return f"{file}:found", trace


def test_a_profile_in_a_file_runs_no_file(tmp_path, hostile):
    name, trace = hostile
    (tmp_path / "profile.json").write_text(json.dumps({"layers": [{"heads": [name] * 4}] * 2}))
    with pytest.raises(ValueError, match=r"profile\.json must not name a Python file"):
        sparseflash.sparsify(llama(), tmp_path / "profile.json")
    assert not trace.exists()


def test_a_foreign_model_runs_no_file(tmp_path, hostile):
    name, trace = hostile
    documents = {"lengths": [4], "k_lengths": None, "pattern": name}
    hidden = json.dumps({"version": 1, "pattern": {"documents": documents}})
    huggingface.register(None, "blocksparse_recorded")
    for record in (hidden, [hidden], name):
        llama(sparse_pattern=record).save_pretrained(tmp_path / "hub")
        model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "hub").to(DEVICE)
        with pytest.raises(ValueError, match=r"config\.sparse_pattern must be what masks"):
            sparseflash.sparsify(model)
        model.set_attn_implementation("blocksparse_recorded")
        with pytest.raises(ValueError, match=r"config\.sparse_pattern must be what masks"):
            model(tokens())
    assert not trace.exists()


@pytest.mark.parametrize(
    ("pattern", "options", "message"),
    [
        (["local(3)"], {}, "or a list of 2, got 1"),
        (3, {}, "or a list of 2, got int"),
        (["local(3)", ["full()"] * 3], {}, "or a list of 2 or 4, got 3"),
        ({"layers": [{"head": []}]}, {}, r"\"heads\": .* got \{'layers': \[\{'head': \[\]"),
        ({"layers": 3}, {}, r"got \{'layers': 3\}"),
        ("nothing.json", {}, "cannot be read from nothing.json: .* No such file"),
        (Path(__file__), {}, "cannot be read from .*test_huggingface.py: "),
        (LOCAL, {"layers": [2]}, r"layers must be a list of -2 to 1, got \[2\]"),
        (LOCAL, {"layers": [True]}, r"layers must be a list of -2 to 1, got \[True\]"),
        (PER_HEAD, {"heads": [1]}, "heads must be None if the pattern has one for each head"),
        (None, {}, "config.sparse_pattern must be set"),
        ("nonsense", {}, "nonsense"),
        (LOCAL, {"backend": "cuda"}, "backend must be 'auto' or one of .*, got 'cuda'"),
    ],
)
def test_patterns_that_do_not_fit_a_model_change_nothing(pattern, options, message):
    model = llama()
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=message):
        sparseflash.sparsify(model, pattern, **options)
    assert model.config._attn_implementation == before
    assert getattr(model.config, "sparse_pattern", None) is None


def test_models_whose_attention_cannot_be_replaced_are_refused():
    """transformers only logs that they keep their attention, which is dense."""
    sizes = {"vocab_size": 61, "hidden_size": 32}
    bloom = transformers.BloomModel(transformers.BloomConfig(**sizes, n_layer=1, n_head=4))
    with pytest.raises(ValueError, match="attention interface, which BloomModel does not"):
        sparseflash.sparsify(bloom, LOCAL)
    assert getattr(bloom.config, "sparse_pattern", None) is None
    mamba = transformers.MambaModel(transformers.MambaConfig(**sizes, num_hidden_layers=1))
    with pytest.raises(ValueError, match="model must have attention heads, got MambaModel"):
        sparseflash.sparsify(mamba, LOCAL)


def test_only_the_layers_of_text_of_a_model_of_text_and_images_are_sparse():
    side = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    side["num_attention_heads"] = 4
    vision = transformers.CLIPVisionConfig(**side, image_size=32, patch_size=8)
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config=transformers.LlamaConfig(**side, vocab_size=61, pad_token_id=0),
        image_token_index=60,
        vision_feature_select_strategy="default",
        vision_feature_layer=-1,
    )
    model = transformers.LlavaForConditionalGeneration(config).to(DEVICE).eval()
    ids, pixels = tokens(1), torch.randn(1, 3, 32, 32, device=DEVICE)
    ids[ids == 60] = 59
    ids[0, 2:18] = 60

    def logits():
        return model(input_ids=ids, pixel_values=pixels).logits

    tower = model.model.vision_tower
    dense, images = logits(), tower(pixels)[0]
    sparseflash.sparsify(model, [None, ["local(3)"] * 4])
    sparse = logits()
    assert torch.equal(tower(pixels)[0], images)
    torch.testing.assert_close(sparse[:, :4], dense[:, :4], atol=2e-5, rtol=1e-4)
    assert (sparse - dense)[:, 10:].abs().max() > 1e-3
    sparseflash.sparsify(model, "full()")
    torch.testing.assert_close(logits(), dense, atol=2e-5, rtol=1e-4)
    sparseflash.sparsify(tower, "local(3)")
    assert (tower(pixels)[0] - images).abs().max() > 1e-3


def test_a_file_of_patterns_gives_no_key_twice(tmp_path):
    path = tmp_path / "profile.json"
    path.write_text('{"layers": [], "layers": [{"heads": ["full"]}]}')
    with pytest.raises(ValueError, match=r"profile\.json: the key 'layers' is given twice"):
        sparseflash.sparsify(llama(), path)


def test_what_is_no_model_and_no_name_is_refused():
    with pytest.raises(TypeError, match="model must be a model of transformers, got Linear"):
        sparseflash.sparsify(torch.nn.Linear(2, 2), LOCAL)
    with pytest.raises(TypeError, match="name must be a string, got 3"):
        huggingface.register(LOCAL, name=3)


def test_a_module_that_does_not_say_its_layer_is_refused():
    attend = partial(huggingface._attend, (LOCAL, WIDE), "auto", torch.nn.Module())
    with pytest.raises(ValueError, match="Module must have a layer_idx below 2"):
        attend(*torch.zeros(3, 1, 2, 8, 4).unbind(), None)
