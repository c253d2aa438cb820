"""Values of other dims than queries and keys, on every backend, against float64."""

from functools import partial

import pytest
import torch

import masks
import sparseflash
from sparseflash.merge import merge_attention
from sparseflash.testing import (
    STRIDES,
    check_attention,
    make_inputs,
    poisoned_empty,
)
from sparseflash.testing.reference import standard_attention

HAS_GPU = torch.cuda.is_available()
BACKENDS = {"triton": "cuda"} if HAS_GPU else {"cpu": "cpu", "triton": "cpu"}
HOLES = masks.random(0.5) - masks.global_tokens(20)  # without a key for the first queries
DIMS = [(24, 16), (8, 40)]  # of which the tiles are wider and narrower than those of values


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


def inputs(backend, head_dim, value_dim, *, lengths=(37, 50), heads=2, **options):
    device = BACKENDS[backend]
    sizes = {"value_dim": value_dim, "kv_heads": 1, "device": device}
    return make_inputs(1, heads, *lengths, head_dim, **(sizes | options))[:3]


def check(backend, tensors, pattern, **options):
    query, key, _ = tensors
    mask = pattern((query.shape[2], key.shape[2]), 16, query.device)
    attend = partial(sparseflash.attention, mask=mask, return_lse=True, backend=backend, **options)
    with poisoned_empty():
        return check_attention(attend, *tensors, mask, **options)


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes(backend, dims, dtype):
    if backend == "triton" and not HAS_GPU and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies bfloat16 wrongly")
    results = check(backend, inputs(backend, *dims, dtype=dtype), HOLES)
    assert results["out"].shape == (1, 2, 37, dims[1])
    assert (results["out"][:, :, :20] == 0).all()


@pytest.mark.skipif(HAS_GPU, reason="of the backend cpu")
def test_gradients_in_float64():
    tensors = inputs("cpu", 3, 5, lengths=(9, 20), dtype=torch.float64)
    mask = masks.causal(align="bottom-right")((9, 20), 16)
    attend = partial(sparseflash.attention, mask=mask, return_lse=True)
    assert torch.autograd.gradcheck(attend, [x.requires_grad_() for x in tensors])


@pytest.mark.parametrize("dims", [(192, 128)])
def test_latent_attention(backend, dims):
    """The dims of DeepSeek's."""
    lengths = (300, 300) if HAS_GPU else (20, 33)
    dtype = torch.bfloat16 if HAS_GPU else torch.float16
    tensors = inputs(backend, *dims, lengths=lengths, dtype=dtype)
    check(backend, tensors, masks.causal(align="bottom-right"))


@pytest.mark.parametrize("strides", STRIDES)
def test_strides(strides):
    backend = next(iter(BACKENDS))
    results = check(backend, inputs(backend, 8, 24, strides=strides), masks.butterfly())
    assert results["out"].stride(-1) == 1


def test_every_other_option(backend):
    options = {"softcap": 3.0, "dropout_p": 0.2, "seed": 3}
    bias = torch.randn(2, 86, device=BACKENDS[backend])
    lengths = torch.tensor([45], device=BACKENDS[backend])
    tensors = inputs(backend, 24, 16)
    check(backend, tensors, HOLES, bias=bias, key_lengths=lengths, **options)


def test_gradients_of_bias_and_blocks(backend):
    device = BACKENDS[backend]
    tensors = inputs(backend, 8, 24, lengths=(20, 33))
    bias = torch.randn(1, 52, device=device, requires_grad=True)
    scores = torch.rand(2, 3, device=device, requires_grad=True)
    mask = masks.full()((20, 33), 16, device).select_topk(scores, 2)
    grads = []
    for padding in (0, 16):  # zeros change nothing, and make all dims equal
        wide = [torch.nn.functional.pad(x, (0, padding)) for x in tensors[:2]]
        out = sparseflash.attention(*wide, tensors[2], mask, bias=bias, backend=backend, scale=0.3)
        grads.append(torch.autograd.grad(out.square().sum(), (bias, scores)))
    for ours, equal_dims in zip(*grads, strict=True):
        torch.testing.assert_close(ours, equal_dims)


