"""Round trips through the masks of other libraries."""

from functools import partial

import pytest
import torch
from torch.nn.attention import flex_attention

import masks
from masks import interop

MASKS = {
    "full": masks.full(),
    "causal": masks.causal(align="bottom-right"),
    "holes": masks.random(0.3) - masks.global_tokens(40),
    "custom": masks.pattern(lambda q, k: (q * k) % 5 < 2),
    "heads": masks.stack([masks.butterfly(), masks.local(9, align="top-left"), masks.butterfly()]),
}
LISTS = interop.to_block_lists(masks.full()(64, 16))
SHAPES = [((64, 64), 16), ((70, 101), (16, 32)), ((130, 70), (64, 16))]


@pytest.fixture(params=SHAPES, ids=str)
def shape(request):
    return request.param


@pytest.mark.parametrize("name", MASKS)
def test_flex(name, shape):
    mask = MASKS[name](*shape)
    flex = interop.to_flex(mask)
    assert interop.from_flex(flex) == mask
    assert flex.shape == (1, mask.num_heads, *mask.seq_len)
    blocks = mask.to_blocks().view(1, mask.num_heads, mask.grid.nq, mask.grid.nk)
    assert torch.equal(flex.to_dense().bool(), blocks)
    everywhere = flex_attention.create_mask(
        flex.mask_mod, 1, mask.num_heads, *mask.seq_len, device="cpu"
    )
    assert torch.equal(everywhere[0], mask.to_dense().view(-1, *mask.seq_len))


@pytest.mark.parametrize("shape", [(100, 100), (96, 200)])
def test_flex_masks_made_by_torch(shape):
    document = torch.arange(200) // 30

    def mask_mod(b, h, q, k):
        return (q >= k) & ((document[q] == document[k]) | (h == 1))

    flex = flex_attention.create_block_mask(mask_mod, None, 2, *shape, "cpu", BLOCK_SIZE=32)
    expected = flex_attention.create_mask(mask_mod, 1, 2, *shape, device="cpu")[0]
    assert interop.from_flex(flex) == masks.BlockMask.from_dense(expected, 32)


def test_flex_masks_of_batch_elements():
    def mask_mod(b, h, q, k):
        return (q >= k) & (k >= 40 * b + 10 * h)

    flex = flex_attention.create_block_mask(mask_mod, 2, 2, 100, 100, "cpu", BLOCK_SIZE=32)
    batch = masks.MaskBatch.from_masks([interop.from_flex(flex, b) for b in range(2)])
    expected = flex_attention.create_mask(mask_mod, 2, 2, 100, 100, device="cpu")
    assert torch.equal(batch.to_dense(), expected)
    with pytest.raises(TypeError, match="batch must be an int"):
        interop.from_flex(flex, "")


def test_flex_masks_without_full_blocks_and_in_any_order():
    flex = interop.to_flex(masks.butterfly()(256, 32))
    count, index = flex.full_kv_num_blocks, flex.full_kv_indices.clone()
    for row, listed in enumerate(count[0, 0].tolist()):
        index[0, 0, row, :listed] = index[0, 0, row, :listed].flip(0)
    transposed = flex_attention.BlockMask.from_kv_blocks(
        count, index, BLOCK_SIZE=32, mask_mod=lambda b, h, q, k: q >= k, seq_lengths=(256, 256)
    )
    assert transposed.full_kv_num_blocks is None
    expected = masks.butterfly() & masks.causal()
    assert interop.from_flex(transposed) == expected(256, 32)


