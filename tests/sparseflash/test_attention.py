"""Attention on every backend against float64: out, lse and all gradients."""

from functools import partial

import pytest
import torch

import masks
import sparseflash
from experiments.timing import no_waiting
from sparseflash.dispatch.plan import compiled_pattern
from sparseflash.reference import standard_attention
from sparseflash.testing import STRIDES, check_attention, make_inputs, poisoned_empty

HAS_GPU = torch.cuda.is_available()
BACKENDS = {"triton": "cuda"} if HAS_GPU else {"cpu": "cpu", "triton": "cpu"}

PATTERNS = {
    "full": masks.full(),
    "causal": masks.causal(align="bottom-right"),
    "local": masks.local((21, 4), align="top-left"),
    "strided": masks.strided(3, align="top-left"),
    "butterfly": masks.butterfly(),
    "dilated": masks.dilated(3, 9, align="top-left"),
    "global": masks.global_tokens([0, 1, 40]),
    "random": masks.random(0.4),
    "holes": masks.random(0.5) - masks.global_tokens(40),
    "custom": masks.pattern(lambda q, k: (q * k) % 5 == 1),
}


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


def check(
    backend, pattern, lengths, *, block_size=16, heads=2, head_dim=16, kv_heads=None, **options
):
    dtype, strides = options.pop("dtype", torch.float32), options.pop("strides", "contiguous")
    device = BACKENDS[backend]
    # Triton's interpreter takes seconds for each batch element.
    interpreted = (backend, device) == ("triton", "cpu")
    query, key, value, _ = make_inputs(
        1 if interpreted and not options else 2,
        heads,
        *lengths,
        head_dim,
        kv_heads=kv_heads,
        dtype=dtype,
        device=device,
        strides=strides,
    )
    mask = pattern(lengths, block_size, device=device)
    if (key_lengths := options.get("key_lengths")) is not None:
        options["key_lengths"] = torch.tensor(key_lengths, device=device)

    def attend(q, k, v):
        return sparseflash.attention(q, k, v, mask, return_lse=True, backend=backend, **options)

    with poisoned_empty():
        return check_attention(attend, query, key, value, mask, **options)


LENGTHS = [(70, 53), (64, 64), (33, 90)]
SERVED = [
    (backend, lengths)
    for backend, device in BACKENDS.items()
    for lengths in (LENGTHS[:1] if (backend, device) == ("triton", "cpu") else LENGTHS)
]


@pytest.mark.parametrize(("backend", "lengths"), SERVED)
@pytest.mark.parametrize("name", PATTERNS)
def test_patterns(backend, name, lengths):
    check(backend, PATTERNS[name], lengths)


def test_token_tree(backend):
    tree = masks.tree([-1, 0, 1, 1, 2, 2, 3, 3, 4], prefix_len=40)
    check(backend, tree, (9, 49), heads=4, kv_heads=2)


@pytest.mark.parametrize("head_dim", [8, 20, 40, 96])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes_and_head_dims(backend, dtype, head_dim):
    if backend == "triton" and not HAS_GPU and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies bfloat16 wrongly")
    check(backend, PATTERNS["local"], (70, 70), dtype=dtype, head_dim=head_dim)


@pytest.mark.slow_interpreted
@pytest.mark.parametrize("block_size", [32, 64, (16, 64), (64, 16)])
def test_block_sizes(backend, block_size):
    check(backend, PATTERNS["causal"], (100, 130), block_size=block_size)


def test_the_largest_blocks(backend):
    check(backend, PATTERNS["causal"], (520, 530), block_size=512, heads=1)


@pytest.mark.parametrize("strides", STRIDES)
def test_strides(backend, strides):
    check(backend, PATTERNS["butterfly"], (50, 50), strides=strides)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_heads_with_masks_of_their_own(backend, kv_heads):
    heads = [PATTERNS["causal"], PATTERNS["random"], PATTERNS["causal"], PATTERNS["holes"]]
    check(backend, masks.stack(heads), (49, 66), heads=4, kv_heads=kv_heads)


@pytest.mark.parametrize("name", ["full", "causal", "holes"])
def test_padded_keys(backend, name):
    check(backend, PATTERNS[name], (50, 70), key_lengths=[0, 41])
    check(backend, PATTERNS[name], (50, 70), key_lengths=[70, 32])


def test_key_lengths_have_any_strides(backend):
    device = BACKENDS[backend]
    inputs = make_inputs(2, 1, 40, 40, 16, device=device)[:3]
    every_second = torch.tensor([7, 40, 31, 40], dtype=torch.int32, device=device)[::2]
    out, wanted = (
        sparseflash.attention(*inputs, key_lengths=lengths, backend=backend)
        for lengths in (every_second, every_second.contiguous())
    )
    assert torch.equal(out, wanted)


