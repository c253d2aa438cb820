"""The Triton kernels against float64: in the interpreter on a CPU, compiled where there is a
GPU.
"""

from functools import partial

import pytest
import torch

from masks.block_mask import BlockMask
from sparseflash.backends import triton as triton_backend
from sparseflash.testing import STRIDES, make_inputs
from tests.helpers.calls import check_gradients_in_memory
from tests.helpers.triton_calls import DEVICE, DTYPES, block_sparse, check, mixed_mask


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("head_dim", "block_size", "q_len", "k_len"),
    [
        (8, (16, 16), 70, 50),
        (20, (32, 32), 63, 111),
        (40, (64, 32), 150, 100),
        (64, (32, 64), 96, 129),
        (96, (16, 64), 33, 160),
    ],
)
def test_mixed_blocks(dtype, head_dim, block_size, q_len, k_len):
    inputs = make_inputs(1, 1, q_len, k_len, head_dim, dtype=dtype, device=DEVICE)
    check(inputs, mixed_mask(q_len, k_len, block_size), block_size)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("head_dim", "block_size"),
    [
        (32, (128, 128)),
        (64, (128, 128)),
        (64, (64, 64)),
        (80, (128, 64)),
        (128, (128, 128)),
        (128, (64, 64)),
        (192, (64, 256)),
        (256, (256, 128)),
    ],
)
def test_large_blocks(dtype, head_dim, block_size):
    inputs = make_inputs(2, 4, 1000, 777, head_dim, kv_heads=2, dtype=dtype, device=DEVICE)
    check(inputs, mixed_mask(1000, 777, block_size, num_masks=4), block_size)


@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "num_masks"), [(2, 2, 1, 1), (1, 3, 1, 3), (2, 2, 2, 2)]
)
def test_grouped_heads_and_masks_per_head(batch, heads, kv_heads, num_masks):
    inputs = make_inputs(batch, heads, 40, 70, 16, kv_heads=kv_heads, device=DEVICE)
    check(inputs, mixed_mask(40, 70, (16, 32), num_masks), (16, 32))


@pytest.mark.parametrize(
    ("block_size", "lengths"), [((16, 16), [0, 64, 75]), ((32, 64), [1, 64, 75, 100])]
)
def test_key_lengths(block_size, lengths):
    query, key, value, grad_out = make_inputs(len(lengths), 1, 48, 100, 16, device=DEVICE)
    lengths = torch.tensor(lengths, device=DEVICE)
    dense = mixed_mask(48, 100, block_size)
    dense[:, 16:] = True
    attend = partial(check, dense=dense, block_size=block_size, key_lengths=lengths)
    results = attend((query, key, value, grad_out))
    padding = torch.arange(100, device=DEVICE) >= lengths[:, None, None]
    padding = padding.unsqueeze(-1).expand_as(key)
    for name in ("dk", "dv"):
        assert results[name][padding].count_nonzero() == 0

    poison = torch.full_like(key, float("nan"))
    mask = BlockMask.from_dense(dense[0], block_size)
    out, lse = block_sparse(
        query,
        torch.where(padding, poison, key),
        torch.where(padding, poison, value),
        mask,
        key_lengths=lengths,
    )
    assert torch.equal(out, results["out"])
    assert torch.equal(lse, results["lse"])


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["key", "value"])
def test_how_far_a_masked_number_reaches(where, number):
    """As the docstring of attention says: to queries whose block row has a block at that key."""
    query, key, value, grad_out = make_inputs(1, 1, 96, 80, 16, device=DEVICE)
    blocks = torch.tensor([[1, 1, 0, 0, 1], [1, 1, 0, 1, 0], [1, 0, 0, 1, 1]] * 2).bool()
    dense = blocks.repeat_interleave(16, 0).repeat_interleave(16, 1)
    dense[:, 20] = False
    mask = BlockMask.from_dense(dense.to(DEVICE), (16, 16))

    def results(*inputs):
        leaves = [x.detach().requires_grad_() for x in inputs]
        out, lse = block_sparse(*leaves, mask)
        return out, lse, *torch.autograd.grad(out, leaves, grad_out)

    clean = results(query, key, value)
    changed = {"key": key.clone(), "value": value.clone()}
    changed[where][:, :, 20] = number
    out, lse, dq, dk, dv = results(query, changed["key"], changed["value"])
    reached = torch.arange(96, device=DEVICE) % 48 < 32
    assert torch.equal(lse, clean[1])
    assert torch.equal(out[..., ~reached, :], clean[0][..., ~reached, :])
    assert torch.equal(dq[..., ~reached, :], clean[2][..., ~reached, :])
    assert torch.equal(dv, clean[4])
    assert dq[..., reached, :].isnan().all()
    if where == "key":
        assert torch.equal(out, clean[0])
        assert torch.equal(dk, clean[3])
    else:
        assert out[..., reached, :].isnan().all()


