"""The largest masked score of every query, on every backend, against float64."""

from functools import partial

import pytest
import torch

import masks
import sparseflash
from sparseflash.testing import make_inputs, poisoned_empty
from tests.helpers.max_logits import expected

HAS_GPU = torch.cuda.is_available()
BACKENDS = {"triton": "cuda"} if HAS_GPU else {"cpu": "cpu", "triton": "cpu"}
FIRST = next(iter(BACKENDS))
HOLES = masks.random(0.5) - masks.global_tokens(20)  # without a key for the first queries
CAUSAL = masks.causal(align="bottom-right")


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


def inputs(backend, lengths=(37, 50), **options):
    sizes = {"kv_heads": 1, "device": BACKENDS[backend]} | options
    return make_inputs(2 if backend == "cpu" else 1, 2, *lengths, 16, **sizes)[:3]


def check(backend, pattern, tensors=None, **options):
    tensors = inputs(backend) if tensors is None else tensors
    mask = pattern((tensors[0].shape[2], tensors[1].shape[2]), 16, BACKENDS[backend])
    attend = partial(sparseflash.attention, *tensors, mask, return_lse=True, backend=backend)
    with poisoned_empty():
        out, lse, found = attend(return_max_logits=True, **options)
    assert found.dtype == lse.dtype
    assert found.shape == tensors[0].shape[:3]
    for ours, without in zip((out, lse), attend(**options), strict=True):
        assert torch.equal(ours, without)
    return found, tensors, mask


@pytest.mark.parametrize("pattern", [HOLES, CAUSAL, masks.full()], ids=["holes", "causal", "full"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_dtypes(backend, dtype, pattern):
    if backend == "triton" and (dtype == torch.float64 or (dtype, HAS_GPU) == (torch.bfloat16, 0)):
        pytest.skip("not served")
    found, tensors, mask = check(backend, pattern, inputs(backend, dtype=dtype))
    reference = expected(*tensors, mask)
    # Near ties in float64 are log(2) / SHARP apart, at most.
    torch.testing.assert_close(found.double(), reference, rtol=1e-5, atol=1e-5)
    assert found[:, :, 0].isneginf().all() == (pattern is HOLES)


def test_padded_keys(backend):
    lengths = torch.tensor([0, 41][-1 if backend == "triton" else -2 :], device=BACKENDS[backend])
    found, tensors, mask = check(backend, masks.full(), key_lengths=lengths)
    reference = expected(*tensors, mask, key_lengths=lengths)
    torch.testing.assert_close(found.double(), reference, rtol=1e-5, atol=1e-5)


def test_scores_are_those_of_softmax(backend):
    bias = torch.randn(1, 86, device=BACKENDS[backend])
    options = {"softcap": 2.0, "bias": bias, "dropout_p": 0.3, "seed": 3}
    found, (query, key, _), mask = check(backend, CAUSAL, **options)
    scores = query.double() @ key.double().mT / 4
    scores = 2 * torch.tanh(scores / 2)
    distance = torch.arange(50)[None] - torch.arange(37)[:, None] + 36
    scores = scores + bias[0].double()[distance]
    allowed = mask.to_dense().to(query.device)
    torch.testing.assert_close(
        found.double(), scores.masked_fill(~allowed, -torch.inf).amax(-1), rtol=1e-5, atol=1e-5
    )


def test_sinks_are_not_among_them(backend):
    sinks = torch.full((2,), 100.0, device=BACKENDS[backend])
    found, tensors, mask = check(backend, CAUSAL, sinks=sinks)
    torch.testing.assert_close(found.double(), expected(*tensors, mask), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("splits", [1, 3])
def test_few_queries(backend, splits, monkeypatch):
    from sparseflash.backends.triton import decode

    monkeypatch.setattr(decode, "fastest_splits", lambda *facts: splits)
    pattern = masks.local(40, align="bottom-right")
    found, tensors, mask = check(backend, pattern, inputs(backend, (2, 60)))
    torch.testing.assert_close(found.double(), expected(*tensors, mask), rtol=1e-5, atol=1e-5)


def test_they_have_no_gradient_and_change_none(backend):
    tensors = [x.requires_grad_() for x in inputs(backend, (16, 16))]
    attend = partial(sparseflash.attention, *tensors, CAUSAL, backend=backend)
    out, found = attend(return_max_logits=True)
    assert not found.requires_grad
    grads, others = (torch.autograd.grad(x.square().sum(), tensors) for x in (out, attend()))
    assert all(map(torch.equal, grads, others))


def test_documents(backend):
    query, key, value = inputs(backend, (32, 40))
    packed = [x[0].transpose(0, 1) for x in (query, key, value)]
    bounds = [torch.tensor(x, device=BACKENDS[backend]) for x in ([0, 5, 32], [0, 9, 40])]
    attend = partial(sparseflash.attention_varlen, *packed, *bounds, backend=backend)
    _, found = attend(return_max_logits=True)
    mask = masks.documents((5, 27), (9, 31))((32, 40))
    reference = expected(query, key, value, mask)[0]
    torch.testing.assert_close(found.double(), reference, rtol=1e-5, atol=1e-5)
    _, lse, again = attend(return_lse=True, return_max_logits=True)
    assert torch.equal(found, again)
    assert torch.equal(lse, attend(return_lse=True)[1])


@pytest.mark.skipif(HAS_GPU, reason="of the backend cpu")
def test_what_no_query_attends_may_hold_nan():
    tensors = inputs("cpu", (40, 40))
    attend = partial(sparseflash.attention, *tensors, masks.causal(), return_max_logits=True)
    _, expected = attend()
    tensors[1][:, :, 39] = torch.nan
    _, found = attend()
    assert torch.equal(found[:, :, :39], expected[:, :, :39])
    assert found[:, :, 39].isnan().all()


@pytest.mark.parametrize("lengths", [(0, 8), (8, 0)])
def test_without_a_pair(lengths):
    tensors = [x.requires_grad_() for x in inputs(FIRST, lengths)]
    out, found = sparseflash.attention(*tensors, return_max_logits=True)
    assert found.shape == out.shape[:3]
    assert found.isneginf().all()
    assert not found.requires_grad


def test_in_graphs():
    tensors = [x.requires_grad_() for x in inputs(FIRST)]
    attend = partial(
        sparseflash.attention, mask=CAUSAL.with_block_size(16), return_max_logits=True
    )
    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    results, others = compiled(*tensors), attend(*tensors)
    assert all(map(torch.equal, results, others))
    assert not results[1].requires_grad
    grads = [torch.autograd.grad(x[0].square().sum(), tensors) for x in (results, others)]
    assert all(map(torch.equal, *grads))
    torch._dynamo.reset()
    doubled = [torch.stack([x, 2 * x]) for x in tensors]
    _, mapped = torch.func.vmap(attend)(*doubled)
    torch.testing.assert_close(mapped, torch.stack([others[1], 4 * others[1]]))

    def loss(query):
        out, found = attend(query, *tensors[1:])
        return out.square().sum() + found.sum()

    torch.testing.assert_close(torch.func.grad(loss)(tensors[0]), grads[0][0])