@pytest.mark.parametrize(
    "needs", [(False, True, True), (False, False, True), (True, False, False)]
)
def test_some_gradients_alone(needs):
    backend = "triton"
    tensors = [
        x.requires_grad_(need)
        for x, need in zip(inputs(backend, 24, 16, lengths=(20, 33)), needs, strict=True)
    ]
    wanted = [x for x in tensors if x.requires_grad]
    with poisoned_empty():
        out = sparseflash.attention(*tensors, backend=backend)
        grads = torch.autograd.grad(out.square().sum(), wanted)
    expected = torch.autograd.grad(standard_attention(*tensors)[0].square().sum(), wanted)
    for ours, reference in zip(grads, expected, strict=True):
        torch.testing.assert_close(ours, reference.to(ours.dtype), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("splits", [1, 3])
def test_few_queries(backend, splits, monkeypatch):
    from sparseflash.backends.triton import decode

    monkeypatch.setattr(decode, "fastest_splits", lambda *facts: splits)
    tensors = inputs(backend, 24, 40, lengths=(2, 50))
    check(backend, tensors, masks.local(70, align="bottom-right"))


@pytest.mark.slow_interpreted
def test_documents(backend):
    tensors = inputs(backend, 8, 24, lengths=(32, 40), heads=4, kv_heads=2)
    bounds = [torch.tensor(x, device=BACKENDS[backend]) for x in ([0, 5, 32], [0, 9, 40])]
    mask = masks.documents((5, 27), (9, 31))((32, 40))

    def attend(*tensors):
        packed = [x[0].transpose(0, 1) for x in tensors]
        out, lse = sparseflash.attention_varlen(*packed, *bounds, return_lse=True, backend=backend)
        return out.transpose(0, 1)[None], lse[None]

    check_attention(attend, *tensors, mask)


def test_parts_of_the_keys_are_merged():
    tensors = inputs(backend := next(iter(BACKENDS)), 8, 24)

    def attend(query, key, value):
        parts = [(key[:, :, part], value[:, :, part]) for part in (slice(17), slice(17, None))]
        found = [
            sparseflash.attention(query, *part, return_lse=True, backend=backend) for part in parts
        ]
        return merge_attention(*zip(*found, strict=True))

    check_attention(attend, *tensors)


@pytest.mark.parametrize("q_len", [0, 20])
def test_without_a_key(q_len):
    query, key, value = (
        torch.zeros(1, 2, q_len, 8),
        torch.zeros(1, 1, 0, 8),
        torch.ones(1, 1, 0, 3),
    )
    out = sparseflash.attention(query, key, value)
    assert torch.equal(out, torch.zeros(1, 2, q_len, 3))


@pytest.mark.skipif(HAS_GPU, reason="of the backend cpu")
def test_what_no_query_attends_may_hold_nan():
    tensors = inputs("cpu", 8, 24, lengths=(40, 40))
    mask = masks.causal()(40, 16)
    expected = sparseflash.attention(*tensors, mask)
    tensors[2][:, :, 39] = torch.nan
    out = sparseflash.attention(*tensors, mask)
    assert torch.equal(out[:, :, :39], expected[:, :, :39])
    assert out[:, :, 39].isnan().all()


@pytest.mark.parametrize("strides", ["contiguous", "bshd"])
def test_in_graphs(strides):
    backend = next(iter(BACKENDS))
    tensors = [x.requires_grad_() for x in inputs(backend, 8, 24, strides=strides)]
    torch._dynamo.reset()
    attend = partial(sparseflash.attention, mask=HOLES.with_block_size(16), backend=backend)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    out, expected = compiled(*tensors), attend(*tensors)
    assert torch.equal(out, expected)
    grads, others = (torch.autograd.grad(x.square().sum(), tensors) for x in (out, expected))
    assert all(map(torch.equal, grads, others))
    torch._dynamo.reset()
    doubled = [x.expand(2, *x.shape) for x in tensors]
    torch.testing.assert_close(torch.func.vmap(attend)(*doubled)[1], expected)


def test_a_value_that_is_too_wide_is_named():
    query, key, value = inputs("triton", 16, 512)
    with pytest.raises(sparseflash.BackendError, match="value_dim is 512, needs 8 to 256"):
        sparseflash.attention(query, key, value, backend="triton")


def test_the_measured_call_has_a_gap(monkeypatch):
    monkeypatch.setattr("sparseflash._explain.SECONDS", 0.0)
    tensors = inputs(next(iter(BACKENDS)), 8, 24)
    found = sparseflash.explain(*tensors, masks.local(9, align="top-left"), measure=True)
    assert found.backward_gap is not None
