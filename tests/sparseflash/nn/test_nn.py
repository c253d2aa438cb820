"""Modules against torch's own, with the same weights and the mask written down."""

import copy
import math

import pytest
import torch
import torch._dynamo.testing
from torch import nn
from torch.nn.functional import gelu

import masks
import sparseflash
from sparseflash import ScoreFunction
from sparseflash.nn import KeyValueCache, Rotary, SparseAttention, SparseEncoderLayer, attention

EMBED, HEADS, LENGTH = 32, 4, 50
PATTERN = masks.local(7) & masks.causal()


def blocked(pattern=PATTERN, length=LENGTH):
    """torch's mask of a pattern, where True means that a pair does not attend."""
    return ~pattern(length).to_dense()


def torch_attention(**options):
    return nn.MultiheadAttention(EMBED, HEADS, batch_first=True, **options)


@pytest.mark.parametrize("bias", [True, False])
def test_weights_of_torch(bias):
    theirs = torch_attention(bias=bias)
    ours = SparseAttention.from_torch(theirs, PATTERN)
    x = torch.randn(2, LENGTH, EMBED)
    expected, _ = theirs(x, x, x, attn_mask=blocked(), need_weights=False)
    torch.testing.assert_close(ours(x), expected)
    memory = torch.randn(2, 33, EMBED)
    ours.pattern = None
    expected, _ = theirs(x, memory, memory, need_weights=False)
    torch.testing.assert_close(ours(x, memory), expected)
    theirs.load_state_dict(ours.state_dict())


def test_a_module_of_torch_hands_on_its_dropout_and_dtype():
    module = SparseAttention.from_torch(torch_attention(dropout=0.3, dtype=torch.float64))
    assert module.dropout == 0.3
    assert {p.dtype for p in module.parameters()} == {torch.float64}


def test_fresh_weights_are_drawn_as_torch_draws_them():
    torch.manual_seed(3)
    theirs = torch_attention()
    torch.manual_seed(3)
    ours = SparseAttention(EMBED, HEADS)
    for name, weight in theirs.state_dict().items():
        if "out_proj" not in name:
            assert torch.equal(ours.state_dict()[name], weight)
    before = {name: weight.clone() for name, weight in ours.state_dict().items()}
    ours.reset_parameters()
    changed = {n for n, weight in ours.state_dict().items() if not torch.equal(weight, before[n])}
    assert changed == {"in_proj_weight", "out_proj.weight"}


def test_patterns_by_name_and_of_each_head():
    x = torch.randn(1, LENGTH, EMBED)
    text = "local(7) & causal()"
    module = SparseAttention(EMBED, HEADS, text)
    heads = SparseAttention(EMBED, HEADS, [text, PATTERN, text, "butterfly"])
    heads.load_state_dict(module.state_dict())
    assert heads.pattern(LENGTH).num_masks == 2
    module.pattern = masks.stack([PATTERN, PATTERN, PATTERN, masks.butterfly()])
    torch.testing.assert_close(heads(x), module(x))
    assert "local(7)" in repr(heads)


def test_grouped_heads_gradients_and_dropout():
    module = SparseAttention(EMBED, HEADS, PATTERN, kv_heads=2, dropout=0.5, bias=False)
    x = torch.randn(2, LENGTH, EMBED)
    assert not torch.equal(module(x), module(x))
    module.eval()
    assert torch.equal(module(x), module(x))
    module(x, key_lengths=torch.tensor([30, 50])).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("pattern", [PATTERN, masks.butterfly() & masks.causal(), None])