# Uncompiled, it materialises the scores and says so once in a process.
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_takes_the_mask():
    query, key, value = torch.randn(3, 2, 3, 100, 16).unbind()
    mask = MASKS["heads"](100, 32)
    out = flex_attention.flex_attention(query, key, value, block_mask=interop.to_flex(mask))
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask.to_dense()
    )
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("name", MASKS)
def test_block_lists(name, shape):
    pattern = MASKS[name]
    mask = pattern(*shape)
    lists = interop.to_block_lists(mask)
    assert interop.from_block_lists(lists, shape[0], pattern) == mask
    by_key = interop.to_block_lists(mask, by_key=True)
    transposed = by_key._replace(block_size=mask.T.block_size)
    whole = masks.full()
    assert torch.equal(
        interop.from_block_lists(transposed, mask.T.seq_len, whole).to_blocks(), mask.T.to_blocks()
    )
    assert by_key.block_size == lists.block_size == mask.block_size


# torch 2.11 says so even of a tensor that it is told to check.
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state")
@pytest.mark.parametrize("layout", [torch.sparse_bsr, torch.sparse_csr])
@pytest.mark.parametrize("name", [name for name in MASKS if name != "heads"])
def test_torch_sparse(name, layout, shape):
    mask = MASKS[name](*shape)
    matrix = interop.to_torch(mask, layout)
    q_len, k_len = mask.seq_len
    assert torch.equal(matrix.to_dense()[:q_len, :k_len], mask.to_dense())
    assert interop.from_torch(matrix, mask.block_size).crop(q_len, k_len) == mask
    if layout == torch.sparse_csr:
        assert matrix.values().all()
        coo = mask.to_dense().float().to_sparse_coo()
        assert interop.from_torch(coo, mask.block_size) == mask


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state")
@pytest.mark.parametrize("layout", [torch.sparse_bsr, torch.sparse_csr])
def test_indices_of_a_mask_without_blocks_have_the_stride_that_torch_requires(layout):
    matrix = interop.to_torch((masks.full() - masks.full())(64, 16), layout)
    assert matrix.col_indices().stride() == (1,)


# torch 2.11 says so even of a tensor that it is told to check.
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
def test_entries_of_a_sparse_tensor_may_be_stored_twice():
    entries = torch.tensor([[0, 0, 3], [1, 1, 2]]), torch.tensor([1.0, -1.0, 2.0])
    mask = interop.from_torch(torch.sparse_coo_tensor(*entries, (16, 16)), 16)
    assert mask.to_dense().nonzero().tolist() == [[3, 2]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: interop.from_flex(
                flex_attention.create_block_mask(lambda b, h, q, k: q >= k, 2, 1, 32, 32, "cpu")
            ),
            "batch must be from 0 to 1, because mask has 2, got None",
        ),
        (lambda: interop.from_flex(interop.to_flex(masks.full()(64, 16)), 1), "at most 0, got 1"),
        (
            lambda: interop.from_block_lists(
                interop.to_block_lists(masks.causal()(64, 16)), (64, 64)
            ),
            "pattern must say which pairs",
        ),
        (
            lambda: interop.from_block_lists(
                interop.BlockSparseTensors(
                    *(x.expand(2, *x.shape[1:]) for x in LISTS[:4]), (16, 16)
                ),
                64,
            ),
            "lists must have one batch element, got 2",
        ),
        (
            lambda: interop.from_block_lists(
                interop.to_block_lists(masks.full()(64, 16)), (80, 64)
            ),
            "lists must have 5 block rows",
        ),
        (lambda: interop.to_torch(masks.full()(64, 16), torch.sparse_coo), "layout must be"),
        (lambda: interop.to_torch(MASKS["heads"](64, 16)), "one head, got 3"),
        (lambda: interop.from_torch(torch.ones(3, 3)), "matrix must be sparse_bsr"),
    ],
)
def test_bad_input_names_the_argument(call, message):
    with pytest.raises(ValueError, match=message):
        call()


FULL_BLOCKS = masks.stack([masks.butterfly(), masks.random(0.3), masks.butterfly()])


@pytest.mark.parametrize("seq_len", [(256, 256), (128, 200)])
def test_cudnn_blocks(seq_len):
    mask = FULL_BLOCKS(seq_len, 64)
    lists = interop.to_cudnn_blocks(mask)
    assert interop.from_cudnn_blocks(lists, seq_len) == mask
    assert lists.q2k_block_index.shape[-1] == lists.q2k_block_nums.max()
    assert lists.sparse_block_size == 64
    keys = None if lists.block_sizes is None else lists.block_sizes.tolist()
    assert keys == (None if seq_len == (256, 256) else [64, 64, 64, 8])


