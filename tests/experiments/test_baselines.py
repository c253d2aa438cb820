import sys
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise
from types import ModuleType

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

import masks
import sparseflash
from experiments.baselines import (
    BaselineError,
    attend_baseline,
    attend_sdpa,
    attend_sparseflash,
    attend_standard,
    flex_mask,
)
from experiments.check import Extras, SampledRows, check
from experiments.cli import Baseline
from experiments.pattern_families import Problem
from masks import interop

N = 300
CPU = torch.device("cpu")


def compiled(pattern, block_size=64):
    return pattern(N, block_size=block_size)


PROBLEMS = {
    "full": Problem("", compiled(masks.full())),
    "causal": Problem("", compiled(masks.causal())),
    "local": Problem("", compiled(masks.local(70))),
    "predicate": Problem(
        "", compiled(masks.local(70)), predicate=lambda q, k: (q - k).abs() <= 70
    ),
    "small blocks": Problem("", compiled(masks.butterfly() & masks.causal(), 16)),
    "per head": Problem("", masks.stack([compiled(masks.local(70)), compiled(masks.causal())])),
}


@pytest.fixture
def inputs():
    return [torch.randn(1, 2, N, 16) for _ in range(3)]


@pytest.mark.parametrize(
    ("named", "options"),
    [
        ("cpu", {"deterministic": True}),
        ("cpu/any-order", {"deterministic": False}),
        ("cpu/planned", {"deterministic": True, "planned_order": True}),
    ],
)
def test_a_backend_may_be_asked_for_an_order_of_sums(named, options, inputs, monkeypatch):
    asked = []
    monkeypatch.setattr("sparseflash.attention", lambda *t, **options: asked.append(options))
    attend_sparseflash(PROBLEMS["full"], named)(*inputs)
    assert asked == [{"backend": "cpu", **options}]


# Uncompiled, it materialises the scores: all that is wanted here is its idea of the mask.
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=list(PROBLEMS))
def test_flex_gets_exactly_the_same_mask(problem, inputs):
    block_mask = flex_mask(problem)
    sample = SampledRows.of(problem.mask, CPU)
    check(lambda *t: flex_attention(*t, block_mask=block_mask), inputs, sample, "flex", False)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", ["full", "local", "predicate", "per head"])
def test_padding_is_a_mask_of_each_batch_element_for_flex(name):
    problem, lengths = PROBLEMS[name], torch.tensor([N, 130])
    tensors = [torch.randn(2, 2, N, 16) for _ in range(3)]
    block_mask = flex_mask(problem, lengths)
    expected = sparseflash.attention(*tensors, problem.mask, key_lengths=lengths)
    attending = expected[:, :, : 130 + 70]  # of later queries no key is left in some masks
    out = flex_attention(*tensors, block_mask=block_mask)
    torch.testing.assert_close(out[:, :, : 130 + 70], attending)
    blocks = block_mask.to_dense().bool()[1]
    assert not blocks[..., 3:].any()
    assert blocks[..., :3].any()
    assert attend_baseline(Baseline.FLEX, problem, Extras(key_lengths=lengths))


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=list(PROBLEMS))
def test_flex_visits_exactly_the_same_blocks(problem):
    blocks = flex_mask(problem).to_dense().bool()[0]
    assert torch.equal(blocks, problem.mask.to_blocks().reshape(blocks.shape))


def test_full_blocks_stay_full_for_flex():
    block_mask = flex_mask(PROBLEMS["causal"])
    assert block_mask.full_kv_num_blocks.tolist() == [[[0, 1, 2, 3, 4]]]
    assert block_mask.kv_num_blocks.tolist() == [[[1, 1, 1, 1, 1]]]


def test_flex_computes_pairs_by_a_predicate_where_there_is_one():
    problem = replace(PROBLEMS["local"], predicate=lambda q, k: (q, k))
    assert flex_mask(problem).mask_mod(0, 1, 2, 3) == (2, 3)