def test_a_cache_gives_what_the_whole_sequence_gives(pattern, rotary):
    pattern = None if pattern is None else pattern.with_block_size(16)
    rotary = Rotary(EMBED // HEADS) if rotary else None
    module = SparseAttention(EMBED, HEADS, pattern, kv_heads=2, rotary=rotary)
    x = torch.randn(2, LENGTH, EMBED)
    cache = KeyValueCache(2, 2, LENGTH, EMBED // HEADS)
    expected = module(x)
    if pattern is None:  # the last token is the only one that sees the same keys
        expected = expected[:, -1:]
    steps = [x[:, :30], x[:, 30:31], x[:, 31:49], x[:, 49:]]
    result = torch.cat([module(step, cache=cache) for step in steps], dim=1)
    torch.testing.assert_close(result[:, -expected.shape[1] :], expected)
    with pytest.raises(ValueError, match="cache can hold at most 50 tokens, got 51"):
        module(x[:, :1], cache=cache)
    cache.reset()
    torch.testing.assert_close(module(steps[0], cache=cache), result[:, :30])


@pytest.mark.gpu
def test_a_gpu_gives_what_the_cpu_gives():
    module = SparseAttention(128, 4, PATTERN, kv_heads=2, rotary=Rotary(32))
    x = torch.randn(2, LENGTH, 128)
    expected = module(x)
    module, x = copy.deepcopy(module).to("cuda"), x.to("cuda")
    cache = KeyValueCache(2, 2, 64, 32, device="cuda")
    with torch.no_grad():
        steps = [module(part, cache=cache) for part in x.split([30, 1, 4, 15], dim=1)]
    for result in (module(x), torch.cat(steps, dim=1)):
        torch.testing.assert_close(result.cpu(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("pattern", [PATTERN.with_block_size(16), None])
def test_steps_of_padded_sequences(pattern):
    module = SparseAttention(EMBED, HEADS, pattern)
    x = torch.randn(2, LENGTH, EMBED)
    lengths = torch.tensor([20, LENGTH])
    cache = KeyValueCache(2, HEADS, 64, EMBED // HEADS)
    module(x[:, :33], cache=cache)
    result = module(x[:, 33:35], cache=cache, key_lengths=lengths)
    torch.testing.assert_close(
        result, module(x[:, :35], key_lengths=lengths.clamp(max=35))[:, 33:]
    )


def test_steps_share_a_length_and_cut_their_rows_out_of_one_mask(monkeypatch):
    compiled, k_lens = [], []
    pattern = masks.pattern(lambda q, k: compiled.append(1) or (k <= q) & (k % 3 != 1))
    spy = attention.attention
    monkeypatch.setattr(
        attention,
        "attention",
        lambda q, k, *a, **o: k_lens.append(k.shape[2]) or spy(q, k, *a, **o),
    )
    module = SparseAttention(EMBED, HEADS, pattern.with_block_size(16))
    cache = KeyValueCache(1, HEADS, 60, EMBED // HEADS)
    for token in torch.randn(40, 1, 1, EMBED):
        module(token, cache=cache)
    assert sorted(set(k_lens)) == [1, 2, 4, 8, 16, 32, 60]
    cache.reset()
    module(torch.randn(1, 17, EMBED), cache=cache)
    assert k_lens[-1] == 17, "a prompt needs no memory for later tokens"
    assert len(compiled) == 1


def test_rotary_scores_depend_on_the_distance():
    rotary = Rotary(16, base=100.0)
    query, key = torch.randn(2, 1, 1, 1, 16).unbind()
    near = [float((rotary(query, t + 3) * rotary(key, t)).sum()) for t in (0, 5, 1000)]
    assert near == pytest.approx([near[0]] * 3, abs=1e-3)
    assert torch.equal(rotary(query, 0), query)
    assert rotary(query.half(), 2).dtype == torch.float16
    torch.testing.assert_close(rotary(query, 7).norm(), query.norm())


def test_rotary_angles_are_float32_in_a_module_of_any_dtype():
    x = torch.randn(1, 1, 2000, 16)
    expected = Rotary(16)(x)
    assert torch.equal(Rotary(16).bfloat16()(x), expected)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert torch.equal(Rotary(16)(x), expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_module_made_of_torchs_stays_in_its_mode():
    assert not SparseAttention.from_torch(torch_attention().eval()).training
    assert SparseAttention.from_torch(torch_attention()).training


@pytest.mark.parametrize("value_dim", [3, 24])
def test_values_of_another_dim(value_dim):
    module = SparseAttention(EMBED, HEADS, PATTERN, kv_heads=2, value_dim=value_dim)
    assert module.out_proj.weight.shape == (EMBED, HEADS * value_dim)
    x, head_dim, kv = torch.randn(2, LENGTH, EMBED), EMBED // HEADS, 2
    weight, bias = module.in_proj_weight, module.in_proj_bias
    sizes = [EMBED, kv * head_dim, kv * value_dim]
    projections = zip(weight.split(sizes), bias.split(sizes), (HEADS, kv, kv), strict=True)
    query, key, value = (
        (x @ w.mT + b).unflatten(2, (heads, -1)).transpose(1, 2) for w, b, heads in projections
    )
    scores = query @ key.repeat_interleave(2, 1).mT / math.sqrt(head_dim)
    p = scores.masked_fill(blocked(), -math.inf).softmax(-1)
    out = p @ value.repeat_interleave(2, 1)
    expected = module.out_proj(out.transpose(1, 2).flatten(2))
    torch.testing.assert_close(module(x), expected)
    torch.testing.assert_close(module(x, x), expected)
    cache = KeyValueCache(2, kv, LENGTH, head_dim, value_dim=value_dim)
    steps = [module(part, cache=cache) for part in x.split([30, 1, 19], 1)]
    torch.testing.assert_close(torch.cat(steps, 1), expected)
    assert f"value_dim={value_dim}" in repr(module)
    layer = SparseEncoderLayer(EMBED, HEADS, pattern=PATTERN, value_dim=value_dim)
    assert layer(x).shape == x.shape


def by_key(score, batch, head, query, key, weights):
    return score + weights[head, key]


def by_distance(score, batch, head, query, key, slopes):
    return score - slopes[head] * (query - key).abs()


BY_KEY = ScoreFunction.from_torch("module by key", by_key, (float,))
BY_DISTANCE = ScoreFunction.from_torch("module by distance", by_distance, (float,))


def test_score_tensors_of_each_call():
    module = SparseAttention(EMBED, HEADS, PATTERN, score=BY_DISTANCE)
    x, slopes = torch.randn(2, LENGTH, EMBED), torch.rand(HEADS, requires_grad=True)
    bias = sparseflash.alibi(slopes, LENGTH, LENGTH)
    biased = SparseAttention(EMBED, HEADS, PATTERN)
    biased.load_state_dict(module.state_dict())
    expected = biased.out_proj(
        sparseflash.attention(*biased._projected(x, None), PATTERN, bias=bias)
        .transpose(1, 2)
        .flatten(2)
    )
    results = module(x, score_tensors=[slopes]), expected
    torch.testing.assert_close(*results)
    grads = [torch.autograd.grad(y.square().sum(), slopes)[0] for y in results]
    torch.testing.assert_close(*grads)
    layer = SparseEncoderLayer(EMBED, HEADS, pattern=PATTERN, score=BY_DISTANCE).eval()
    twice = [layer(x, score_tensors=[tensor]) for tensor in (slopes, 2 * slopes)]
    assert not torch.allclose(*twice)
    with pytest.raises(ValueError, match="score_tensors must be a list of the 1 tensors"):
        layer(x)
    assert torch.equal(biased(x, score_tensors=None), biased(x, score_tensors=()))


def test_score_functions_and_a_cache():
    x, weights = torch.randn(1, LENGTH, EMBED), torch.randn(HEADS, LENGTH)
    module = SparseAttention(EMBED, HEADS, PATTERN, score=BY_KEY)
    cache = KeyValueCache(1, HEADS, LENGTH, EMBED // HEADS)
    steps = [module(part, cache=cache, score_tensors=[weights]) for part in x.split([40, 10], 1)]
    torch.testing.assert_close(torch.cat(steps, 1), module(x, score_tensors=[weights]))
    module.options["score"] = BY_DISTANCE.name
    cache.reset()
    module(x[:, :40], cache=cache, score_tensors=[weights[:, 0]])
    with pytest.raises(
        ValueError, match="score must not depend on the position of the query with"
    ):
        module(x[:, 40:], cache=cache, score_tensors=[weights[:, 0]])
    assert cache.length == 40


def test_encoder_layer_knows_activations_by_name():
    options = {"dim_feedforward": 48, "activation": "gelu"}
    theirs = nn.TransformerEncoderLayer(EMBED, HEADS, batch_first=True, **options).eval()
    ours = SparseEncoderLayer(EMBED, HEADS, **options).eval()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, LENGTH, EMBED)
    torch.testing.assert_close(ours(x), theirs(x))


def test_rotary_turns_features_half_a_head_apart():
    rotary = Rotary(4)
    first, second = rotary(torch.eye(4)[:2].view(2, 1, 1, 4), offset=3).view(2, 4).tolist()
    assert first == pytest.approx([math.cos(3), 0, math.sin(3), 0])
    assert second == pytest.approx([0, math.cos(0.03), 0, math.sin(0.03)])
    assert rotary.state_dict() == {}
    x = torch.randn(1, 1, 1, 2, dtype=torch.bfloat16)
    expected = Rotary(2)(x.float(), 1003)  # which bfloat16 does not tell from 1004
    torch.testing.assert_close(Rotary(2).bfloat16()(x, 1003), expected.bfloat16())


def test_a_cache_holds_no_graph():
    cache = KeyValueCache(1, HEADS, 8, EMBED // HEADS)
    SparseAttention(EMBED, HEADS)(torch.randn(1, 3, EMBED), cache=cache)
    assert not any(kept.requires_grad for kept in cache.first(3))


@pytest.mark.parametrize("norm_first", [False, True])
def test_encoder_layer_is_that_of_torch(norm_first):
    options = {"dim_feedforward": 48, "norm_first": norm_first}
    options |= {"activation": gelu, "layer_norm_eps": 1e-2} if norm_first else {}
    theirs = nn.TransformerEncoderLayer(EMBED, HEADS, batch_first=True, **options).eval()
    ours = SparseEncoderLayer(EMBED, HEADS, pattern=PATTERN, **options).eval()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, LENGTH, EMBED)
    padding = torch.arange(LENGTH) >= torch.tensor([[40], [50]])
    expected = theirs(x, src_mask=blocked(), src_key_padding_mask=padding)
    torch.testing.assert_close(ours(x, src_key_padding_mask=padding), expected)

    encoder = nn.TransformerEncoder(ours, 2, enable_nested_tensor=False)
    expected = nn.TransformerEncoder(theirs, 2, enable_nested_tensor=False)(
        x, mask=blocked(), src_key_padding_mask=padding
    )
    torch.testing.assert_close(encoder(x, src_key_padding_mask=padding), expected)


def test_encoder_layer_hands_on_its_options():
    arguments = {"pattern": PATTERN, "kv_heads": 2, "deterministic": False}
    layer = SparseEncoderLayer(EMBED, HEADS, 48, dropout=0.3, norm_first=True, **arguments)
    assert (layer.self_attn.pattern, layer.self_attn.kv_heads) == (PATTERN, 2)
    assert layer.self_attn.options == {"deterministic": False}
    assert layer.self_attn.dropout == 0.3
    x = torch.randn(1, LENGTH, EMBED)
    layer.dropout1.p = layer.dropout2.p = 1.0
    assert torch.equal(layer(x), x)
    layer.dropout.p, layer.dropout2.p = 1.0, 0.0
    torch.testing.assert_close(layer(x), x + layer.linear2.bias)


def test_encoder_layer_compiles_whole_for_every_length():
    torch._dynamo.reset()
    layer = SparseEncoderLayer(EMBED, HEADS, 48, dropout=0.0, pattern=PATTERN)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    for length in (20, 30, 45):
        x = torch.randn(2, length, EMBED)
        padding = torch.arange(length) >= torch.tensor([[15], [length]])
        torch.testing.assert_close(
            compiled(x, src_key_padding_mask=padding), layer(x, src_key_padding_mask=padding)
        )
    assert counter.frame_count == 2
    torch._dynamo.reset()


def test_copies_share_their_pattern():
    module = SparseAttention(EMBED, HEADS, PATTERN)
    assert copy.deepcopy(module).pattern is PATTERN


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: SparseAttention(30, 4), "num_heads must divide"),
        (lambda: SparseAttention(32, 4, kv_heads=3), "multiple of kv_heads 3"),
        (lambda: SparseAttention(32, 4, [PATTERN]), "pattern must be one pattern or a list of 4"),
        (lambda: SparseAttention(32, 4)(torch.zeros(2, 32)), r"x must be \(batch, seq, 32\)"),
        (
            lambda: SparseAttention(32, 4)(torch.zeros(1, 2, 32), torch.zeros(1, 2, 16)),
            r"memory must be \(batch, seq, 32\), got \(1, 2, 16\)",
        ),
        (lambda: SparseAttention.from_torch(torch_attention(kdim=5)), "no kdim"),
        (lambda: SparseAttention(32, 0), "num_heads must be at least 1, got 0"),
        (lambda: SparseAttention("a", 4), "embed_dim must be an integer, got 'a'"),
        (lambda: SparseAttention(32, 4, kv_heads=1.0), "kv_heads must be an integer, got 1.0"),
        (lambda: SparseAttention(32, 4, value_dim=0), "value_dim must be at least 1, got 0"),
        (lambda: SparseAttention(32, 4, dropout=2.0), r"dropout must be in \[0, 1\), got 2.0"),
        (lambda: SparseAttention(32, 4, dropout="x"), r"dropout must be in \[0, 1\), got 'x'"),
        (lambda: SparseAttention.from_torch(None), "module must be a torch.nn.*, got NoneType"),
        (lambda: KeyValueCache(1, 4, 5, 8, dtype="bf16"), "dtype must be .*, got 'bf16'"),
        (lambda: SparseAttention(32, 4, rotary=Rotary(16)), "rotary must have head_dim 8"),
        (lambda: SparseAttention(32, 4, rotary=8), "rotary must be a Rotary or None, got 8"),
        (lambda: SparseAttention.from_torch(torch_attention(add_bias_kv=True)), "add_bias_kv"),
        (lambda: SparseAttention.from_torch(torch_attention(add_zero_attn=True)), "add_zero_attn"),
        (lambda: Rotary(7), "head_dim must be even"),
        (lambda: Rotary("x"), "head_dim must be an integer, got 'x'"),
        (lambda: Rotary(8, base="x"), "base must be positive, got 'x'"),
        (lambda: SparseAttention(32, 4)([1]), "x must be a floating-point tensor, got list"),
        (lambda: KeyValueCache(1, 4, 5, 8).append(1, 2), "key must be a floating-point tensor"),
        (lambda: SparseAttention(32, 2, [[1], [2]]), "pattern must be a Pattern or its text"),
        (lambda: SparseAttention(32, 2, torch_attention), "got function, of which masks.patt"),
        (lambda: SparseAttention(32, 2, masks.full()(64)), "got BlockMask, which has one length"),
        (lambda: Rotary(8, base=-1.0), "base must be positive, got -1.0"),
        (lambda: Rotary(8)(torch.zeros(1, 1, 2, 4)), r"x must be \(batch, heads, seq, 8\)"),
        (
            lambda: SparseAttention(32, 4)(
                torch.zeros(1, 2, 32), torch.zeros(1, 2, 32), cache=KeyValueCache(1, 4, 5, 8)
            ),
            "memory must be None",
        ),
        (lambda: KeyValueCache(1, 4, 0, 8), "max_len must be at least 1, got 0"),
        (
            lambda: SparseAttention(32, 4, rotary=Rotary(8))(*torch.zeros(2, 1, 2, 32)),
            "memory must be None",
        ),
        (lambda: KeyValueCache(1, 4, 5, 8).append(*torch.zeros(2, 1, 3, 2, 8)), "key must be"),
        (
            lambda: KeyValueCache(1, 3, 5, 8).append(*torch.zeros(2, 1, 3, 2, 8).half()),
            "key must be torch.float32 on cpu like the cache, got torch.float16",
        ),
        (
            lambda: SparseEncoderLayer(32, 4)(torch.zeros(1, 2, 32), torch.zeros(2, 2)),
            "src_mask must be None",
        ),
        (
            lambda: SparseEncoderLayer(32, 4)(torch.zeros(1, 2, 32), is_causal=True),
            "is_causal False",
        ),
        (
            lambda: SparseEncoderLayer(32, 4)(
                torch.zeros(1, 2, 32), src_key_padding_mask=torch.tensor([[True, False]])
            ),
            "no token after padding",
        ),
        (
            lambda: SparseEncoderLayer(32, 4)(
                torch.zeros(1, 3, 32), src_key_padding_mask=torch.tensor([[False, True]])
            ),
            r"src_key_padding_mask must be \(1, 3\) like src, got \(1, 2\)",
        ),
        (
            lambda: SparseEncoderLayer(32, 4)(
                torch.zeros(1, 2, 32), src_key_padding_mask=torch.tensor([[0.0, 1.0]])
            ),
            "be 0 or -inf if float",
        ),
        (
            lambda: SparseEncoderLayer(32, 4)(torch.zeros(1, 2, 32), src_key_padding_mask=[[0]]),
            r"src_key_padding_mask must be \(1, 2\) like src, got list",
        ),
        (
            lambda: SparseAttention(32, 4)(torch.zeros(1, 2, 32), cache={}),
            "cache must be a KeyValueCache or None, got dict",
        ),
        (lambda: SparseEncoderLayer(32, 4, 0), "dim_feedforward must be at least 1, got 0"),
        (lambda: SparseEncoderLayer(32, 4, activation="tanh"), "activation must be a function or"),
    ],
)
def test_bad_input_names_the_argument(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_a_padding_mask_of_integers_is_refused():
    with pytest.raises(TypeError, match="src_key_padding_mask must be bool, True at padding"):
        SparseEncoderLayer(32, 4)(
            torch.zeros(1, 2, 32), src_key_padding_mask=torch.tensor([[0, 1]])
        )


def test_a_mask_is_no_pattern():
    with pytest.raises(TypeError, match="pattern must be a Pattern or its text, got BlockMask"):
        SparseAttention(32, 4, PATTERN(LENGTH))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (torch.zeros(2, 2, 3, 8), torch.zeros(1, 1, 1, 8), r"value must be \(2, 2, 3, 8\), got"),
        (torch.zeros(2, 2, 3, 8), torch.zeros(2, 2, 3, 8).double(), "value must be torch.float32"),
        (torch.zeros(2, 2, 3), torch.zeros(2, 2, 3), r"key must be \(2, 2, tokens, 8\), got"),
        (
            torch.zeros(2, 2, 9, 8),
            torch.zeros(2, 2, 9, 8),
            "cache can hold at most 8 tokens, got 9",
        ),
    ],
)
def test_a_cache_takes_what_fits_or_nothing(key, value, message):
    cache = KeyValueCache(2, 2, 8, 8)
    with pytest.raises(ValueError, match=message):
        cache.append(key, value)
    assert cache.length == 0
    assert not any(x.any() for x in cache.first(8))


def test_a_call_that_fails_leaves_the_cache_as_it_was():
    module, cache = SparseAttention(EMBED, HEADS), KeyValueCache(1, HEADS, 8, EMBED // HEADS)
    first, second = torch.randn(1, 8, EMBED).split([5, 3], dim=1)
    module(first, cache=cache)
    for lengths in ([2, 2], [9], [-1]):
        with pytest.raises(ValueError, match="key_lengths must be"):
            module(second, cache=cache, key_lengths=torch.tensor(lengths))
    assert cache.length == 5
    expected = module(torch.cat([first, second], 1))[:, 5:]
    # Every query sees the whole cache: so do those of one call.
    torch.testing.assert_close(module(second, cache=cache), expected)


def test_options_of_attention_are_those_of_the_module():
    x = torch.randn(1, 20, EMBED)
    module = SparseAttention(EMBED, HEADS, scale=0.1, softcap=2.0)
    plain = SparseAttention(EMBED, HEADS)
    plain.load_state_dict(module.state_dict())
    assert not torch.allclose(module(x), plain(x))
    with pytest.raises(ValueError, match="scale must be positive"):
        SparseAttention(EMBED, HEADS, scale=-1.0)
    with pytest.raises(TypeError, match="dropout_p must be given as dropout"):
        SparseAttention(EMBED, HEADS, dropout_p=0.1)
