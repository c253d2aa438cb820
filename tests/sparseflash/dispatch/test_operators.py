"""Attention inside torch's own machinery: compile, export, func, autocast, checkpointing."""

from functools import partial
from shutil import which
from typing import ClassVar

import pytest
import torch
import torch._dynamo.testing
from torch.autograd import forward_ad
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import masks
import sparseflash
from masks import DynamicMask
from sparseflash import _attention
from sparseflash.backends import cpu
from sparseflash.dispatch import operators
from sparseflash.reference import standard_attention
from sparseflash.testing import make_inputs

HAS_GPU = torch.cuda.is_available()
BACKENDS = {"triton": "cuda"} if HAS_GPU else {"cpu": "cpu", "triton": "cpu"}
DEVICE = "cuda" if HAS_GPU else "cpu"
PATTERN = masks.local(20, align="top-left").with_block_size(16)


def inputs(*lengths, device=DEVICE, **options):
    tensors = make_inputs(2, 2, *(lengths or (40, 50)), 16, device=device, **options)[:3]
    return [x.requires_grad_() for x in tensors]


def with_gradients(attend, tensors):
    out, lse = attend(*tensors)
    return out, lse, *torch.autograd.grad((out.float() ** 2).sum() + lse.sum(), tensors)


def same(results, expected):
    for result, other in zip(results, expected, strict=True):
        assert torch.equal(result, other)


@pytest.fixture
def compile_counter():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    yield counter
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("backend", "strides"),
    [
        pytest.param("triton", "bshd", marks=[] if HAS_GPU else pytest.mark.slow),
        *((next(iter(BACKENDS)), s) for s in ("contiguous", "bshd", "expanded")),
    ],
)
def test_compiled_whole_and_for_every_length(backend, strides, compile_counter):
    attend = partial(sparseflash.attention, mask=PATTERN, return_lse=True, backend=backend)
    compiled = torch.compile(attend, backend=compile_counter, fullgraph=True)
    for lengths in ((20, 50), (28, 33), (17, 65)):
        tensors = inputs(*lengths, device=BACKENDS[backend], strides=strides)
        same(with_gradients(compiled, tensors), with_gradients(attend, tensors))
    assert compile_counter.frame_count == 2  # static lengths, then dynamic ones


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own compiler
@pytest.mark.skipif(not which("g++"), reason="torch's compiler needs g++")
def test_compiled_with_the_default_compiler():
    torch._dynamo.reset()

    def attend(q, k, v):
        out, lse = sparseflash.attention(q.sin(), k, v, PATTERN, return_lse=True)
        return out.transpose(1, 2).flatten(2) * 2, lse

    compiled = torch.compile(attend, fullgraph=True)
    for result, expected in zip(
        with_gradients(compiled, inputs()), with_gradients(attend, inputs()), strict=True
    ):
        torch.testing.assert_close(result, expected)
    torch._dynamo.reset()


def test_a_graph_is_of_one_mask(compile_counter):
    attend = partial(sparseflash.attention, return_lse=True)
    compiled = torch.compile(attend, backend=compile_counter, fullgraph=True)
    tensors = inputs(40, 40)
    for mask in (masks.causal(), masks.butterfly(), masks.causal()(40, 16, DEVICE), None):
        same(compiled(*tensors, mask), attend(*tensors, mask))


@pytest.mark.parametrize(
    "make",
    [
        lambda scores: masks.local(20, align="top-left").with_block_size(16),
        lambda scores: DynamicMask.from_topk(scores, 2, 16, seq_len=(40, 50)),
    ],
)
def test_a_mask_is_made_outside_of_graphs(make, compile_counter):
    def attend(query, key, value, scores):
        return sparseflash.attention(query, key, value, make(scores), return_lse=True)

    arguments = (*inputs(), torch.rand(3, 4, device=DEVICE))
    same(torch.compile(attend, backend=compile_counter)(*arguments), attend(*arguments))
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match="masks must be made once, outside of the compiled"):
        torch.compile(attend, backend=compile_counter, fullgraph=True)(*arguments)


def test_graphs_that_concepts_counts(compile_counter):
    """One for a pattern of any length, another for each new mask."""
    compiled = torch.compile(sparseflash.attention, backend=compile_counter)
    for length in (40, 50, 60):
        compiled(*inputs(length, length), PATTERN)
    of_one = compile_counter.frame_count
    assert of_one <= 2  # torch takes a second length for any length
    for made in (1, 2):
        compiled(*inputs(50, 50), masks.local(3))
        assert compile_counter.frame_count == of_one + made