def test_flex_compiles_no_mask_where_all_blocks_are_full():
    assert (
        flex_mask(Problem("", masks.full()(256))).mask_mod
        is flex_mask(Problem("", masks.strided(2)(256))).mask_mod
    )


@pytest.mark.skipif(find_spec("flash_attn") is not None, reason="FlashAttention is installed")
def test_a_baseline_that_is_not_installed_says_so():
    with pytest.raises(BaselineError, match="not installed"):
        attend_baseline(Baseline.FLASH4, PROBLEMS["full"])


@pytest.fixture
def flash4(monkeypatch):
    """A stand-in for FlashAttention-4, which says what it was given and answers with the keys."""
    asked = []

    def flash_attn_func(query, key, value, **options):
        asked.append((query, options))
        return key, None

    def flash_attn_varlen_func(query, key, value, **options):
        asked.append((query, options))
        if max(options["cu_seqlens_k"].diff()) != options["max_seqlen_k"]:
            raise AssertionError("max_seqlen_k is not the longest sequence")
        outs = []
        for b, (begin, end) in enumerate(pairwise(options["cu_seqlens_k"].tolist())):
            own = (query[b], key[begin:end], value[begin:end])
            outs.append(scaled_dot_product_attention(*(t.transpose(0, 1) for t in own)))
        return torch.stack(outs).transpose(1, 2), None

    root, cute, sparsity = (ModuleType(f"flash_attn{name}") for name in ("", "a", "b"))
    vars(cute).update(flash_attn_func=flash_attn_func)
    vars(cute).update(flash_attn_varlen_func=flash_attn_varlen_func)
    vars(sparsity).update(BlockSparseTensorsTorch=dict)
    monkeypatch.setitem(sys.modules, "flash_attn", root)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.block_sparsity", sparsity)
    return asked


def test_flash_attention_4_is_given_the_mask_by_query_and_by_key(flash4, inputs):
    mask = masks.random(0.4)(256, 64)
    dense = (replace(PROBLEMS[name], dense=name) for name in ("full", "causal"))
    for problem in (*dense, Problem("", mask)):
        out = attend_baseline(Baseline.FLASH4, problem)(*inputs)
        assert torch.equal(out, inputs[1])
    assert all(torch.equal(query, inputs[0].transpose(1, 2)) for query, _ in flash4)
    full, causal, sparse = (options for _, options in flash4)
    assert (full, causal) == ({"causal": False}, {"causal": True})
    assert sparse.pop("causal") is False
    rows = {"block_sparse_tensors": mask, "block_sparse_tensors_bwd": mask.T}
    for name, mask in rows.items():
        lists = interop.BlockSparseTensors(**sparse[name])._replace(block_size=mask.block_size)
        assert interop.from_block_lists(lists, mask.seq_len) == mask
    with pytest.raises(BaselineError, match="no masks with partial blocks"):
        attend_baseline(Baseline.FLASH4, PROBLEMS["local"])


def test_flash_attention_4_takes_keys_without_padding(flash4):
    full = replace(PROBLEMS["full"], dense="full")
    inputs = [torch.randn(3, 2, N, 16).requires_grad_() for _ in range(3)]
    extras = Extras(key_lengths=torch.tensor([200, 130, 1]))
    attend = attend_baseline(Baseline.FLASH4, full, extras)
    check(attend, inputs, SampledRows.of(full.mask, CPU), "flash4", extras=extras)
    ((query, options),) = flash4
    assert torch.equal(query, inputs[0].transpose(1, 2))
    assert options["seqused_q"].tolist() == [N] * 3
    assert options["cu_seqlens_k"].tolist() == [0, 200, 330, 331]
    assert options["seqused_q"].dtype == options["cu_seqlens_k"].dtype == torch.int32
    assert (options["max_seqlen_q"], options["max_seqlen_k"]) == (N, 200)


