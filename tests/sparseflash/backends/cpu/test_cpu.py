"""The results of the backend "cpu" against float64, and the work and memory that they take."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import masks
import sparseflash
from masks import BlockMask
from sparseflash.backends import cpu
from sparseflash.backends.cpu import plan
from sparseflash.backends.cpu.workspace import Workspace
from sparseflash.testing import STRIDES, make_inputs
from tests.helpers.calls import call_on, check_gradients_in_memory, spec_of
from tests.helpers.cpu_calls import (
    DTYPES,
    PATTERNS,
    attention_with,
    check,
    dense_mask,
    mask_of,
    results_of,
)


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


@pytest.mark.parametrize("q_len", [1, 3, 5, 16, 17, 40])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_few_queries_of_grouped_heads(q_len, kv_heads, small_chunks):
    lengths = torch.tensor([150, 61])
    dense = dense_mask("scattered", q_len, 150)
    inputs = make_inputs(2, 6, q_len, 150, 8, kv_heads=kv_heads)
    for options in ({}, {"key_lengths": lengths}, {"dropout_p": 0.3, "seed": 3}):
        check(dense, inputs, 32, **options)


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


def test_gradients_in_given_memory():
    """The backend makes new tensors, which the call copies."""
    query, key, value, grad_out = make_inputs(2, 2, 50, 70, 16, kv_heads=1, value_dim=24)
    check_gradients_in_memory(
        *(cpu, query, key, value, grad_out, mask_of(dense_mask("scattered", 50, 70))),
        written=False,
    )
