from functools import partial
from itertools import permutations, product

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import masks
import sparseflash
from masks import BlockMask
from sparseflash.backends import cpu
from sparseflash.backends.cpu import few_queries, plan
from sparseflash.backends.cpu.workspace import Workspace
from sparseflash.dispatch.autograd import run
from sparseflash.reference import standard_attention
from sparseflash.testing import STRIDES, check_attention, make_inputs, poisoned_empty
from sparseflash.testing.error_budget import assert_close_to_reference
from tests.helpers.calls import call_on, check_gradients_in_memory, plan_of, spec_of

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PATTERNS = {
    "full": lambda q, k: q >= 0,
    "causal": lambda q, k: q >= k,
    "local": lambda q, k: (q - k).abs() <= 20,
    "butterfly": lambda q, k: ((q // 16) ^ (k // 16)).bitwise_and((q // 16 ^ k // 16) - 1) == 0,
    "documents": lambda q, k: q // 50 == k // 50,
    "scattered": lambda q, k: (q * 7919 + k * 104729) % 11 < 3,
    "no keys": lambda q, k: (k < 40) & (q % 48 >= 24),
    "nothing": lambda q, k: q < 0,
}


def dense_mask(pattern: str, q_len: int, k_len: int) -> torch.Tensor:
    pairs = PATTERNS[pattern](torch.arange(q_len).view(-1, 1), torch.arange(k_len))
    return pairs.expand(q_len, k_len)


def mask_of(dense: torch.Tensor, block_size=16) -> BlockMask:
    return BlockMask.from_dense(dense, block_size)


def attention_with(mask, seed=0, **options):
    """fn(query, key, value) -> (out, lse) on the cpu backend."""

    def attention(query, key, value):
        return run(call_on(cpu, query, key, mask, seed=seed, **options), query, key, value)

    return attention


def check(dense, inputs, block_size=16, **options):
    query, key, value, grad_out = inputs
    attention = attention_with(mask_of(dense, block_size), **options)
    with poisoned_empty():
        return check_attention(attention, query, key, value, dense, grad_out=grad_out, **options)


@pytest.fixture
def small_chunks(monkeypatch):
    """Problems are cut into parts, long rows into segments and groups into several chunks."""
    monkeypatch.setattr(plan, "PROBLEM_FLOATS", 16 * 40)
    monkeypatch.setattr(plan, "CHUNK_FLOATS", 2**12)
    monkeypatch.setattr(plan, "PART_QUERIES", 4)
    monkeypatch.setattr(plan, "SEGMENT_KEYS", (16, 32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_pattern(pattern, dtype):
    check(dense_mask(pattern, 130, 117), make_inputs(2, 2, 130, 117, 20, dtype=dtype))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_parts_and_chunks(pattern, small_chunks):
    options = {"dropout_p": 0.3, "seed": 5, "key_lengths": torch.tensor([117, 31])}
    check(dense_mask(pattern, 130, 117), make_inputs(2, 2, 130, 117, 8), **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [1, 8, 20, 64, 96])
def test_head_dim(head_dim, dtype):
    check(dense_mask("causal", 70, 70), make_inputs(1, 2, 70, 70, head_dim, dtype=dtype))


@pytest.mark.parametrize(("q_len", "k_len"), [(1, 1), (1, 111), (63, 17), (200, 111)])
@pytest.mark.parametrize("block_size", [16, 64, (16, 128), (128, 32)])
def test_lengths_and_blocks(q_len, k_len, block_size):
    dense = dense_mask("scattered", q_len, k_len)
    check(dense, make_inputs(1, 2, q_len, k_len, 16), block_size)


@pytest.mark.parametrize("strides", STRIDES)
def test_strides(strides):
    check(dense_mask("local", 70, 90), make_inputs(2, 2, 70, 90, 20, strides=strides))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("per_head", [False, True])
def test_grouped_and_per_head(kv_heads, per_head):
    dense = dense_mask("local", 70, 90)
    if per_head:
        names = ("causal", "local", "causal", "scattered")
        dense = torch.stack([dense_mask(name, 70, 90) for name in names])
    check(dense, make_inputs(2, 4, 70, 90, 16, kv_heads=kv_heads))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_dropout_and_padding(dropout_p, dtype):
    lengths = torch.tensor([0, 1, 50, 90])
    inputs = make_inputs(4, 4, 70, 90, 16, kv_heads=2, dtype=dtype)
    options = {"dropout_p": dropout_p, "seed": 2**40 + 3, "key_lengths": lengths}
    results = check(dense_mask("causal", 70, 90), inputs, 32, **options)
    padded = torch.arange(90) >= lengths.view(-1, 1)
    for grad in results["dk"], results["dv"]:
        assert (grad.transpose(1, 2)[padded] == 0).all()


def test_scale_and_large_scores():
    inputs = make_inputs(1, 2, 70, 70, 16, scale=4.0)
    check(dense_mask("causal", 70, 70), inputs, scale=0.5)


def test_gradcheck():
    table = mask_of(dense_mask("no keys", 50, 45))
    attention = attention_with(table, seed=3, dropout_p=0.2, key_lengths=torch.tensor([37]))
    query, key, value, _ = make_inputs(1, 2, 50, 45, 3, kv_heads=1, dtype=torch.float64)

    def finite(*inputs):
        out, lse = attention(*inputs)
        return out, lse.nan_to_num(neginf=0)

    assert attention(query, key, value)[1].dtype == torch.float64
    inputs = [x.requires_grad_() for x in (query, key, value)]
    assert torch.autograd.gradcheck(finite, inputs, fast_mode=True)


def results_of(attention, query, key, value, grad_out):
    inputs = [x.detach().clone().requires_grad_() for x in (query, key, value)]
    out, lse = attention(*inputs)
    return out, lse, *torch.autograd.grad((out, lse), inputs, (grad_out, torch.ones_like(lse)))


def test_repeated_runs_give_the_same_bits():
    attention = attention_with(mask_of(dense_mask("scattered", 300, 300)), seed=1, dropout_p=0.1)
    inputs = make_inputs(2, 4, 300, 300, 24, kv_heads=2)
    first = results_of(attention, *inputs)
    for _ in range(3):
        assert all(map(torch.equal, results_of(attention, *inputs), first))


def test_masked_keys_change_no_bit():
    dense = dense_mask("causal", 100, 100) & (torch.arange(100) % 3 != 1)
    attention = attention_with(mask_of(dense))
    query, key, value, grad_out = make_inputs(1, 2, 100, 100, 16)
    first = results_of(attention, query, key, value, grad_out)
    key[:, :, 1::3], value[:, :, 1::3] = 100.0, -100.0
    assert all(map(torch.equal, results_of(attention, query, key, value, grad_out), first))


def test_padded_keys_change_no_bit_even_when_nan():
    attention = attention_with(
        mask_of(dense_mask("causal", 100, 100)), key_lengths=torch.tensor([37])
    )
    query, key, value, grad_out = make_inputs(1, 2, 100, 100, 16)
    first = results_of(attention, query, key, value, grad_out)
    key[:, :, 37:], value[:, :, 37:] = torch.nan, torch.nan
    assert all(map(torch.equal, results_of(attention, query, key, value, grad_out), first))


def test_computes_only_what_is_needed():
    query, key, value, grad_out = make_inputs(1, 2, 70, 70, 16)
    call = call_on(cpu, query, key, mask_of(dense_mask("causal", 70, 70)))
    saved = (query, key, value, *cpu.forward(call, query, key, value))

    def grads(*needs):
        return cpu.backward(call, grad_out, None, saved, needs)

    everything = grads(True, True, True, False, False, False)
    for i in range(3):
        needs = [j == i for j in range(6)]
        found = grads(*needs)
        assert [g is not None for g in found] == needs
        assert torch.equal(found[i], everything[i])


def count_flops() -> FlopCounterMode:
    """Counts the in-place product as well, which torch forgets."""

    def product(_, a, b, **kwargs) -> int:
        return 2 * a[0] * a[1] * a[2] * b[2]

    return FlopCounterMode(display=False, custom_mapping={torch.ops.aten.baddbmm_: product})


@pytest.mark.parametrize("pattern", ["full", "causal", "butterfly"])
def test_flops_are_those_of_the_non_zero_blocks(pattern):
    batch, heads, length, dim, block = 2, 3, 256, 8, 16
    mask = BlockMask.from_dense(dense_mask(pattern, length, length), block)
    query, key, value, grad_out = make_inputs(batch, heads, length, length, dim)
    inputs = [x.requires_grad_() for x in (query, key, value)]
    product = 2 * dim * batch * heads * mask.nnz_blocks * block**2
    with count_flops() as forward:
        out, _ = attention_with(mask)(*inputs)
    assert forward.get_total_flops() == 2 * product
    with count_flops() as backward:
        torch.autograd.grad(out, inputs, grad_out)
    assert backward.get_total_flops() == 5 * product


class LargestTensor(TorchDispatchMode):
    """The bytes of the largest storage that any operation returned."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else [result]:
            if isinstance(x, torch.Tensor):
                self.nbytes = max(self.nbytes, x.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.1, "seed": 1}], ids=["plain", "dropout"])
def test_no_tensor_grows_faster_than_the_sequence(small_chunks, options):
    def largest(length: int) -> int:
        table = mask_of(dense_mask("full", length, length))
        query, key, value, grad_out = make_inputs(1, 1, length, length, 16)
        with LargestTensor() as mode:
            results_of(attention_with(table, **options), query, key, value, grad_out)
        return mode.nbytes

    assert largest(512) <= 2 * largest(256)


def test_saves_inputs_and_results_only():
    saved = []
    query, key, value, _ = make_inputs(1, 2, 128, 128, 16)
    inputs = [x.requires_grad_() for x in (query, key, value)]
    attention = attention_with(mask_of(dense_mask("full", 128, 128)))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.shape), lambda x: x):
        attention(*inputs)
    assert sorted(saved) == sorted([query.shape] * 4 + [query.shape[:3]])


def test_why_not():
    query, key, _, _ = make_inputs(1, 1, 16, 16, 8)
    mask = mask_of(dense_mask("full", 16, 16))
    assert cpu.why_not(spec_of(query, key, mask), mask) == []
    assert "meta" in cpu.why_not(spec_of(query.to("meta"), key, mask), mask)[0]


UNATTENDED = [torch.nan, torch.inf, -torch.inf]


@pytest.mark.parametrize("number", UNATTENDED)
@pytest.mark.parametrize("block_size", [16, 32, (64, 16), 128])
@pytest.mark.parametrize("where", ["key", "value", "both"])
@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.3, "seed": 2}], ids=["plain", "dropout"])
def test_what_no_query_attends_may_be_anything(number, block_size, where, options):
    inputs = make_inputs(2, 4, 90, 100, 8, kv_heads=2)
    dense = dense_mask("scattered", 90, 100).clone()
    dense[:, [3, 40, 99]] = False
    attention = attention_with(mask_of(dense, block_size), **options)
    expected = results_of(attention, *inputs)
    _, key, value, _ = inputs
    for name, tensor in (("key", key), ("value", value)):
        if where in (name, "both"):
            tensor[0, 1, [3, 40], 2] = number
            tensor[1, :, 99] = number
    results = results_of(attention, *inputs)
    assert all(map(torch.equal, results, expected))


@pytest.mark.parametrize("where", [1, 2], ids=["key", "value"])
@pytest.mark.parametrize("number", UNATTENDED)
@pytest.mark.parametrize("block_size", [16, 64])
def test_other_queries_are_those_of_clean_keys(where, number, block_size):
    inputs = make_inputs(1, 2, 100, 100, 8)
    attention = attention_with(mask_of(dense_mask("causal", 100, 100), block_size))
    expected = results_of(attention, *inputs)
    inputs[where][:, 1, 60] = number
    results = results_of(attention, *inputs)
    for result, other in zip(results, expected, strict=True):
        assert torch.equal(result[:, 0], other[:, 0])  # the other head
    for result, other in zip(results[:3], expected[:3], strict=True):
        assert torch.equal(result[:, 1, :60], other[:, 1, :60])
    assert not results[0][:, 1, 60:].isfinite().all()


@pytest.mark.parametrize("q_len", [1, 3, 5, 16, 17, 40])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_few_queries_of_grouped_heads(q_len, kv_heads, small_chunks):
    lengths = torch.tensor([150, 61])
    dense = dense_mask("scattered", q_len, 150)
    inputs = make_inputs(2, 6, q_len, 150, 8, kv_heads=kv_heads)
    for options in ({}, {"key_lengths": lengths}, {"dropout_p": 0.3, "seed": 3}):
        check(dense, inputs, 32, **options)


def same_keys(q_len, k_len, *runs):
    dense = torch.zeros(q_len, k_len, dtype=torch.bool)
    for begin, end in runs:
        dense[:, begin:end] = True
    return dense


def is_one_operation(inputs, mask, **options) -> bool:
    """Whether the forward pass is torch's own attention of the attended keys."""
    query, key, value, _ = inputs
    call = call_on(cpu, query, key, mask, value, **options)
    return few_queries.forward(call, query, key, value) is not None


def check_one_operation(dense, inputs, block_size=16, **options):
    """Checks the results of a call that needs no gradient, and one that does."""
    tensors, mask = inputs[:3], mask_of(dense, block_size)
    assert is_one_operation(inputs, mask, **options)
    actual = attention_with(mask, **options)(*tensors)
    exact, eager = (
        standard_attention(*(x.to(dtype) for x in tensors), dense, dtype=dtype, **options)
        for dtype in (torch.float64, tensors[0].dtype)
    )
    for name, *results in zip(("out", "lse"), actual, exact, eager, strict=True):
        assert_close_to_reference(*results, dtype=tensors[0].dtype, name=name)
    check(dense, inputs, block_size, **options)


@pytest.mark.parametrize("q_len", [1, 7, 16])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("runs", [[(0, 150)], [(37, 38)], [(0, 33), (60, 61), (149, 150)]])
@pytest.mark.parametrize("strides", STRIDES)
def test_few_queries_of_the_same_keys(q_len, kv_heads, runs, strides):
    inputs = make_inputs(2, 4, q_len, 150, 8, kv_heads=kv_heads, strides=strides)
    dense = same_keys(q_len, 150, *runs)
    for options in ({}, {"key_lengths": torch.tensor([61, 61]), "scale": 0.7}):
        check_one_operation(dense, inputs, 32, **options)


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("head_dim", [8, 40, 64, 256])
@pytest.mark.parametrize("q_len", [1, 7, 16])
def test_few_queries_in_16_bits(dtype, head_dim, q_len):
    inputs = make_inputs(2, 4, q_len, 600, head_dim, dtype=dtype, kv_heads=2)
    dense = same_keys(q_len, 600, (0, 401), (490, 501))
    for options in ({}, {"key_lengths": torch.tensor([500, 500]), "scale": 2.0}):
        check_one_operation(dense, inputs, 32, **options)


@pytest.mark.parametrize("name", ["key", "value"])
def test_few_queries_of_keys_in_rows_that_overlap(name):
    inputs = list(make_inputs(1, 2, 1, 40, 8))
    inputs[("key", "value").index(name) + 1] = torch.randn(1, 2, 86).unfold(2, 8, 2)
    dense = same_keys(1, 40, (3, 30))
    check_one_operation(dense, inputs)


def test_few_queries_of_no_key_or_of_scores_of_minus_infinity():
    query, key, value, _ = inputs = make_inputs(1, 2, 1, 40, 8)
    mask = mask_of(same_keys(1, 40, (20, 40)))
    assert not is_one_operation(inputs, mask, key_lengths=torch.tensor([20]))
    query[0, 1] = 1.0
    key[0, 1, :, 3] = -torch.inf
    out, lse = attention_with(mask)(query, key, value)
    assert lse[0, 0].isfinite().all()
    assert (lse[0, 1] == -torch.inf).all()
    assert (out[0, 1] == 0).all()


def test_other_calls_of_few_queries_are_batched_products():
    halved = sparseflash.ScoreFunction("halved", lambda s, b, h, q, k: (s / 2, 0.5))
    inputs = make_inputs(2, 2, 3, 40, 8)
    mask = mask_of(same_keys(3, 40, (0, 40)))
    assert is_one_operation(inputs, mask)
    for options in (
        {"dropout_p": 0.5}, {"softcap": 2.0}, {"score": halved}, {"max_logits": True},
        {"bias": torch.zeros(1, 42)}, {"key_lengths": torch.tensor([40, 39])},
    ):  # fmt: skip
        assert not is_one_operation(inputs, mask, **options)
    assert not is_one_operation(inputs, mask_of(dense_mask("causal", 3, 40)))
    by_head = torch.stack([same_keys(3, 40, (0, 40)), same_keys(3, 40, (0, 20))])
    assert not is_one_operation(inputs, mask_of(by_head))
    every_second = same_keys(3, 40, *((i, i + 1) for i in range(0, 40, 2)))
    assert not is_one_operation(inputs, mask_of(every_second))
    assert not is_one_operation(make_inputs(2, 2, 3, 40, 8, value_dim=16), mask)
    inputs = make_inputs(2, 2, 17, 40, 8)
    assert not is_one_operation(inputs, mask_of(same_keys(17, 40, (0, 40))))


@pytest.mark.parametrize("name", range(3))
def test_few_queries_whose_gradients_are_needed_are_batched_products(name):
    inputs = make_inputs(1, 2, 1, 40, 8)
    mask = mask_of(same_keys(1, 40, (0, 40)))
    assert is_one_operation(inputs, mask)
    inputs[name].requires_grad_()
    assert not is_one_operation(inputs, mask)


def test_decoding_copies_no_keys(monkeypatch):
    query, key, value, _ = make_inputs(1, 8, 1, 3000, 16, kv_heads=2)
    monkeypatch.setattr(Workspace, "take", refuse_keys(Workspace.take))
    monkeypatch.setattr(few_queries, "forward", lambda *_: None)
    attention_with(BlockMask.from_dense(torch.ones(1, 3000, dtype=torch.bool), 128))(
        query, key, value
    )


def refuse_keys(take):
    def taken(workspace, name, shape, dtype):
        assert name not in ("key", "value")
        return take(workspace, name, shape, dtype)

    return taken


@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("lengths", [(16, 16), (32, 96), (5, 32)])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_blocks_that_are_consecutive_in_any_layout(strides, lengths, kv_heads):
    for batch in (1, 2):
        inputs = make_inputs(batch, 4, *lengths, 8, kv_heads=kv_heads, strides=strides)
        check(dense_mask("full", *lengths), inputs, (32, 16))
        check(dense_mask("causal", *lengths), inputs, 16)


def test_a_call_in_inference_mode_leaves_memory_that_training_can_use():
    workspace = Workspace()
    with torch.inference_mode():
        workspace.take("products", (4,), torch.float32)
    workspace.take("products", (4,), torch.float32).fill_(1.0)


@pytest.mark.parametrize("length", [32, 40])
def test_results_are_no_views(length):
    tensors = [x.requires_grad_() for x in make_inputs(1, 2, length, length, 8)[:3]]
    out = sparseflash.attention(*tensors, masks.full().with_block_size(16), backend="cpu")
    out += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize(
    ("pattern", "seq_len", "own", "read"),
    [
        (masks.causal(), 32, (16, 16), (32, 32)),
        (masks.causal(), 128, (16, 16), (128, 128)),
        (masks.causal(), 128, (16, 64), (128, 128)),
        (masks.causal(), 120, (128, 128), (128, 128)),
        (masks.causal(), 33, (128, 128), (128, 64)),
        (masks.causal(), 5, (128, 128), (128, 16)),
        (masks.causal(), 2048, (64, 64), (64, 64)),
        (masks.full(), 128, (16, 16), (16, 16)),
        (masks.local(16), 1024, (16, 16), (16, 16)),
    ],
    ids=str,
)
def test_small_calls_start_few_products(pattern, seq_len, own, read):
    mask = pattern(seq_len, own)
    query = torch.randn(1, 4, seq_len, 16)
    of_call = plan_of(query, query, query, mask)
    assert of_call.table.block_size == read
    assert len(list(plan.chunks(of_call))) <= max(3, seq_len // read[0])
    tiles = sparseflash.explain(query, query, query, mask).configuration.get("tiles", "")
    how = "merged" if read > own else "split"
    assert tiles == (f"{read}, {how} from blocks of {own}" if read != own else "")


@pytest.mark.parametrize(("seq_len", "block_size"), [(16, 16), (32, 16), (64, 128), (128, 128)])
def test_small_calls_start_few_operations_of_torch(seq_len, block_size):
    """Each takes some microseconds, which is most of the time of a small call."""
    mask = masks.causal()(seq_len, block_size)
    leaves = [torch.randn(1, 4, seq_len, 16).requires_grad_() for _ in range(3)]
    with torch.no_grad():
        attend = partial(sparseflash.attention, *leaves, mask)
        attend()
        assert operations(attend) <= 45
    out = sparseflash.attention(*leaves, mask)
    assert operations(partial(torch.autograd.grad, out, leaves, torch.randn_like(out))) <= 90


def test_blocks_at_equal_steps_are_not_copied(monkeypatch):
    """The same rows of all heads are at equal steps, so that each product reads them in place."""
    mask, leaves = masks.causal()(256, 128), torch.randn(3, 1, 4, 256, 64).unbind()
    of_call = plan_of(*leaves, mask)
    assert of_call.table.block_size == (128, 128)
    rows = [chunk.strided_queries for chunk in plan.chunks(of_call)]
    # The row with all keys is the first one: it writes the sums over keys that others add to.
    assert [(row.first, row.step, row.count) for row in rows] == [(1, 2, 1), (0, 2, 1)]
    assert plan.layout_of(of_call).all_keys
    sparseflash.attention(*leaves, mask)
    for name in ("index_select", "index_copy_"):
        monkeypatch.setattr(torch.Tensor, name, None)
    monkeypatch.setattr(Workspace, "take", refuse_keys(Workspace.take))
    sparseflash.attention(*leaves, mask)


@pytest.mark.parametrize("pattern", ["causal", "local", "documents", "no keys"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_blocks_at_equal_steps_of_grouped_heads(pattern, kv_heads):
    dense = dense_mask(pattern, 96, 96)
    for strides in STRIDES:
        check(dense, make_inputs(2, 4, 96, 96, 8, kv_heads=kv_heads, strides=strides), 16)


def masks_of_few_blocks():
    """Small masks of blocks: rows in any order, and rows of consecutive blocks at any step."""
    for order in permutations(range(3)):
        yield torch.eye(3, dtype=torch.bool)[list(order)]
    row, column = torch.arange(3).view(-1, 1), torch.arange(5)
    for width, step, first in product((1, 2, 3), (-2, -1, 0, 1, 2), (0, 2, 4)):
        begin = first + step * row
        yield (column >= begin) & (column < begin + width)
    for seed in range(20):
        yield torch.rand(3, 4, generator=torch.Generator().manual_seed(seed)) < 0.5


@pytest.mark.parametrize("side", [16, 64])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 2)])
def test_rows_of_blocks_in_any_order(heads, kv_heads, side):
    for blocks in masks_of_few_blocks():
        dense = blocks.repeat_interleave(side, 0).repeat_interleave(side, 1)
        check(dense, make_inputs(1, heads, *dense.shape, 8, kv_heads=kv_heads), side)


def test_decoding_starts_few_operations_of_torch():
    """One query reads the keys of all heads where they are."""
    query, (key, value) = torch.randn(1, 4, 1, 64), torch.randn(2, 1, 4, 4096, 64)
    attend = partial(sparseflash.attention, query, key, value)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(attend(), expected)
    assert operations(attend) <= 35
    text = str(sparseflash.explain(query, key, value))
    assert "torch's attention of the keys that every query attends, if no gradient" in text


def test_a_row_of_few_queries_is_not_divided():
    query, (key, value) = torch.randn(1, 4, 1, 64), torch.randn(2, 1, 4, 4096, 64)
    (chunk,) = plan.chunks(plan_of(query, key, value, masks.full()((1, 4096))))
    assert chunk.width == 4096


def operations(function):
    """How many operations of torch a function starts, those within others counted too."""
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as recorded:
        function()
    events = recorded.events()
    assert events
    return sum(event.name.startswith("aten::") for event in events)


@pytest.mark.parametrize(
    ("pattern", "read"),
    [
        (masks.local(16), (64, 64)),
        (masks.dilated(16, 4), (64, 64)),
        (masks.local(600), (128, 128)),
        (masks.causal(), (128, 128)),
        (masks.butterfly(), (128, 128)),
    ],
    ids=str,
)
def test_narrow_patterns_are_read_in_smaller_blocks(pattern, read):
    mask = pattern(2048)
    query, key, value, grad_out = make_inputs(1, 4, 2048, 2048, 16)
    assert plan_of(query, key, value, mask).table.block_size == read
    tiles = sparseflash.explain(query, key, value, mask).configuration.get("tiles", "")
    assert tiles == (f"{read}, split from blocks of (128, 128)" if read != (128, 128) else "")
    found = gradients_of(sparseflash.attention, query, key, value, grad_out, mask)
    bias = torch.zeros(2048, 2048).masked_fill(~mask.to_dense(), float("-inf"))
    expected = gradients_of(
        torch.nn.functional.scaled_dot_product_attention, query, key, value, grad_out, bias
    )
    for name, one, other in zip(("out", "dQ", "dK", "dV"), found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5, msg=name)


def test_smaller_blocks_are_counted_once_per_mask(monkeypatch):
    mask = masks.local(16)(2048)
    plan_of(*(x := torch.randn(3, 1, 4, 2048, 16)), mask)
    monkeypatch.setattr(plan, "computed_pairs", None)
    assert plan_of(*x.repeat(1, 2, 1, 1, 1), mask).table.block_size == (64, 64)


def gradients_of(attend, query, key, value, grad_out, mask):
    """Out and the gradients of query, key and value."""
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    out = attend(*leaves, mask)
    return out, *torch.autograd.grad(out, leaves, grad_out)


def test_blocks_that_only_the_device_or_another_sequence_knows_stay_as_they_are():
    query, mask = torch.randn(1, 1, 64, 16), masks.causal()(64, 16)
    chosen = mask.select(torch.ones(1, 1, 4, 4, dtype=torch.bool))
    assert cpu.block_size_for(spec_of(query, query, chosen), chosen) == (16, 16)
    part = spec_of(query, query, mask, bias=True, positions=True)
    assert cpu.block_size_for(part, mask) == (16, 16)
    assert cpu.block_size_for(spec_of(query, query, mask, bias=True), mask) == (64, 64)


def test_gradients_in_given_memory():
    """The backend makes new tensors, which the call copies."""
    query, key, value, grad_out = make_inputs(2, 2, 50, 70, 16, kv_heads=1, value_dim=24)
    check_gradients_in_memory(
        *(cpu, query, key, value, grad_out, mask_of(dense_mask("scattered", 50, 70))),
        written=False,
    )