def test_padded_baselines_of_full_masks_refuse_others(flash4):
    extras = Extras(key_lengths=torch.tensor([N, 130]))
    for baseline in (Baseline.FLASH4, Baseline.SDPA, Baseline.STANDARD):
        with pytest.raises(BaselineError, match=f"{baseline} is measured with padding on full"):
            attend_baseline(baseline, replace(PROBLEMS["causal"], dense="causal"), extras)
    with pytest.raises(BaselineError, match="cudnn is measured without padding"):
        attend_baseline(Baseline.CUDNN, replace(PROBLEMS["full"], dense="full"), extras)


def test_flash_attention_4_says_what_it_refuses_with_padding(flash4, inputs):
    def refuse(*_, **options):
        raise AssertionError("head_dim must be a multiple of 8")

    vars(sys.modules["flash_attn.cute"]).update(flash_attn_varlen_func=refuse)
    full, extras = replace(PROBLEMS["full"], dense="full"), Extras(key_lengths=torch.tensor([9]))
    attend = attend_baseline(Baseline.FLASH4, full, extras)
    with pytest.raises(BaselineError, match=r"^FlashAttention-4: head_dim must be"):
        attend(*inputs)


@pytest.mark.parametrize("attend", [attend_sdpa, lambda _, causal: attend_standard(causal)])
@pytest.mark.parametrize("dense", ["full", "causal"])
def test_dense_baselines_compute_the_dense_masks(attend, dense, inputs):
    mask = compiled(getattr(masks, dense)())
    leaves = [t.requires_grad_() for t in inputs]
    sample = SampledRows.of(mask, CPU)
    check(attend(Baseline.SDPA, dense == "causal"), leaves, sample, dense)


def test_a_dense_baseline_refuses_a_sparse_mask():
    with pytest.raises(ValueError, match="full and causal masks only"):
        attend_baseline(Baseline.SDPA, PROBLEMS["local"])


@pytest.fixture
def cudnn(monkeypatch):
    """Stand-ins for cuDNN's two block-sparse attentions, which compute the mask that they are
    given by its intervals or lists; they refuse what the real ones refuse.
    """
    package, bsa, flex = (ModuleType(name) for name in ("cudnn", "bsa", "flex"))

    def attend(mask, query, key, value):
        scores = (query @ key.mT * query.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf)
        return scores.softmax(-1) @ value

    def dense(q2k_block_index, q2k_block_nums, block_sizes, sparse_block_size, n):
        assert block_sizes is None
        lists = interop.CudnnBlocks(q2k_block_index[:1], q2k_block_nums[:1], None, 64)
        assert sparse_block_size == 64
        return interop.from_cudnn_blocks(lists, n).to_dense()

    def forward(query, key, value, allow_empty_block_nums, **lists):
        assert allow_empty_block_nums is False
        mask = dense(**lists, n=key.shape[2])
        return {"o_tensor": attend(mask, query, key, value), "lse_tensor": query[..., 0]}

    def backward(grad_out, query, key, value, out, lse, **lists):
        if query.shape[3] != 16:
            raise NotImplementedError("backward needs head_dim 16\nand more")
        mask = dense(**lists, n=key.shape[2])
        leaves = [t.detach().requires_grad_() for t in (query, key, value)]
        with torch.enable_grad():
            grads = torch.autograd.grad(attend(mask, *leaves), leaves, grad_out)
        return dict(zip(("dq_tensor", "dk_tensor", "dv_tensor"), grads, strict=True))

    def create_mask_plan(intervals, query, key, value):
        if intervals.shape[1] > 5:
            raise ValueError("too many intervals")
        assert intervals.shape[2] == query.shape[0] * query.shape[1]
        return interop.from_cudnn_intervals(intervals[..., : query.shape[1]], key.shape[1])

    def flex_attn_func(*tensors, mask_plan):
        own = [t.transpose(1, 2) for t in tensors]
        return attend(mask_plan.to_dense(), *own).transpose(1, 2)

    vars(bsa).update(
        block_sparse_attention_forward=forward, block_sparse_attention_backward=backward
    )
    vars(flex).update(create_mask_plan=create_mask_plan, flex_attn_func=flex_attn_func)
    vars(package).update(block_sparse_attention=bsa, flex_attention=flex)
    for name in ("cudnn", "cudnn.flex_attention"):
        monkeypatch.setitem(sys.modules, name, {"cudnn": package}.get(name, flex))