@pytest.mark.parametrize("seed", [0, -7, 5 << 40])
def test_dropout(seed):
    inputs = make_inputs(2, 2, 30, 40, 16, kv_heads=1, device=DEVICE)
    check(inputs, mixed_mask(30, 40, (32, 16)), (32, 16), dropout_p=0.3, seed=seed)


@pytest.mark.parametrize(("bm", "bn"), [(16, 16), (32, 16), (16, 32), (32, 32)])
def test_dropout_does_not_depend_on_tiles(bm, bn):
    from experiments.instruments.tuning import configured
    from sparseflash.backends.triton import configs

    inputs = make_inputs(1, 2, 64, 64, 16, device=DEVICE)
    with configured(configs.Config(bm, bn, 4, 2), *configs.PASSES):
        check(inputs, mixed_mask(64, 64, (32, 32)), (32, 32), dropout_p=0.5, seed=3)


@pytest.mark.parametrize("strides", STRIDES)
def test_strides(strides):
    inputs = make_inputs(2, 2, 40, 56, 24, dtype=torch.float16, device=DEVICE, strides=strides)
    check(inputs, mixed_mask(40, 56, (16, 16)), (16, 16))


@pytest.mark.gpu
@pytest.mark.parametrize("strides", STRIDES)
def test_strides_of_large_blocks(strides):
    inputs = make_inputs(2, 2, 500, 300, 64, dtype=torch.float16, device=DEVICE, strides=strides)
    check(inputs, mixed_mask(500, 300, (128, 128)), (128, 128))


@pytest.mark.gpu
def test_offsets_beyond_32_bits():
    query, key, value, grad_out = make_inputs(
        1, 1, 300, 300, 64, dtype=torch.float16, device=DEVICE
    )
    far = torch.empty(300, 1 << 23, dtype=torch.float16, device=DEVICE)[None, None, :, :64]
    far.copy_(key)
    check((query, far, value, grad_out), mixed_mask(300, 300, (64, 64)), (64, 64))


@pytest.mark.parametrize(
    ("rows", "side"), [("one long row", 8), ("equal rows", 4), ("empty", 2), ("full", 2)]
)
def test_rows_of_any_length(rows, side):
    i, j = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    blocks = {
        "one long row": (i == j) | (i == 3),
        "equal rows": (i == j) | ((i + 3) % side == j),
        "empty": i < 0,
        "full": i >= 0,
    }[rows]
    dense = blocks.repeat_interleave(16, 0).repeat_interleave(16, 1)
    inputs = make_inputs(1, 2, 16 * side, 16 * side, 16, device=DEVICE)
    results = check(inputs, dense[None], (16, 16))
    if rows == "empty":
        assert results["lse"].isneginf().all()
        assert all(results[name].count_nonzero() == 0 for name in ("out", "dq", "dk", "dv"))


def test_only_the_gradients_that_are_needed():
    inputs = make_inputs(1, 1, 40, 56, 16, device=DEVICE)
    mask = BlockMask.from_dense(mixed_mask(40, 56, (16, 16))[0], (16, 16))

    def gradients(*needs):
        leaves = [x.detach().requires_grad_(n) for x, n in zip(inputs[:3], needs, strict=True)]
        out, _ = block_sparse(*leaves, mask)
        out.backward(inputs[3])
        return [x.grad for x in leaves]

    every = gradients(True, True, True)
    for i in range(3):
        needs = [i == j for j in range(3)]
        for one, full, needed in zip(gradients(*needs), every, needs, strict=True):
            assert torch.equal(one, full) if needed else one is None


def test_masked_keys_change_no_bit():
    query, key, value, _ = make_inputs(1, 2, 40, 64, 16, device=DEVICE)
    dense = mixed_mask(40, 64, (16, 16))[0]
    dense[:, 20:30] = False
    mask = BlockMask.from_dense(dense, (16, 16))
    expected = block_sparse(query, key, value, mask)
    key[:, :, 20:30] = torch.randn_like(key[:, :, 20:30])
    value[:, :, 20:30] = torch.randn_like(value[:, :, 20:30])
    for result, same in zip(block_sparse(query, key, value, mask), expected, strict=True):
        assert torch.equal(result, same)


@pytest.mark.gpu
def test_repeated_runs_give_the_same_bits():
    inputs = make_inputs(2, 4, 1024, 1024, 64, dtype=torch.bfloat16, device=DEVICE)
    dense = mixed_mask(1024, 1024, (128, 128))
    first = check(inputs, dense, (128, 128))
    for _ in range(20):
        again = check(inputs, dense, (128, 128))
        assert all(torch.equal(first[name], again[name]) for name in first)


def test_empty_batch():
    inputs = make_inputs(0, 2, 32, 32, 16, device=DEVICE)
    check(inputs, torch.ones(1, 32, 32, dtype=torch.bool), (16, 16))


def test_gradients_in_given_memory():
    inputs = make_inputs(2, 2, 50, 70, 16, kv_heads=1, value_dim=24, device=DEVICE)
    mask = BlockMask.from_dense(mixed_mask(50, 70, (16, 32))[0], (16, 32)).to(DEVICE)
    check_gradients_in_memory(triton_backend, *inputs, mask)