def test_cudnn_blocks_of_a_batch():
    mask = masks.butterfly()(256, 64)
    lists = interop.to_cudnn_blocks(mask, batch=2, heads=3)
    assert lists.q2k_block_nums.shape == (2, 3, 4)
    assert lists.q2k_block_index.shape[:3] == (2, 3, 4)
    assert torch.equal(lists.q2k_block_nums[1, 2], mask.blocks_per_row()[0].int())


@pytest.mark.parametrize(
    ("mask", "options", "message"),
    [
        (masks.causal()(100, 16), {}, "mask must have no partial blocks, got 7"),
        (masks.full()(64, (16, 32)), {}, r"square blocks, got \(16, 32\)"),
        (FULL_BLOCKS(64, 16), {"heads": 4}, "mask must have 1 or 4 heads, got 3"),
    ],
)
def test_cudnn_has_no_lists_of_other_masks(mask, options, message):
    with pytest.raises(ValueError, match=message):
        interop.to_cudnn_blocks(mask, **options)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("strip", [200, 1 << 22])
def test_cudnn_intervals(name, strip, shape, monkeypatch):
    monkeypatch.setattr("masks.interop.cudnn.STRIP", strip)
    mask = MASKS[name](*shape)
    intervals = interop.to_cudnn_intervals(mask)
    assert intervals.shape[1] % 2 == 1
    assert bool((intervals.diff(dim=1) >= 0).all())
    assert interop.from_cudnn_intervals(intervals, mask.seq_len[1], mask.block_size) == mask
    assert torch.equal(interop.to_cudnn_intervals(mask, 2), intervals.repeat(1, 1, 2))


def test_cudnn_intervals_of_each_batch_element():
    mask = masks.causal()(70, 16)
    batch = masks.MaskBatch.with_keys(mask, torch.arange(70) < torch.tensor([[70], [33]]))
    intervals = interop.to_cudnn_intervals(batch)
    for b, own in enumerate(intervals.split(70, dim=2)):
        assert interop.from_cudnn_intervals(own, 70, 16) == batch[b]
    assert interop.from_cudnn_intervals(intervals, 70, 16, batch=2) == batch
    with pytest.raises(ValueError, match="batch must divide the 140 queries, got 3"):
        interop.from_cudnn_intervals(intervals, 70, 16, batch=3)
    with pytest.raises(ValueError, match="batch must be 1 for a MaskBatch, got 2"):
        interop.to_cudnn_intervals(batch, 2)
    message = r"must be a BlockMask or a MaskBatch, got Pattern; pass pattern\(seq_len\)"
    with pytest.raises(TypeError, match=message):
        interop.to_cudnn_intervals(masks.causal())  # pyright: ignore[reportArgumentType]


def test_cudnn_intervals_by_hand():
    dense = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 0], [0, 0, 0, 0], [0, 1, 0, 1]]).bool()
    intervals = interop.to_cudnn_intervals(masks.BlockMask.from_dense(dense, 16))
    rows = [[2, 3, 4, 4, 4], [0, 1, 3, 3, 3], [0, 0, 0, 0, 0], [0, 1, 2, 3, 4]]
    assert intervals[0].T.tolist() == rows
    with pytest.raises(ValueError, match=r"odd number of endpoints, queries\), got \(1, 4, 4\)"):
        interop.from_cudnn_intervals(intervals[:, :4], 4)


@pytest.mark.parametrize("name", ["full", "causal", "holes", "custom"])
def test_flashinfer(name):
    mask = MASKS[name]((64, 96), (16, 32))
    lists = interop.to_flashinfer(mask)
    assert interop.from_flashinfer(lists) == mask
    assert (lists.mask is None) == (mask.partial_blocks == 0)
    assert lists[2:6] == (64, 96, 16, 32)