@pytest.mark.slow_interpreted
@pytest.mark.parametrize(("name", "kv_heads"), [("full", 1), ("local", 2)])
def test_dropout(backend, name, kv_heads):
    """Keys are of two groups of dropout."""
    options = {"heads": 2 * kv_heads, "kv_heads": kv_heads, "dropout_p": 0.4, "seed": -12345678901}
    check(backend, PATTERNS[name], (33, 70), **options)


def test_tf32_is_as_exact_as_ieee_where_there_is_none():
    tensors = make_inputs(1, 2, 60, 60, 16)[:3]
    ieee, tf32 = (sparseflash.attention(*tensors, precision=p) for p in ("ieee", "tf32"))
    assert torch.equal(ieee, tf32)


@pytest.mark.gpu
def test_tf32_rounds_to_ten_bits():
    query, key, value, _ = make_inputs(2, 2, 1000, 1000, 64, device="cuda")
    reference, _ = standard_attention(query, key, value)
    errors = [
        float((sparseflash.attention(query, key, value, precision=p) - reference).norm())
        / float(reference.norm())
        for p in ("ieee", "tf32")
    ]
    assert errors[0] < 2**-20 < 2**-16 < errors[1] < 2**-9


def test_empty_rows_are_zero(backend):
    results = check(backend, PATTERNS["holes"], (64, 64))
    assert (results["out"][:, :, :40] == 0).all()
    assert (results["lse"][:, :, :40] == -torch.inf).all()


def test_lse_alone_may_be_differentiated(backend):
    tensors = make_inputs(1, 2, 60, 53, 16, device=BACKENDS[backend])[:3]
    mask = PATTERNS["holes"]((60, 53), 16, BACKENDS[backend])
    inputs = [t.requires_grad_() for t in tensors]
    _, lse = sparseflash.attention(*inputs, mask, return_lse=True, backend=backend)
    grads = torch.autograd.grad(lse[lse > -torch.inf].sum(), inputs)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    _, lse = standard_attention(*exact, mask)
    expected = torch.autograd.grad(lse[lse > -torch.inf].sum(), exact[:2])
    for grad, reference in zip(grads, expected, strict=False):
        torch.testing.assert_close(grad.double(), reference, atol=1e-5, rtol=1e-4)
    assert grads[0].any()
    assert not grads[2].any()


