"""torch.func and forward-mode derivatives: right against float64, or refused with a sentence."""

import subprocess
import sys
from functools import partial

import pytest
import torch
from torch import func
from torch.autograd import forward_ad

import masks
import sparseflash
from sparseflash.reference import standard_attention

MASK = masks.causal()(12, 16)
TENSORS = [torch.randn(2, 2, 12, 4, dtype=torch.float64) for _ in range(3)]
QUERY, KEY, VALUE = TENSORS


def attend(*tensors, **options):
    return sparseflash.attention(*tensors, MASK, **options)


def expected(*tensors, **options):
    return standard_attention(*tensors, MASK, **options)[0]


def of_one(f):
    """f of tensors without a batch."""
    return lambda *tensors: f(*(x[None] for x in tensors))[0]


def loss(f):
    return lambda *tensors: f(*tensors).square().sum()


EVERY = (0, 1, 2)
RIGHT = {
    "grad": lambda f: func.grad(loss(f), EVERY)(*TENSORS),
    "grad of one": lambda f: func.grad(lambda x: loss(f)(QUERY, x, VALUE))(KEY),
    "value": lambda f: func.grad_and_value(loss(f))(*TENSORS),
    "vjp": lambda f: func.vjp(f, *TENSORS)[1](QUERY),
    "jacrev": lambda f: func.jacrev(of_one(f), EVERY)(*(x[0] for x in TENSORS)),
    "vmap of grad": lambda f: func.vmap(func.grad(loss(of_one(f)), EVERY))(*TENSORS),
    "grad of vmap": lambda f: func.grad(loss(func.vmap(of_one(f))), EVERY)(*TENSORS),
    "vmap of vjp": lambda f: func.vmap(lambda x: func.vjp(f, *TENSORS)[1](x))(QUERY[None]),
    "bias": lambda f: func.grad(lambda b: loss(partial(f, bias=b))(*TENSORS))(torch.ones(2, 23)),
    "jacobian": lambda f: torch.autograd.functional.jacobian(f, tuple(TENSORS)),
}


@pytest.mark.parametrize("derivative", RIGHT.values(), ids=RIGHT)
def test_derivatives_are_right(derivative):
    torch.testing.assert_close(derivative(attend), derivative(expected))


def test_the_scores_of_a_dynamic_mask_get_their_gradient():
    def attended(scores):
        mask = masks.DynamicMask.from_topk(scores, 1, 16, 40)
        query = torch.ones(1, 1, 40, 8)
        return sparseflash.attention(query, query, query, mask, return_lse=True)[1].sum()

    scores = torch.rand(3, 3)
    right = torch.autograd.grad(attended(scores.requires_grad_()), scores)[0]
    torch.testing.assert_close(func.grad(attended)(scores.detach()), right)
    assert right.abs().sum() > 0


TANGENTS = {
    "jvp": lambda f: func.jvp(f, (QUERY,), (QUERY,)),
    "jacfwd": lambda f: func.jacfwd(f)(QUERY),
    "hessian": lambda f: func.hessian(lambda x: f(x).sum())(QUERY),
    "linearize": lambda f: func.linearize(f, QUERY)[1](QUERY),
    "compiled": lambda f: torch.compile(lambda x: func.jvp(f, (x,), (x,))[1], backend="aot_eager")(
        QUERY
    ),
}


@pytest.mark.parametrize("derivative", TANGENTS.values(), ids=TANGENTS)
def test_forward_mode_is_refused_with_what_works(derivative):
    with pytest.raises(NotImplementedError, match=r"no forward-mode .* torch.func.grad, vjp and"):
        derivative(lambda x: attend(x, KEY, VALUE))