def test_flashinfer_rows_of_any_order_and_of_other_shapes():
    lists = interop.FlashInferBlocks(
        torch.tensor([0, 2, 3]).int(), torch.tensor([1, 0, 1]).int(), 32, 32, 16, 16
    )
    assert interop.from_flashinfer(lists).to_blocks().tolist() == [[True, True], [False, True]]
    with pytest.raises(ValueError, match="indptr must have 4 entries and end in 3, got 3"):
        interop.from_flashinfer(lists._replace(M=48))
    with pytest.raises(ValueError, match=r"whole blocks of \(16, 16\), got \(70, 70\)"):
        interop.to_flashinfer(masks.full()(70, 16))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"indices": [0, 2]}, "columns must be 0 to 1, got 2"),
        ({"indices": [0, -1]}, "columns must be 0 to 1, got -1"),
        ({"indptr": [0, 2, 2], "indices": [1, 1]}, "got column 1 twice in row 0"),
        ({"indptr": [1, 1, 2]}, "indptr must ascend from 0"),
        ({"indptr": [0, 3, 2]}, "indptr must ascend from 0"),
        ({"mask": torch.ones(1, 16, 16, dtype=torch.bool)}, r"mask must be \(2, 16, 16\)"),
        ({"mask": torch.ones(512, dtype=torch.bool)}, r"mask must be \(2, 16, 16\)"),
    ],
)
def test_flashinfer_lists_that_do_not_fit(change, message):
    change = {k: torch.tensor(v) if isinstance(v, list) else v for k, v in change.items()}
    rows = {"indptr": torch.tensor([0, 1, 2]), "indices": torch.tensor([0, 1]), "mask": None}
    with pytest.raises(ValueError, match=message):
        interop.from_flashinfer(interop.FlashInferBlocks(**rows | change, M=32, N=32, R=16, C=16))


MASK = masks.causal()(32, 16)


@pytest.mark.parametrize(
    ("convert", "given", "message"),
    [
        *(
            (convert, given, f"mask must be a BlockMask, got {message}")
            for convert in (
                *(interop.to_flex, interop.to_block_lists, interop.to_torch),
                *(interop.to_cudnn_blocks, interop.to_flashinfer),
            )
            for given, message in (
                (masks.causal(), r"Pattern; pass pattern\(seq_len\)"),
                (masks.MaskBatch(MASK, 1), r"MaskBatch; pass mask\[b\]"),
                (
                    masks.DynamicMask.from_topk(torch.rand(2, 2), 1),
                    r"DynamicMask; pass mask[.]to_block",
                ),
                (None, "NoneType$"),
            )
        ),
        (interop.from_flex, MASK, "mask must be a BlockMask of FlexAttention, got .*masks"),
        (interop.from_torch, [1], "matrix must be a sparse tensor, got list"),
        (interop.from_flashinfer, MASK, "blocks must be FlashInferBlocks, got BlockMask"),
        (lambda lists: interop.from_cudnn_blocks(lists, 32), None, "blocks must be CudnnBlocks"),
        (
            lambda lists: interop.from_block_lists(lists, 32),
            MASK,
            "lists must be BlockSparseTensors, got BlockMask",
        ),
        (
            lambda pattern: interop.from_block_lists(interop.to_block_lists(MASK), 32, pattern),
            MASK,
            "pattern must be a Pattern or None, got BlockMask",
        ),
    ],
)
def test_other_types_are_named(convert, given, message):
    with pytest.raises(TypeError, match=message):
        convert(given)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("q2k_block_nums", 3, "counts must be 0 to 2"),
        ("q2k_block_nums", -3, "counts must be 0 to 2"),
        ("q2k_block_index", -1, "columns must be 0 to 1, got -1"),
        ("q2k_block_index", 9, "columns must be 0 to 1, got 9"),
    ],
)
def test_cudnn_lists_that_do_not_fit(place, value, message):
    lists = interop.to_cudnn_blocks(masks.full()(128, 64))
    changed = getattr(lists, place).clone()
    changed[..., :1] = value
    with pytest.raises(ValueError, match=message):
        interop.from_cudnn_blocks(lists._replace(**{place: changed}), 128)


