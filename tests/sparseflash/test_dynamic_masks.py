"""Attention whose blocks are chosen by a tensor: values, and the gradient that its scores get."""

import pytest
import torch
import torch._dynamo.testing
from torch.utils.checkpoint import checkpoint

import masks
import sparseflash
from experiments.timing import no_waiting
from masks import DynamicMask
from sparseflash.testing import check_attention, make_inputs, poisoned_empty

HAS_GPU = torch.cuda.is_available()
BACKENDS = {"triton": "cuda"} if HAS_GPU else {"cpu": "cpu", "triton": "cpu"}
LENGTHS, BLOCKS = (50, 75), (16, 32)
BATCH, HEADS, NQ, NK = 2, 4, 4, 3
CAUSAL = masks.causal(align="bottom-right")


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


def inputs(device, **options):
    return make_inputs(BATCH, HEADS, *LENGTHS, 16, kv_heads=2, device=device, **options)


def gated(query, key, value, mask, gates, options):
    """(out, lse) in float64 with a gate (batch, heads, nq, nk) on the weights of each block."""
    key, value = (x.double().repeat_interleave(HEADS // 2, 1) for x in (key, value))
    scores = query.double() @ key.mT / query.shape[3] ** 0.5
    if "softcap" in options:
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    if "bias" in options:
        distance = torch.arange(LENGTHS[1]) - torch.arange(LENGTHS[0])[:, None] + LENGTHS[0] - 1
        scores = scores + options["bias"].double()[:, distance.to(query.device)]
    gates = gates.repeat_interleave(BLOCKS[0], 2).repeat_interleave(BLOCKS[1], 3)
    weights = gates[..., : LENGTHS[0], : LENGTHS[1]] * scores.exp()
    weights = weights * mask.to_dense()
    if "key_lengths" in options:
        positions = torch.arange(LENGTHS[1], device=query.device)
        weights = weights * (positions < options["key_lengths"].view(-1, 1, 1, 1))
    total = weights.sum(-1, keepdim=True)
    total = torch.where(total > 0, total, 1)
    return weights @ value / total, total.squeeze(-1).log()


@pytest.mark.slow_interpreted
@pytest.mark.parametrize("leading", [(BATCH, HEADS), (BATCH, 1), (HEADS,), ()])
def test_masks_of_batch_elements_and_heads(backend, leading):
    device = BACKENDS[backend]
    mask = CAUSAL(LENGTHS, BLOCKS, device).select_topk(torch.rand(*leading, NQ, NK).to(device), 2)

    def attend(q, k, v):
        return sparseflash.attention(q, k, v, mask, return_lse=True, backend=backend)

    with poisoned_empty():
        check_attention(attend, *inputs(device)[:3], mask)


@pytest.mark.parametrize(
    ("leading", "extras"),
    [((BATCH, HEADS), ()), ((BATCH, 1), ("softcap", "bias")), ((), ("key_lengths",))],
)
def test_scores_get_the_gradient_of_gates_of_one(backend, extras, leading):
    device = BACKENDS[backend]
    *tensors, grad_out = inputs(device)
    every_option = {
        "softcap": 2.0,
        "bias": torch.randn(HEADS, sum(LENGTHS) - 1, device=device),
        "key_lengths": torch.tensor([75, 20], device=device),
    }
    options = {name: every_option[name] for name in extras}
    scores = torch.rand(*leading, NQ, NK, device=device, requires_grad=True)
    mask = CAUSAL(LENGTHS, BLOCKS, device).select_topk(scores, 2)
    out, lse = sparseflash.attention(*tensors, mask, return_lse=True, backend=backend, **options)
    grad_lse = torch.randn_like(lse).masked_fill(lse.isneginf(), 0.0)
    (result,) = torch.autograd.grad((out, lse), scores, (grad_out, grad_lse))

    gates = mask.to_blocks().double().requires_grad_()
    out, lse = gated(*tensors, mask, gates.expand(BATCH, HEADS, -1, -1), options)
    loss = (out * grad_out).sum() + (lse * grad_lse).sum()
    (expected,) = torch.autograd.grad(loss, gates)
    expected = expected.where(mask.to_blocks(), 0.0).view_as(result)
    torch.testing.assert_close(result, expected.float(), rtol=1e-4, atol=1e-4)
    assert result.count_nonzero() > 0


@pytest.mark.slow_interpreted
def test_dropout_takes_part_in_the_gradient_of_blocks(backend):
    """The mean of dS over a row of blocks is 0 with any dropout, and blocks differ."""
    device = BACKENDS[backend]
    *tensors, grad_out = (x[:1] for x in inputs(device))
    scores = torch.rand(NQ, NK, device=device, requires_grad=True)
    mask = DynamicMask.from_topk(scores, 2, BLOCKS, LENGTHS)

    def gradient(**options):
        out = sparseflash.attention(*tensors, mask, backend=backend, **options)
        return torch.autograd.grad(out, scores, grad_out)[0]

    dropped, kept = gradient(dropout_p=0.5, seed=1), gradient()
    zeros = torch.zeros(NQ, device=device)
    torch.testing.assert_close(dropped.sum(-1), zeros, atol=1e-3, rtol=0)
    assert (dropped - kept).abs().max() > 0.1


@pytest.mark.slow_interpreted
def test_only_scores_that_want_a_gradient_get_one(backend):
    device = BACKENDS[backend]
    tensors = [x.requires_grad_() for x in inputs(device)[:3]]
    scores = torch.rand(NQ, NK, device=device, requires_grad=True)
    mask = DynamicMask.from_topk(scores.detach(), 2, BLOCKS, LENGTHS)
    sparseflash.attention(*tensors, mask, backend=backend).sum().backward()
    assert scores.grad is None


@pytest.mark.slow_interpreted
def test_checkpointed(backend):
    device = BACKENDS[backend]
    *tensors, grad_out = inputs(device)
    scores = torch.rand(NQ, NK, device=device, requires_grad=True)

    def attend(scores):
        mask = DynamicMask.from_topk(scores, 2, BLOCKS, LENGTHS)
        return sparseflash.attention(*tensors, mask, backend=backend)

    (expected,) = torch.autograd.grad(attend(scores), scores, grad_out)
    again = checkpoint(attend, scores, use_reentrant=False)
    assert torch.equal(torch.autograd.grad(again, scores, grad_out)[0], expected)


# Of torch.compile, where a tensor of an object is no leaf.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("inside", [True, False])
def test_one_graph_serves_every_choice_of_blocks(inside):
    backend, device = next(iter(BACKENDS.items()))
    *tensors, grad_out = inputs(device)
    tensors = [x.requires_grad_() for x in tensors]
    within = CAUSAL(LENGTHS, BLOCKS, device)

    def attend(*tensors, chosen):
        mask = within.select_topk(chosen, 2) if inside else chosen
        return sparseflash.attention(*tensors, mask, backend=backend)

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(attend, backend=counter, fullgraph=True)
    for _ in range(2):
        scores = torch.rand(BATCH, HEADS, NQ, NK, device=device, requires_grad=True)
        chosen = scores if inside else within.select_topk(scores, 2)
        results = (
            torch.autograd.grad(run(*tensors, chosen=chosen), (*tensors, scores), grad_out)
            for run in (compiled, attend)
        )
        assert all(map(torch.equal, *results))
    assert counter.frame_count == 1
    torch._dynamo.reset()


def test_exported_with_the_choice_of_blocks():
    tensors, within = inputs("cpu")[:3], CAUSAL(LENGTHS, BLOCKS)

    class Module(torch.nn.Module):
        def forward(self, query, key, value, scores):
            return sparseflash.attention(query, key, value, within.select_topk(scores, 2))

    exported = torch.export.export(Module(), (*tensors, torch.rand(NQ, NK))).module()
    scores = torch.rand(NQ, NK)
    assert torch.equal(exported(*tensors, scores), Module()(*tensors, scores))


def test_refused_under_vmap():
    tensors = inputs("cpu")[:3]
    mask = DynamicMask.from_topk(torch.rand(NQ, NK), 2, BLOCKS, LENGTHS)
    mapped = torch.func.vmap(lambda q: sparseflash.attention(q, *tensors[1:], mask))
    with pytest.raises(NotImplementedError, match="mask must not be a DynamicMask under vmap"):
        mapped(tensors[0].unsqueeze(0))


@pytest.mark.parametrize(
    ("shape", "message"),
    [((3, 1, NQ, NK), "1 or 2 batch elements"), ((3, NQ, NK), "1 or 2 or 4 heads")],
)
def test_masks_of_other_batches_and_heads_are_refused(shape, message):
    mask = DynamicMask.from_topk(torch.rand(shape), 1, BLOCKS, LENGTHS)
    with pytest.raises(ValueError, match=message):
        sparseflash.attention(*inputs("cpu")[:3], mask)


@pytest.mark.gpu
@pytest.mark.skipif(
    not HAS_GPU or torch.cuda.get_device_capability() != (9, 0),
    reason="needs compute capability 9.0",
)
def test_hopper_takes_masks_of_heads_and_batch_elements_without_their_gradient():
    shape = {"dtype": torch.float16, "device": "cuda", "kv_heads": 2}
    tensors = make_inputs(2, 4, 500, 700, 128, **shape)[:3]
    scores = torch.rand(2, 4, 4, 6, device="cuda")

    def attend(mask):
        return lambda q, k, v: sparseflash.attention(
            q, k, v, mask, return_lse=True, backend="hopper"
        )

    within = CAUSAL((500, 700), 128, "cuda")
    for chosen in (scores[0], scores):
        mask = within.select_topk(chosen, 3)
        check_attention(attend(mask), *tensors, mask)
    with pytest.raises(sparseflash.BackendError, match="does not support gradient of blocks"):
        attend(within.select_topk(scores[0].requires_grad_(), 3))(*tensors)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_nothing_waits_for_the_device():
    *tensors, grad_out = inputs("cuda", dtype=torch.bfloat16)
    within = masks.causal(align="bottom-right")(LENGTHS, BLOCKS, "cuda")
    for x in tensors:
        x.requires_grad_()
    scores = torch.rand(BATCH, HEADS, NQ, NK, device="cuda", requires_grad=True)

    def step():
        for mask in (
            DynamicMask.from_topk(scores, 2, BLOCKS, LENGTHS),
            DynamicMask.from_threshold(scores, 0.5, BLOCKS, LENGTHS),
            DynamicMask.from_blocks(scores.detach() > 0.5, BLOCKS, LENGTHS),
            within.select_topk(scores, 2),
        ):
            sparseflash.attention(*tensors, mask, backend="triton").backward(grad_out)

    step()
    with no_waiting():
        step()


@pytest.mark.gpu
@pytest.mark.parametrize("within", [None, CAUSAL])
def test_a_cuda_graph_selects_blocks_at_every_replay(within):
    *tensors, grad_out = inputs("cuda", dtype=torch.float16)
    for x in tensors:
        x.requires_grad_()
    scores = torch.rand(BATCH, HEADS, NQ, NK, device="cuda", requires_grad=True)
    every = (masks.full() if within is None else within)(LENGTHS, BLOCKS, "cuda")

    def step():
        out = sparseflash.attention(*tensors, every.select_topk(scores, 2), backend="triton")
        grads = torch.autograd.grad(out, (*tensors, scores), grad_out)
        # Undetached, a capture keeps nodes of autograd that belong to its stream.
        return out.detach(), *grads

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(3):
        with torch.no_grad():
            scores.copy_(torch.rand_like(scores))
        graph.replay()
        for result, expected in zip(captured, step(), strict=True):
            assert torch.equal(result, expected)


@pytest.mark.gpu
def test_a_capture_leaves_nothing_in_the_mask_that_it_selects_from():
    scores = torch.rand(BATCH, HEADS, NQ, NK, device="cuda")
    every, fresh = (masks.full()(LENGTHS, BLOCKS, "cuda") for _ in range(2))
    fresh.select_topk(scores, 2)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = every.select_topk(scores, 2).table().bit_tiles
    eager = every.select_topk(scores, 2).table().bit_tiles
    expected = fresh.select_topk(scores, 2).table().bit_tiles
    assert torch.equal(eager, expected)
    graph.replay()
    assert torch.equal(captured, expected)
