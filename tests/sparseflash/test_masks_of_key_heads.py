"""Masks of key heads: the query heads of a group share one selection of blocks."""

import pytest
import torch

import masks
import sparseflash
from masks import BlockMask, DynamicMask
from sparseflash.nn import SparseAttention
from sparseflash.reference import standard_attention
from sparseflash.testing import check_attention, make_inputs, poisoned_empty

HAS_GPU = torch.cuda.is_available()
BACKENDS = {"triton": "cuda"} if HAS_GPU else {"cpu": "cpu", "triton": "cpu"}
HEADS, KV_HEADS, LENGTHS, BLOCKS = 4, 2, (50, 75), (16, 32)
LOCAL = masks.stack([masks.causal(align="bottom-right"), masks.local(9, align="top-left")])


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


def inputs(device, q_len=LENGTHS[0]):
    return make_inputs(1, HEADS, q_len, LENGTHS[1], 16, kv_heads=KV_HEADS, device=device)


@pytest.mark.parametrize("q_len", [LENGTHS[0], 3])
def test_both_passes_against_the_reference(backend, q_len):
    device = BACKENDS[backend]
    mask = LOCAL((q_len, LENGTHS[1]), BLOCKS, device)

    def attend(q, k, v):
        return sparseflash.attention(q, k, v, mask, return_lse=True, backend=backend)

    with poisoned_empty():
        check_attention(attend, *inputs(device, q_len)[:3], mask)


def test_the_reference_gives_each_group_the_mask_of_its_key_head():
    """Query heads 0 and 1 read key head 0, 2 and 3 key head 1."""
    mask, each = LOCAL(LENGTHS, BLOCKS), masks.stack([LOCAL(LENGTHS).head(h) for h in (0, 1)])
    tensors = inputs("cpu")[:3]
    expected = masks.stack([each.head(h // 2) for h in range(HEADS)])
    for result, wanted in zip(
        standard_attention(*tensors, mask), standard_attention(*tensors, expected), strict=True
    ):
        assert torch.equal(result, wanted)


@pytest.mark.slow_interpreted
def test_scores_of_a_dynamic_mask_get_the_sum_over_their_group(backend):
    device = BACKENDS[backend]
    *tensors, grad_out = inputs(device)
    within = masks.causal(align="bottom-right")(LENGTHS, BLOCKS, device)
    scores = torch.rand(1, KV_HEADS, 4, 3, device=device, requires_grad=True)
    repeated = scores.detach().repeat_interleave(2, 1).requires_grad_()
    grads = []
    for own in (scores, repeated):
        mask = within.select_topk(own, 2)
        out = sparseflash.attention(*tensors, mask, backend=backend)
        grads.append(torch.autograd.grad(out, own, grad_out)[0])
    assert grads[0].shape == scores.shape
    assert grads[0].count_nonzero() > 0
    torch.testing.assert_close(grads[0], grads[1].unflatten(1, (KV_HEADS, 2)).sum(2))


def test_in_a_graph():
    tensors, mask = inputs("cpu")[:3], LOCAL(LENGTHS, BLOCKS)

    def attend(q, k, v):
        return sparseflash.attention(q, k, v, mask)

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*tensors), attend(*tensors))


def test_block_mass_and_modules_take_them():
    query, key = inputs("cpu")[:2]
    mask = LOCAL(LENGTHS, BLOCKS)
    repeated = masks.stack([mask.head(h // 2) for h in range(HEADS)])
    mass = sparseflash.block_mass(query, key, mask)
    torch.testing.assert_close(mass, sparseflash.block_mass(query, key, repeated))

    module = SparseAttention(32, HEADS, ["causal()", "local(9)"], kv_heads=KV_HEADS)
    each = SparseAttention(32, HEADS, ["causal()"] * 2 + ["local(9)"] * 2, kv_heads=KV_HEADS)
    each.load_state_dict(module.state_dict())
    x = torch.randn(1, 40, 32)
    torch.testing.assert_close(module(x), each(x))
    with pytest.raises(ValueError, match="pattern must be one pattern or a list of 2 or 4, got 3"):
        SparseAttention(32, HEADS, ["causal()"] * 3, kv_heads=KV_HEADS)


def test_the_lists_are_stored_once_for_a_group():
    mask = LOCAL(LENGTHS, BLOCKS)
    table = mask.table()
    grouped = table.for_groups(2)
    assert grouped.head_to_mask.tolist() == [[0, 0, 1, 1]]
    assert grouped.by_query is table.by_query
    assert grouped is table.for_groups(2)


@pytest.mark.parametrize(
    "mask",
    [
        masks.stack([masks.full()] * 3)(LENGTHS, BLOCKS),
        BlockMask.from_blocks(torch.ones(3, 4, 3).bool(), BLOCKS, LENGTHS),
        DynamicMask.from_blocks(torch.ones(3, 4, 3).bool(), BLOCKS, LENGTHS),
    ],
)
def test_other_heads_are_refused(mask):
    with pytest.raises(ValueError, match="mask must have 1 or 2 or 4 heads, got 3"):
        sparseflash.attention(*inputs("cpu")[:3], mask)


@pytest.mark.gpu
@pytest.mark.skipif(
    not HAS_GPU or torch.cuda.get_device_capability() != (9, 0),
    reason="needs compute capability 9.0",
)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("batched", [False, True])
def test_on_hopper(batched, dynamic):
    shape = {"dtype": torch.float16, "device": "cuda", "kv_heads": 2}
    tensors = make_inputs(2, 8, 500, 700, 128, **shape)[:3]
    mask = LOCAL((500, 700), 128, "cuda")
    if dynamic:
        batch = (2,) if batched else ()
        mask = mask.select_topk(torch.rand(*batch, 2, 4, 6, device="cuda"), 3)
    elif batched:
        mask = masks.MaskBatch.with_keys(mask, torch.rand(2, 700, device="cuda") < 0.5)

    def attend(q, k, v):
        return sparseflash.attention(q, k, v, mask, return_lse=True, backend="hopper")

    check_attention(attend, *tensors, mask)
