"""What only a GPU shows: many launches, long sequences, CUDA graphs."""

from typing import NamedTuple

import pytest
import torch

import masks
import sparseflash
from sparseflash.backends.hopper import configs
from sparseflash.testing import check_attention, make_inputs
from tests.helpers.calls import ALWAYS_FUSED

pytestmark = pytest.mark.gpu


class Way(NamedTuple):
    """A way to compute attention. in_order: gradients of query are summed in a fixed order"""

    backend: str
    head_dim: int
    in_order: bool = True

    def fixed(self, results):
        """(out, dq, dk, dv) without what may differ in its last bits."""
        return results if self.in_order else (results[0], *results[2:])


WAYS = {
    "triton": Way("triton", 64),
    "hopper": Way("hopper", 128),
    "hopper, any order, 64 dims": Way("hopper", 64, in_order=False),
    "hopper, any order, 128 dims": Way("hopper", 128, in_order=False),
}
REACH = 200


@pytest.fixture(params=WAYS.values(), ids=WAYS)
def way(request, monkeypatch):
    if request.param.backend == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("hopper kernels need compute capability 9.0")
    if not request.param.in_order:
        monkeypatch.setattr(configs, "MIN_FUSED_BLOCKS", ALWAYS_FUSED)  # rows are short here
    return request.param


def step(tensors, mask, way):
    """(out, dq, dk, dv)"""
    *leaves, grad_out = tensors
    options = {"backend": way.backend, "deterministic": way.in_order}
    out = sparseflash.attention(*leaves, mask, **options)
    grads = torch.autograd.grad(out, leaves, grad_out)
    # Undetached, a capture keeps nodes of autograd that belong to its stream.
    return out.detach(), *grads


def inputs(heads, length, head_dim, **options):
    options |= {"dtype": torch.bfloat16, "device": "cuda"}
    *leaves, grad_out = make_inputs(1, heads, length, length, head_dim, **options)
    return *(x.requires_grad_() for x in leaves), grad_out


def same_bits_every_time(run, times):
    expected = run()
    differs = torch.zeros((), dtype=torch.bool, device="cuda")
    for _ in range(times):
        for result, first in zip(run(), expected, strict=True):
            differs |= (result != first).any()
    assert not differs


def test_ten_thousand_launches_give_the_same_bits(way):
    tensors = inputs(4, 1000, way.head_dim, kv_heads=2)
    mask = (masks.random(0.3) | masks.local(50))(1000, 128, "cuda")
    _, first, *_ = step(tensors, mask, way)
    same_bits_every_time(lambda: way.fixed(step(tensors, mask, way)), 10_000)
    _, last, *_ = step(tensors, mask, way)
    torch.testing.assert_close(last, first, rtol=0.02, atol=0.02)


def test_a_thousand_sums_over_distances_and_blocks_give_the_same_bits():
    tensors = inputs(4, 1000, 64, kv_heads=2)
    bias = torch.randn(4, 1999, device="cuda", requires_grad=True)
    scores = torch.rand(4, 8, 8, device="cuda", requires_grad=True)
    mask = masks.causal()(1000, 128, "cuda").select_topk(scores, 3)

    def run():
        out = sparseflash.attention(*tensors[:3], mask, bias=bias, backend="triton")
        return torch.autograd.grad(out, (bias, scores), tensors[3])

    same_bits_every_time(run, 1000)


def test_a_million_tokens_with_offsets_past_32_bits(way):
    length = 1 << 20
    heads = 2**31 // (length * way.head_dim) + 2
    tensors = inputs(heads, length, way.head_dim, strides="bshd")
    assert tensors[0].numel() > 2**31
    mask = masks.local(REACH)(length, 128, "cuda")
    results = step(tensors, mask, way)
    for head, start in ((0, 0), (heads - 1, 512_000), (heads - 1, length - 8 * REACH)):
        check_window(head, start, mask, way, tensors, results)


def check_window(head, start, mask, way, tensors, results):
    """The results of some tokens, which only their neighbours take part in, against float64."""
    window = slice(start, start + 8 * REACH)
    inner = slice(
        0 if start == 0 else 2 * REACH,
        None if window.stop == mask.seq_len[0] else 6 * REACH,
    )
    here = [x[:, head : head + 1, window] for x in tensors]
    neighbours = masks.local(REACH)(8 * REACH, 128, "cuda")
    found = dict(zip(("out", "dq", "dk", "dv"), results, strict=True))
    found = {n: x[:, head : head + 1, window][:, :, inner] for n, x in found.items()}

    def attend(query, key, value):
        return sparseflash.attention(
            query, key, value, neighbours, backend=way.backend, return_lse=True
        )

    zeros = torch.zeros(here[0].shape[:3], device="cuda")
    expected = check_attention(attend, *here[:3], neighbours, grad_out=here[3], grad_lse=zeros)
    for name, result in found.items():
        torch.testing.assert_close(result, expected[name][:, :, inner], rtol=0.02, atol=0.02)


def test_a_cuda_graph_of_forward_and_backward(way):
    tensors = inputs(4, 1000, way.head_dim, kv_heads=2)
    mask = masks.causal()(1000, 128, "cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(tensors, mask, way)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(tensors, mask, way)
    with torch.no_grad():
        for x in tensors:
            x.copy_(torch.randn_like(x))
    graph.replay()
    found, expected = way.fixed(captured), way.fixed(step(tensors, mask, way))
    for result, same in zip(found, expected, strict=True):
        assert torch.equal(result, same)