def test_options_in_a_graph(compile_counter):
    lengths = torch.tensor([11, 50], device=DEVICE)
    options = {"key_lengths": lengths, "dropout_p": 0.3, "seed": -5, "scale": 0.5}
    attend = partial(sparseflash.attention, mask=PATTERN, return_lse=True, **options)
    compiled = torch.compile(attend, backend=compile_counter, fullgraph=True)
    same(with_gradients(compiled, inputs()), with_gradients(attend, inputs()))


def test_a_graph_draws_a_new_dropout_mask_at_every_call(compile_counter):
    attend = partial(sparseflash.attention, mask=PATTERN, dropout_p=0.5)
    compiled = torch.compile(attend, backend=compile_counter, fullgraph=True)
    tensors = inputs()
    assert not torch.equal(compiled(*tensors), compiled(*tensors))


@pytest.mark.parametrize(
    ("backend", "strides"),
    [
        pytest.param("triton", "bshd", marks=[] if HAS_GPU else pytest.mark.slow),
        *((next(iter(BACKENDS)), s) for s in ("contiguous", "bshd")),
    ],
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # opcheck of torch 2.15
def test_opcheck(backend, strides):
    tensors = inputs(16, 20, device=BACKENDS[backend], strides=strides)
    lengths = torch.tensor([16, 20], device=BACKENDS[backend], dtype=torch.int32)
    mask, seed = PATTERN((16, 20), 16), torch.tensor(3)
    bias = torch.randn(2, 35, device=BACKENDS[backend], requires_grad=True)
    scores = torch.rand(2, 1, 1, 2, device=BACKENDS[backend], requires_grad=True)
    chosen = DynamicMask.from_topk(scores, 1, 16, (16, 20))
    handle = mask.handle
    plain = (None, None, None, 0.0, "ieee", True, False, backend)
    others = (0.3, 5.0, None, 0.2, "tf32", True, True, backend)
    for rest in (
        (None, None, None, handle, None, None, False, [], *plain),
        (bias, None, None, handle, lengths, seed, True, [], *others),
        (None, scores, chosen.blocks, chosen.support.handle, None, None, False, [], *plain),
    ):
        torch.library.opcheck(operators.attention, (*tensors, *rest))


@pytest.fixture
def specs(monkeypatch):
    """The specs of the calls that the backend cpu computes, by the name of the pass."""
    seen = {}

    def watched(name, computed, call, *arguments):
        seen[name] = call.spec
        return computed(call, *arguments)

    for name in ("forward", "backward"):
        monkeypatch.setattr(cpu, name, partial(watched, name, getattr(cpu, name)))
    return seen


WEIGHTED = sparseflash.ScoreFunction.from_torch(
    "weighted by a tensor", lambda score, b, h, q, k, weight: score * weight[h], (float,)
)
# Arguments of a call of 40 queries and 50 keys, each from whether its tensor gets a gradient.
FACTS = {
    "none": lambda gradient: {},
    "key lengths": lambda gradient: {"key_lengths": torch.tensor([40, 50])},
    "maximum logits": lambda gradient: {"return_max_logits": True},
    "bias": lambda gradient: {"bias": torch.randn(2, 89, requires_grad=gradient)},
    "blocks": lambda gradient: {
        "mask": DynamicMask.from_topk(torch.rand(3, 4, requires_grad=gradient), 2, 16, (40, 50))
    },
    "score tensors": lambda gradient: {
        "score": WEIGHTED,
        "score_tensors": [torch.ones(2, requires_grad=gradient)],
    },
}


@pytest.mark.parametrize("arguments", FACTS.values(), ids=FACTS)
@pytest.mark.parametrize("gradient", [False, True])
def test_a_traced_call_has_the_spec_of_an_eager_one(arguments, gradient, specs, monkeypatch):
    def specs_of(traced, gradient):
        monkeypatch.setattr(_attention, "is_traced", lambda *_: traced)
        given = {"mask": PATTERN, "backend": "cpu"} | arguments(gradient)
        results = sparseflash.attention(*inputs(device="cpu"), **given)
        out = results[0] if isinstance(results, tuple) else results
        out.sum().backward()
        return specs.pop("forward"), specs.pop("backward")

    _, backward = specs_of(False, gradient)
    forward, _ = specs_of(False, gradient=False)  # which a graph may run without a gradient
    assert specs_of(True, gradient) == (forward, backward)


class Module(torch.nn.Module):
    def forward(self, query, key, value):
        return sparseflash.attention(query, key, value, PATTERN)


@pytest.mark.parametrize("strict", [True, False])
def test_exported_for_every_length(strict):
    queries, keys = torch.export.Dim("queries", min=8), torch.export.Dim("keys", min=8)
    dynamic = ({2: queries}, {2: keys}, {2: keys})
    exported = torch.export.export(
        Module(), tuple(inputs(40, 50)), dynamic_shapes=dynamic, strict=strict
    )
    tensors = inputs(130, 77)
    assert torch.equal(exported.module()(*tensors), Module()(*tensors))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_autocast_casts_as_torch_does(dtype):
    if HAS_GPU and dtype == torch.float64:
        pytest.skip("no backend for float64 on the GPU")
    tensors = inputs(40, 40, dtype=dtype)
    with torch.autocast(DEVICE, torch.bfloat16):
        out, lse = sparseflash.attention(*tensors, backend=next(iter(BACKENDS)), return_lse=True)
        expected = scaled_dot_product_attention(*tensors)
        grads = torch.autograd.grad(out.double().sum(), tensors)
    assert out.dtype == expected.dtype
    assert [g.dtype for g in grads] == [dtype] * 3
    low = [x.to(out.dtype) for x in tensors]
    same((out, lse), sparseflash.attention(*low, backend=next(iter(BACKENDS)), return_lse=True))


def test_autocast_in_a_graph(compile_counter):
    compiled = torch.compile(sparseflash.attention, backend=compile_counter, fullgraph=True)
    tensors = inputs()
    with torch.autocast(DEVICE, torch.float16):
        same([compiled(*tensors, PATTERN)], [sparseflash.attention(*tensors, PATTERN)])


def selective():
    def policy(context, operator, *args, **kwargs):
        save = operator == torch.ops.sparseflash.attention.default
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


@pytest.mark.parametrize("options", [{}, {"context_fn": selective}], ids=["full", "selective"])
def test_checkpointing(options):
    attend = partial(sparseflash.attention, mask=PATTERN, dropout_p=0.4, return_lse=True)
    tensors = inputs()
    torch.manual_seed(1)
    expected = with_gradients(attend, tensors)
    torch.manual_seed(1)
    result = with_gradients(
        lambda *x: checkpoint(attend, *x, use_reentrant=False, **options), tensors
    )
    same(result, expected)


def test_a_mask_made_in_a_checkpoint_lives_until_its_gradient():
    (query, *_), within = inputs(40, 40), masks.full()(40, 16, DEVICE)
    blocks = torch.rand(3, 3, device=DEVICE) < 0.7

    def attend(query):
        causal = sparseflash.attention(query, query, query, masks.causal()(40, 16, DEVICE))
        return sparseflash.attention(causal, query, query, within.select(blocks))

    expected = torch.autograd.grad(attend(query).sum(), query)
    result = checkpoint(attend, query, use_reentrant=False, context_fn=selective)
    same(torch.autograd.grad(result.sum(), query), expected)


def test_vmap_is_a_larger_batch():
    query, key, value = (torch.randn(3, 2, 2, 40, 16, device=DEVICE) for _ in range(3))
    attend = partial(sparseflash.attention, mask=PATTERN)
    mapped = torch.func.vmap(attend, in_dims=(0, None, 1))(query, key[0], value.transpose(0, 1))
    same(mapped, [attend(q, key[0], v) for q, v in zip(query, value, strict=True)])


def test_a_mask_made_under_vmap():
    query = torch.randn(3, 1, 2, 40, 16, device=DEVICE)

    def attend(query):
        return sparseflash.attention(query, query, query, masks.causal()(40, 16, DEVICE))

    same(torch.func.vmap(attend)(query), [attend(q) for q in query])


def test_vmap_under_autograd():
    def loss(attend, tensors):
        return torch.autograd.grad(attend(*tensors).square().sum(), tensors)

    attend = partial(sparseflash.attention, mask=PATTERN)
    tensors = [torch.randn(3, 2, 2, 40, 16, device=DEVICE).requires_grad_() for _ in range(3)]
    batches = [x.flatten(0, 1) for x in tensors]
    expected = [x.unflatten(0, (3, 2)) for x in loss(attend, batches)]
    same(loss(torch.func.vmap(attend), tensors), expected)


def of_batch(score, batch, head, query, key):
    return torch.where(query % (batch + 2) == 0, score / 2, score)


OF_BATCH = sparseflash.ScoreFunction.from_torch("of the batch element", of_batch)
HALF = sparseflash.ScoreFunction.from_torch("half", lambda s, b, h, q, k: s / 2 + 0.1 * h)


def test_vmap_has_no_batch_elements_of_its_own():
    tensors = torch.randn(3, 3, 2, 2, 40, 16, device=DEVICE)
    half = partial(sparseflash.attention, mask=PATTERN, score=HALF)
    same(torch.func.vmap(half)(*tensors), [half(*x) for x in tensors.unbind(1)])
    with pytest.raises(NotImplementedError, match="score must not depend on the batch element"):
        torch.func.vmap(partial(half, score=OF_BATCH))(*tensors)
    with pytest.raises(NotImplementedError, match="score must not depend on the batch element"):
        torch.func.jacrev(lambda q: half(q, *tensors[1:, 0], score=OF_BATCH).sum((1, 2, 3)))(
            tensors[0, 0]
        )
    six = masks.MaskBatch.from_masks([PATTERN((40, 40), device=DEVICE)] * 6)
    with pytest.raises(NotImplementedError, match="mask must not be a MaskBatch under vmap"):
        torch.func.vmap(partial(sparseflash.attention, mask=six))(*tensors)


@pytest.mark.parametrize(("backend", "device"), BACKENDS.items())
def test_negated_views_are_read_with_their_sign(backend, device):
    numbers = torch.randn(3, 1, 1, 40, 16, 2, device=device)
    negated = torch.view_as_complex(numbers).conj().imag.requires_grad_()
    same_numbers = (-numbers[..., 1]).requires_grad_()
    assert negated.is_neg()
    assert torch.equal(negated, same_numbers)
    attend = partial(sparseflash.attention, mask=PATTERN, backend=backend)

    def gradient(tensors):
        out = attend(*tensors.unbind())
        # The gradient of the imaginary part of what is conjugated is a negated view.
        total = (torch.complex(torch.zeros_like(out), out).conj() * 1j).real.sum()
        return out, *torch.autograd.grad(total, tensors)

    same(gradient(negated), gradient(same_numbers))
    plain = torch.autograd.grad(attend(*same_numbers.unbind()).sum(), same_numbers)
    # Another layout of grad_out may be read in other tiles, whose sums are rounded differently.
    torch.testing.assert_close(gradient(same_numbers)[1:], plain, rtol=1e-5, atol=1e-5)


def test_vmap_does_not_draw_dropout():
    tensors = torch.randn(3, 3, 2, 2, 40, 16, device=DEVICE)
    attend = partial(sparseflash.attention, dropout_p=0.2, seed=1)
    with pytest.raises(NotImplementedError, match="dropout_p must be 0"):
        torch.func.vmap(attend)(*tensors)


@pytest.mark.parametrize("traced", [False, True])
def test_second_derivatives_are_refused(traced, monkeypatch):
    monkeypatch.setattr(_attention, "is_traced", lambda *_: traced)
    tensors = inputs()
    out = sparseflash.attention(*tensors)
    grads = torch.autograd.grad(out.square().sum(), tensors, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(grads[0].sum(), tensors)


def test_tangents_are_refused_not_dropped():
    query, *_ = make_inputs(1, 1, 20, 20, 16, device=DEVICE)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        sparseflash.attention(forward_ad.make_dual(query, query), query, query)


def test_the_reference_has_second_derivatives():
    tensors = [x[:1, :1, :6, :2].double() for x in inputs()]
    mask = masks.causal()(6, 16).to(DEVICE)
    assert torch.autograd.gradgradcheck(lambda *x: standard_attention(*x, mask)[0], tensors)


class Pending(torch.Tensor):
    """Has no memory of its own: every operator gets the tensor that it holds."""

    seen: ClassVar[list[str]] = []

    @staticmethod
    def __new__(cls, held):
        shape, options = held.shape, {"dtype": held.dtype, "device": held.device}
        return torch.Tensor._make_wrapper_subclass(cls, shape, held.stride(), **options)

    def __init__(self, held):
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        cls.seen.append(str(function))
        args, kwargs = tree_map_only(cls, lambda x: x.held, (args, kwargs or {}))
        return function(*args, **kwargs)


@pytest.mark.parametrize("place", range(3))
def test_a_tensor_without_memory_is_asked_for_the_operator(place):
    tensors = [x.detach() for x in inputs()]
    expected = sparseflash.attention(*tensors, PATTERN)
    pending = [Pending(x) if i == place else x for i, x in enumerate(tensors)]
    Pending.seen.clear()
    torch.testing.assert_close(sparseflash.attention(*pending, PATTERN), expected)
    assert "sparseflash.attention.default" in Pending.seen


def test_kernels_get_the_memory_of_a_gradient(monkeypatch):
    tensors = inputs()
    out = sparseflash.attention(*tensors, PATTERN)
    grad = torch.randn_like(out)
    expected = torch.autograd.grad(out, tensors, grad, retain_graph=True)
    backend, got = out.grad_fn.plan.backend, []
    real = backend.backward

    def backward(call, grad_out, *rest):
        got.append(type(grad_out))
        return real(call, grad_out, *rest)

    monkeypatch.setattr(backend, "backward", backward)
    for found, right in zip(
        torch.autograd.grad(out, tensors, Pending(grad)), expected, strict=True
    ):
        torch.testing.assert_close(found, right)
    assert got == [torch.Tensor]