@pytest.mark.usefixtures("cudnn")
@pytest.mark.parametrize("baseline", [Baseline.CUDNN_BSA, Baseline.CUDNN_FLEX])
def test_cudnn_is_given_the_mask(baseline):
    problem = Problem("", masks.butterfly()(256, 64))
    inputs = [torch.randn(2, 2, 256, 16).requires_grad_() for _ in range(3)]
    sample = SampledRows.of(problem.mask, CPU)
    check(attend_baseline(baseline, problem), inputs, sample, baseline)


@pytest.mark.usefixtures("cudnn")
def test_cudnn_is_given_the_intervals_of_each_batch_element(monkeypatch):
    given = []
    monkeypatch.setattr(
        sys.modules["cudnn.flex_attention"],
        "create_mask_plan",
        lambda intervals, *_: given.append(intervals) or masks.full()(256),
    )
    mask, lengths = masks.butterfly()(256, 64), torch.tensor([256, 100])
    extras = Extras(key_lengths=lengths)
    attend = attend_baseline(Baseline.CUDNN_FLEX, Problem("", mask), extras)
    attend(*(torch.randn(2, 2, 256, 16) for _ in range(3)))
    keys = torch.arange(256) < lengths[:, None]
    for own, inside in zip(given[0].split(256, dim=2), keys, strict=True):
        dense = interop.from_cudnn_intervals(own, 256).to_dense()
        assert torch.equal(dense, mask.to_dense() & inside)


@pytest.mark.parametrize("pattern", [masks.butterfly(), masks.local(70)], ids=["full", "partial"])
def test_flashinfer_is_given_the_mask(pattern, monkeypatch):
    """By a stand-in, whose heads are those of all batch elements."""

    class Wrapper:
        def __init__(self, workspace):
            assert workspace.dtype == torch.uint8

        def plan(self, *lists_and_sizes, mask, q_data_type, o_data_type):
            *lists, heads, kv_heads, head_dim = lists_and_sizes
            assert (heads, kv_heads, head_dim) == (8, 4, 16)
            assert q_data_type == o_data_type == torch.float32
            self.mask = interop.from_flashinfer(interop.FlashInferBlocks(*lists, mask))

        def run(self, query, key, value):
            assert (query.shape, key.shape) == ((256, 8, 16), (256, 4, 16))
            own = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
            return sparseflash.attention(*own, self.mask)[0].transpose(0, 1)

    package = ModuleType("flashinfer")
    vars(package).update(BlockSparseAttentionWrapper=Wrapper)
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    problem = Problem("", pattern(256, 64))
    inputs = [torch.randn(2, heads, 256, 16).requires_grad_() for heads in (4, 2, 2)]
    sample = SampledRows.of(problem.mask, CPU)
    attend = attend_baseline(Baseline.FLASHINFER, problem)
    check(attend, inputs, sample, "flashinfer", backward=False)
    with pytest.raises(NotImplementedError, match="has no backward pass"):
        attend(*inputs).sum().backward()
    with pytest.raises(BaselineError, match=r"FlashInfer.*lengths of whole blocks"):
        attend_baseline(Baseline.FLASHINFER, PROBLEMS["local"])


@pytest.mark.usefixtures("cudnn")
def test_what_cudnn_refuses_is_said_on_one_line(inputs):
    with pytest.raises(BaselineError, match="block-sparse attention: mask must have no partial"):
        attend_baseline(Baseline.CUDNN_BSA, PROBLEMS["local"])
    every_third = Problem("", compiled(masks.pattern(lambda q, k: k % 3 == 0)))
    with pytest.raises(BaselineError, match="cuDNN's flex attention: too many intervals"):
        attend_baseline(Baseline.CUDNN_FLEX, every_third)(*inputs)