def test_masked_keys_change_no_bit(backend):
    device = BACKENDS[backend]
    query, key, value, grad = make_inputs(2, 2, 60, 60, 16, device=device)
    lengths = torch.tensor([25, 60], device=device)

    def run(key, value):
        inputs = [t.clone().requires_grad_() for t in (query, key, value)]
        out = sparseflash.attention(*inputs, masks.causal(), key_lengths=lengths, backend=backend)
        return out, *torch.autograd.grad(out, inputs, grad)

    changed = [t.clone() for t in (key, value)]
    for tensor in changed:
        tensor[0, :, 25:] = 1e4
    before, after, again = run(key, value), run(*changed), run(key, value)
    for a, b, c in zip(before, after, again, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


@pytest.mark.parametrize("block_size", [16, 128])
def test_keys_that_a_query_does_not_see_change_no_bit_of_it(backend, block_size):
    query, key, value, _ = make_inputs(1, 2, 60, 60, 16, device=BACKENDS[backend])
    mask = masks.causal()(60, block_size)

    def run(key, value):
        return sparseflash.attention(query, key, value, mask, backend=backend)

    changed = [t.clone() for t in (key, value)]
    for tensor in changed:
        tensor[:, :, 37:] = -1e4
    before, after = run(key, value), run(*changed)
    assert torch.equal(before[:, :, :37], after[:, :, :37])
    assert not torch.equal(before[:, :, 37:], after[:, :, 37:])


@pytest.mark.gpu
def test_lengths_on_the_host_and_in_a_graph():
    query, key, value, _ = make_inputs(2, 2, 60, 60, 16, device="cuda")
    lengths = torch.tensor([25, 60])
    mask = masks.causal()(60, device="cuda")

    def run(lengths):
        return sparseflash.attention(query, key, value, mask, key_lengths=lengths)

    expected = run(lengths)
    with no_waiting():
        again = run(lengths)
    assert torch.equal(again, expected)
    there = lengths.cuda()
    assert torch.equal(run(there), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(there)
    there[0] = 30
    graph.replay()
    assert torch.equal(captured, run(torch.tensor([30, 60])))


def test_an_equal_pattern_is_not_compiled_again():
    query, key, value, _ = make_inputs(1, 1, 40, 40, 8)
    sparseflash.attention(query, key, value, masks.local(7) & masks.causal())
    before = compiled_pattern.cache_info().misses
    sparseflash.attention(query, key, value, masks.local(7) & masks.causal())
    assert compiled_pattern.cache_info().misses == before


def test_gradcheck_in_float64():
    query, key, value, _ = make_inputs(1, 2, 20, 23, 4, kv_heads=1, dtype=torch.float64)
    mask = masks.local(6, align="top-left")((20, 23), 16)

    def attend(q, k, v):
        return sparseflash.attention(q, k, v, mask, return_lse=True, backend="cpu")

    assert torch.autograd.gradcheck(attend, [t.requires_grad_() for t in (query, key, value)])


def test_a_seed_repeats_and_the_generator_moves_on():
    query, key, value, _ = make_inputs(1, 1, 40, 40, 8)
    draw = lambda **o: sparseflash.attention(query, key, value, dropout_p=0.5, **o)  # noqa: E731
    assert torch.equal(draw(seed=3), draw(seed=3))
    assert not torch.equal(draw(), draw())


@pytest.mark.parametrize("sizes", [(0, 5, 5), (2, 0, 7), (2, 7, 0), (0, 0, 0)])
@pytest.mark.parametrize("traced", [False, True])
def test_without_a_pair_results_are_those_of_torch(sizes, traced):
    batch, q_len, k_len = sizes
    tensors = [
        torch.randn(batch, heads, n, 8, requires_grad=True)
        for heads, n in ((4, q_len), (2, k_len), (2, k_len))
    ]
    attend = partial(sparseflash.attention, mask=masks.causal(), return_lse=True)
    if traced:
        attend = torch.compile(attend, backend="aot_eager", fullgraph=True)
    out, lse = attend(*tensors)
    expected = torch.nn.functional.scaled_dot_product_attention(*tensors, enable_gqa=True)
    assert torch.equal(out, expected.nan_to_num())
    assert torch.equal(lse, torch.full((batch, 4, q_len), -torch.inf))
    grads = torch.autograd.grad(out.sum() + lse.sum(), tensors)
    assert all(torch.equal(g, torch.zeros_like(x)) for g, x in zip(grads, tensors, strict=True))


@pytest.mark.parametrize("sizes", [(2, 0, 7), (2, 7, 0), (1, 0, 0)])
@pytest.mark.parametrize("length", [-1, 8])
def test_key_lengths_of_empty_tensors_are_in_range(sizes, length):
    batch, q_len, k_len = sizes
    query, key = torch.randn(batch, 2, q_len, 8), torch.randn(batch, 2, k_len, 8)
    lengths = torch.zeros(batch, dtype=torch.int64)
    sparseflash.attention(query, key, key, key_lengths=lengths)
    lengths[-1] = length
    with pytest.raises(ValueError, match=f"key_lengths must be 0 to {k_len}"):
        sparseflash.attention(query, key, key, key_lengths=lengths)


GOOD = torch.zeros(1, 2, 16, 8)
BAD = [  # the arguments that are replaced, their value, the message
    ("query", torch.zeros(2, 3, 4), "query must be"),
    ("query", torch.zeros(1, 0, 16, 8), "query must be .* with a head and a dim"),
    ("query", GOOD.long(), "key must be torch.int64 .*, got torch.float32"),
    ("query", GOOD.to("meta"), "must have data"),
    ("query", GOOD.to_sparse(), "query must be a dense tensor .*, got torch.sparse_coo"),
    ("query key value", GOOD.to(torch.float8_e4m3fn), "query must have .* torch.float16, .*, got"),
    ("key", torch.zeros(1, 2, 8, 8), "value must share batch, heads and tokens"),
    ("key value", torch.zeros(1, 3, 8, 8), "must divide the 2 query heads"),
    ("key value", torch.zeros(2, 2, 16, 8), "key must share batch and head_dim"),
    ("key value", torch.zeros(1, 2, 16, 4), "key must share batch and head_dim"),
    ("value", GOOD.half(), "value must be torch.float32"),
    ("value", GOOD.to("meta"), "value must be torch.float32 on cpu"),
    ("mask", masks.full()(17), "mask must have seq_len"),
    ("mask", masks.stack([masks.full()] * 3), "mask must have 1 or 2 heads"),
    ("mask", "local", "mask must be a Pattern, .* got str, of which masks.parse makes one"),
    ("mask", masks.causal, "got function, of which masks.pattern"),
    ("mask", [masks.full()] * 2, "got list, of which masks.stack"),
    ("mask", torch.ones(16, 16).bool(), "got Tensor, of which masks.BlockMask.from_dense"),
    ("scale", float("nan"), "scale must be positive"),
    ("scale", -1.0, "scale must be positive"),
    ("scale", float("inf"), "scale must be positive"),
    ("scale", torch.ones((), requires_grad=True), "scale must be a number, got Tensor"),
    ("softcap", "a", "softcap must be a number, got str 'a'"),
    ("dropout_p", None, "dropout_p must be a number, got NoneType"),
    ("dropout_p", 1.0, "dropout_p must be in"),
    ("dropout_p", -0.1, "dropout_p must be in"),
    ("key_lengths", torch.tensor([17]), "key_lengths must be 0 to 16"),
    ("key_lengths", torch.tensor([1, 2]), r"key_lengths must be \(1,\)"),
    ("key_lengths", torch.tensor([1.0]), "key_lengths must be an int32"),
    ("key_lengths", torch.tensor([1]).to("meta"), r"must be \(1,\) on cpu, got \(1,\) on meta"),
    ("precision", "high", r"precision must be one of \('ieee', 'tf32'\), got 'high'"),
    ("deterministic", 1, "deterministic must be a bool, got 1"),
    ("backend", "cuda", r"backend must be 'auto' or one of \['cpu', 'hopper', 'triton'\]"),
    ("seed", 2.0, "seed must be an int"),
    ("seed", 2**63, "seed must be at most 9223372036854775807, got 92"),
    ("seed", True, "seed must be an integer, got True"),
    ("bias", 3, "bias must be a floating-point tensor"),
    ("bias", torch.zeros(1, 31).int(), "bias must be a floating-point tensor"),
]


@pytest.mark.parametrize(("names", "value", "message"), BAD)
def test_bad_input_names_the_argument(names, value, message):
    arguments = dict.fromkeys(("query", "key", "value"), GOOD)
    with pytest.raises((TypeError, ValueError), match=message):
        sparseflash.attention(**arguments | dict.fromkeys(names.split(), value))


@pytest.mark.parametrize("everywhere", [False, True])
def test_torch_may_ask_for_determinism(everywhere, monkeypatch):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: everywhere)
    assert sparseflash.AttentionOptions(deterministic=False).deterministic == everywhere


def test_an_impossible_call_lists_every_reason():
    query = torch.zeros(1, 1, 16, 512, dtype=torch.float64)
    with pytest.raises(
        sparseflash.BackendError, match=r"(?s)torch.float64.*triton: .*dtype is.*head_dim is 512"
    ):
        sparseflash.attention(query, query, query, backend="triton")


@pytest.mark.slow_interpreted
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_masks_of_batch_elements(backend, heads):
    device = BACKENDS[backend]
    if (backend, device) == ("triton", "cpu") and heads != 2:
        pytest.skip("Triton's interpreter is slow")
    tensors = make_inputs(2, 4, 40, 33, 16, kv_heads=2, device=device)[:3]
    first, second = masks.local(9, align="top-left"), masks.random(0.5)
    own = [masks.stack([first] * heads), second]
    mask = masks.MaskBatch.from_masks([m((40, 33), 16, device) for m in own])

    def attend(q, k, v):
        return sparseflash.attention(q, k, v, mask, return_lse=True, backend=backend)

    with poisoned_empty():
        check_attention(attend, *tensors, mask)


def test_padding_anywhere_and_in_a_graph():
    tensors = make_inputs(3, 2, 40, 40, 8)[:3]
    keys = torch.rand(3, 40) < 0.5
    mask = masks.MaskBatch.with_keys(masks.causal()(40, 16), keys)
    allowed = masks.causal()(40, 16).to_dense() & keys[:, None, None]

    def attend(q, k, v):
        return sparseflash.attention(q, k, v, mask, return_lse=True)

    check_attention(attend, *tensors, allowed)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*tensors)[0], attend(*tensors)[0])
    mass = sparseflash.block_mass(*tensors[:2], mask)
    each = [
        sparseflash.block_mass(q[None], k[None], mask[b])
        for b, (q, k) in enumerate(zip(*tensors[:2], strict=True))
    ]
    torch.testing.assert_close(mass, torch.cat(each))
    with pytest.raises(ValueError, match="mask must have 1 or 2 batch elements, got 3"):
        sparseflash.attention(*(x[:2] for x in tensors), mask)
    with pytest.raises(ValueError, match="mask must have 1 batch elements, got 3"):
        sparseflash.attention(*(x[:1] for x in tensors), mask)