CUDNN = interop.to_cudnn_blocks(FULL_BLOCKS(128, 64))
FLASHINFER = interop.to_flashinfer(MASK)


@pytest.mark.parametrize(
    ("lists", "change", "message"),
    [
        (CUDNN, {"q2k_block_nums": None}, "q2k_block_nums must be an int32 .*, got NoneType"),
        (CUDNN, {"q2k_block_index": CUDNN[0].float()}, "q2k_block_index must be .* got torch.fl"),
        (
            CUDNN,
            {"q2k_block_index": CUDNN[0][0]},
            r"q2k_block_index must be \(batch, heads, rows, ",
        ),
        (
            CUDNN,
            {"q2k_block_nums": CUDNN[1][:, :2]},
            r"index must be \(1, 2, 2, columns\) like q2k",
        ),
        (
            CUDNN,
            {"block_sizes": torch.full((2,), 64.0)},
            "block_sizes must be .* got torch.float32",
        ),
        (FLASHINFER, {"indices": FLASHINFER[1].float()}, "indices must be .* got torch.float32"),
        (FLASHINFER, {"indptr": None}, "indptr must be an int32 or int64 tensor, got NoneType"),
        (FLASHINFER, {"indptr": FLASHINFER[0][None]}, r"indptr must be \(entries\), got \(1, 3\)"),
        (FLASHINFER, {"mask": torch.ones(3, 16, 16)}, "mask must be a bool tensor, got torch.flo"),
    ],
)
def test_lists_of_other_types_and_dims_are_named(lists, change, message):
    convert = interop.from_flashinfer
    if isinstance(lists, interop.CudnnBlocks):
        convert = partial(interop.from_cudnn_blocks, seq_len=128)
    with pytest.raises((TypeError, ValueError), match=message):
        convert(lists._replace(**change))


def test_block_lists_of_other_types_and_dims_are_named():
    lists = interop.to_block_lists(MASK)
    with pytest.raises(TypeError, match=r"full_block_idx must be .* got torch.float32"):
        interop.from_block_lists(lists._replace(full_block_idx=lists[3].float()), 32)
    with pytest.raises(ValueError, match=r"mask_block_cnt must be \(batch, heads, rows\), got"):
        interop.from_block_lists(lists._replace(mask_block_cnt=lists[0][0]), 32)


def test_cudnn_blocks_have_the_keys_of_the_length():
    lists = interop.to_cudnn_blocks(masks.full()(100, 64))
    assert lists.block_sizes is not None
    with pytest.raises(ValueError, match=r"block_sizes must be \[64, 56\], got \[64, 36\]"):
        interop.from_cudnn_blocks(lists, (100, 120))
    assert interop.from_cudnn_blocks(lists._replace(block_sizes=None), 100).density == 1


@pytest.mark.parametrize(
    ("intervals", "k_len", "message"),
    [
        ([[[2], [5], [11]]], 10, "intervals must be 0 to k_len 10, got 11"),
        ([[[2], [-1], [3]]], 10, "intervals must be 0 to k_len 10, got -1"),
        (
            [[[2, 4], [3, 9], [5, 8]]],
            10,
            r"must not descend, got the endpoints \[4, 9, 8\] of query 1 in head 0",
        ),
        ([], 10, r"at least 1 head, .* got \(0, 1, 1\)"),
        ([[[2]]], 10.0, "k_len must be an integer, got 10.0"),
    ],
)
def test_cudnn_intervals_that_do_not_fit(intervals, k_len, message):
    given = torch.tensor(intervals, dtype=torch.int32)
    given = given if given.numel() else given.view(0, 1, 1)
    with pytest.raises((TypeError, ValueError), match=message):
        interop.from_cudnn_intervals(given, k_len)