@pytest.mark.parametrize(
    "make",
    [
        lambda: masks.causal()(12, 16),
        lambda: masks.pattern(lambda q, k: q // 3 >= k // 5)(12, 16),
        lambda: masks.stack([masks.causal(), masks.local(3)])(12, 16),
    ],
    ids=["builtin", "own", "heads"],
)
def test_a_function_may_make_its_mask(make):
    def attended(query):
        return sparseflash.attention(query, KEY, VALUE, make())

    with pytest.raises(NotImplementedError, match=r"no forward-mode .* torch.func.grad, vjp and"):
        TANGENTS["linearize"](attended)
    torch.testing.assert_close(
        func.grad(loss(attended))(QUERY),
        torch.autograd.grad(loss(attended)(leaf := QUERY.clone().requires_grad_()), leaf)[0],
    )


def test_the_first_call_of_a_process_may_be_a_transformed_one():
    program = """
import torch, masks, sparseflash
q = torch.randn(1, 1, 8, 4)
attend = lambda x: sparseflash.attention(x, q, q, masks.causal()(8, 16))
torch.func.grad(lambda x: attend(x).sum())(q)
attend(q.requires_grad_()).sum().backward()
try:
    torch.func.linearize(attend, q)
except NotImplementedError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "no forward-mode derivative" in done.stdout, done.stderr


def test_forward_mode_of_plain_autograd_is_refused_too():
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode"):
        attend(forward_ad.make_dual(QUERY, QUERY), KEY, VALUE)


BATCHES = {
    "vectorize": lambda out, query, grads: torch.autograd.functional.jacobian(
        attend, tuple(TENSORS), vectorize=True
    ),
    "is_grads_batched": partial(torch.autograd.grad, is_grads_batched=True),
    "vmap": lambda out, query, grads: func.vmap(partial(torch.autograd.grad, out, query))(grads),
    "grad": lambda out, query, grads: func.grad(
        lambda grad: torch.autograd.grad(out, query, grad)[0].sum()
    )(grads[0]),
}


@pytest.mark.parametrize("differentiate", BATCHES.values(), ids=BATCHES)
def test_a_batch_of_gradients_of_plain_autograd_is_refused(differentiate):
    out = attend(query := QUERY.clone().requires_grad_(), KEY, VALUE)
    with pytest.raises(NotImplementedError, match="gradient, got a batch"):
        differentiate(out, query, torch.randn(3, *out.shape, dtype=out.dtype))


SECOND = {
    "grad of grad": lambda f: func.grad(lambda x: func.grad(loss(f))(x).sum())(QUERY),
    "jacrev of jacrev": lambda f: func.jacrev(func.jacrev(lambda x: f(x).sum()))(QUERY),
    "hvp": lambda f: torch.autograd.functional.hvp(lambda x: f(x).sum(), QUERY, QUERY),
}


@pytest.mark.parametrize("derivative", SECOND.values(), ids=SECOND)
def test_second_derivatives_are_refused(derivative):
    with pytest.raises(NotImplementedError, match="no second derivative"):
        derivative(lambda x: attend(x, KEY, VALUE))


def test_a_compiled_function_may_take_gradients():
    torch._dynamo.reset()
    gradient = func.grad(lambda x: loss(attend)(x, KEY, VALUE))
    compiled = torch.compile(gradient, backend="aot_eager")
    right = func.grad(lambda x: loss(expected)(x, KEY, VALUE))(QUERY)
    torch.testing.assert_close(compiled(QUERY), right)


@pytest.mark.parametrize("changed", ["key_lengths", "bias", "query"])
@pytest.mark.parametrize("differentiated", [False, True])
def test_what_the_backward_reads_must_not_change(changed, differentiated):
    query, key = torch.randn(2, 2, 12, 4), torch.randn(2, 2, 12, 4, requires_grad=True)
    options = {
        "key_lengths": torch.tensor([12, 5], dtype=torch.int32),
        "bias": torch.randn(2, 23, requires_grad=differentiated),
    }
    out = attend(query, key, key, **options)
    with torch.no_grad():
        (options | {"query": query})[changed].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
