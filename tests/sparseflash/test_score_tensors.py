"""Score functions that read tensors, on every backend, against float64."""

import re
from functools import partial

import pytest
import torch

import masks
import sparseflash
from sparseflash.backends import cpu, hopper, triton
from sparseflash.dispatch import plan
from sparseflash.distributed import context_parallel_attention, make_plan
from sparseflash.testing import (
    assert_close_to_reference,
    check_attention,
    make_inputs,
    poisoned_empty,
)
from sparseflash.testing.reference import standard_attention
from tests.helpers.calls import spec_of

HAS_GPU = torch.cuda.is_available()
BACKENDS = {"triton": "cuda"} if HAS_GPU else {"cpu": "cpu", "triton": "cpu"}
FIRST = next(iter(BACKENDS))
LENGTHS = (37, 50)
CAUSAL = masks.causal(align="bottom-right")
HOLES = masks.random(0.5) - masks.global_tokens(20)


def with_slopes(score, batch, head, query, key, slopes):
    return score - slopes[head] * (query - key).abs()


def with_table(score, batch, head, query, key, table):
    return score + table[head, key - query + 7]  # which holds far distances


def in_documents(score, batch, head, query, key, of_query, of_key):
    return torch.where(of_query[batch, query] == of_key[batch, key], score, -torch.inf)


def with_all(score, batch, head, query, key, pair, position, factor, first):
    steep = score * torch.exp(factor[head, batch]) + 0.1 * score**2
    return (
        torch.where(position[key] % 3 == 0, steep, score)
        + pair[batch, head, query, key] * first[0]
    )


from_torch = sparseflash.ScoreFunction.from_torch


def in_soft_documents(score, batch, head, query, key, weight, document):
    same = document[batch, query] == document[batch, key]
    return torch.where(same, score * weight[document[batch, key]] + weight[0], -torch.inf)


def with_numbers_of_floats(score, batch, head, query, key, number, slopes):
    return score * slopes[number[head].long()]


def with_products(score, batch, head, query, key, table, weight):
    far = table[query * 2 - 3, batch, key + head]  # past either end, too
    return torch.where(weight[query - 5] > 0, score + far, weight[key] * table[0, 0, 2] ** 2)


SLOPES = from_torch("slopes of heads", with_slopes, (float,))
TABLE = from_torch("table of distances", with_table, [float])
DOCUMENTS = from_torch("in documents", in_documents, (int, int))
EVERYTHING = from_torch("every kind", with_all, (float, int, float, float))
SOFT_DOCUMENTS = from_torch("soft documents", in_soft_documents, (float, int))
NUMBERS = from_torch("numbers of floats", with_numbers_of_floats, (float, float))
SHIFTED = from_torch("shifted by heads", lambda score, batch, head, query, key: score - head)
PRODUCTS = from_torch("products of entries", with_products, (float, float))


def tensors_of(score, device="cpu", batch=1, heads=2):
    generator = torch.Generator().manual_seed(3)
    normal = partial(torch.randn, generator=generator)
    q_len, k_len = LENGTHS
    documents = [torch.arange(n).expand(batch, n) * 3 // 50 for n in (q_len, k_len)]
    made = {
        SLOPES: [normal(heads).abs()],
        TABLE: [normal(heads, 15)],
        DOCUMENTS: [documents[0].int(), documents[1] + (torch.arange(k_len) > 40)],
        EVERYTHING: [
            normal(batch, heads, k_len, q_len).mT,  # not contiguous
            torch.randperm(k_len, generator=generator),
            normal(heads, batch).half(),
            normal(1),
        ],
        SOFT_DOCUMENTS: [normal(3), documents[1] - (torch.arange(k_len) < 8).int()],
        NUMBERS: [torch.arange(heads).flip(0).float(), normal(heads)],
        PRODUCTS: [normal(q_len, batch, k_len), normal(k_len)],
    }
    return [x.to(device) for x in made[score]]


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


def check(backend, score, pattern=CAUSAL, *, dtype=torch.float32, lengths=LENGTHS, **options):
    device = BACKENDS[backend]
    batch = 2 if backend == "cpu" else 1
    tensors = make_inputs(batch, 2, *lengths, 16, kv_heads=1, dtype=dtype, device=device)[:3]
    mask = pattern(lengths, 16, device)
    options |= {"score": score, "score_tensors": tensors_of(score, device, batch)}
    attend = partial(sparseflash.attention, mask=mask, return_lse=True, backend=backend, **options)
    with poisoned_empty():
        return check_attention(attend, *tensors, mask, **options)


@pytest.mark.parametrize("score", [SLOPES, TABLE, EVERYTHING], ids=lambda score: score.name)
def test_functions(backend, score):
    check(backend, score)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dtypes(backend, dtype):
    if backend == "triton" and (dtype, HAS_GPU) == (torch.bfloat16, False):
        pytest.skip("Triton's interpreter multiplies bfloat16 wrongly")
    check(backend, EVERYTHING, HOLES, dtype=dtype)


@pytest.mark.parametrize("chosen", [False, True], ids=["static", "chosen on the device"])
def test_pairs_that_a_function_masks(backend, chosen):
    device = BACKENDS[backend]
    tensors = make_inputs(1, 2, *LENGTHS, 16, kv_heads=1, device=device)[:3]
    read = tensors_of(DOCUMENTS, device)
    read[0][:, :5] = -1  # of no document: queries without a key
    allowed = (read[0].unsqueeze(2) == read[1].unsqueeze(1)).unsqueeze(1)
    mask = HOLES(LENGTHS, 16, device)
    if chosen:
        mask = mask.select_topk(torch.rand(1, 2, 3, 4, device=device), 2)
    both = allowed & mask.to_dense().to(device)

    def attend(*tensors):
        return sparseflash.attention(
            *tensors, mask, score=DOCUMENTS, score_tensors=read, return_lse=True, backend=backend
        )

    with poisoned_empty():
        results = check_attention(attend, *tensors, both)
    assert (results["out"][:, :, :5] == 0).all()
    assert results["lse"][:, :, :5].isneginf().all()


def test_every_other_option(backend):
    lengths = torch.tensor([45] * (2 if backend == "cpu" else 1), device=BACKENDS[backend])
    bias = torch.randn(2, 86, device=BACKENDS[backend])
    options = {"softcap": 3.0, "bias": bias, "dropout_p": 0.2, "seed": 3, "key_lengths": lengths}
    check(backend, TABLE, HOLES, **options)


@pytest.mark.parametrize("splits", [1, 3])
def test_few_queries(backend, splits, monkeypatch):
    from sparseflash.backends.triton import decode

    monkeypatch.setattr(decode, "fastest_splits", lambda *facts: splits)
    check(backend, SLOPES, lengths=(2, 50))


def test_documents_one_after_another(backend):
    device = BACKENDS[backend]
    tensors = make_inputs(1, 2, *LENGTHS, 16, kv_heads=1, device=device)[:3]
    bounds = [torch.tensor([0, n // 2, n], device=device) for n in LENGTHS]
    mask = masks.documents((18, 19), (25, 25))(LENGTHS)
    options = {"score": SLOPES, "score_tensors": tensors_of(SLOPES, device)}
    out = sparseflash.attention_varlen(
        *(x[0].transpose(0, 1) for x in tensors), *bounds, backend=backend, **options
    )
    expected = sparseflash.attention(*tensors, mask.to(device), backend=backend, **options)
    torch.testing.assert_close(out.transpose(0, 1)[None], expected)


def test_gradients_in_float64():
    pair, position, factor, first = tensors_of(EVERYTHING)
    tensors = make_inputs(1, 2, 5, 7, 3, dtype=torch.float64)[:3]
    tensors = (*tensors, pair[..., :5, :7], factor, first)

    def attend(query, key, value, pair, factor, first):
        read = {"score": EVERYTHING, "score_tensors": [pair, position, factor, first]}
        return sparseflash.attention(query, key, value, CAUSAL, return_lse=True, **read)

    assert torch.autograd.gradcheck(attend, [x.double().requires_grad_() for x in tensors])


def with_gradients(score, device, batch=1):
    """Score tensors, and those of them that are float, which require a gradient."""
    read = tensors_of(score, device, batch)
    return read, [x.requires_grad_() for x in read if x.is_floating_point()]


def check_gradients(backend, score, pattern=CAUSAL, *, dtype=torch.float32, lengths=LENGTHS,
                    deterministic=True, **options):  # fmt: skip
    """Holds the gradients of score tensors to the error budget, and returns them."""
    device, batch = BACKENDS[backend], 2 if backend == "cpu" else 1
    inputs = make_inputs(batch, 2, *lengths, 16, kv_heads=1, dtype=dtype, device=device)
    mask, grad_lse = pattern(lengths, 16, device), inputs[3][..., 0]
    read, wanted = with_gradients(score, device, batch)
    options |= {"score": score, "score_tensors": read}

    def gradients(attend, **keywords):
        out, lse = attend(*inputs[:3], mask, **options, **keywords)
        grads = inputs[3].to(out.dtype), grad_lse.to(lse.dtype)
        return torch.autograd.grad((out, lse), wanted, grads)

    keywords = {"return_lse": True, "backend": backend, "deterministic": deterministic}
    with poisoned_empty():
        found = gradients(sparseflash.attention, **keywords)
    exact, eager = (gradients(standard_attention, dtype=x) for x in (torch.float64, dtype))
    for number, results in enumerate(zip(found, exact, eager, strict=True)):
        doubles = (x.double() for x in results)
        assert_close_to_reference(*doubles, dtype=dtype, name=f"gradient {number}")
    return found


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("score", [SLOPES, TABLE, EVERYTHING], ids=lambda score: score.name)
def test_gradients_of_tensors(backend, score, deterministic):
    check_gradients(backend, score, deterministic=deterministic)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_tensors_in_half_precision(backend, dtype):
    if backend == "triton" and (dtype, HAS_GPU) == (torch.bfloat16, False):
        pytest.skip("Triton's interpreter multiplies bfloat16 wrongly")
    check_gradients(backend, TABLE, HOLES, dtype=dtype)


def test_gradients_of_tensors_with_every_other_option(backend):
    lengths = torch.tensor([45] * (2 if backend == "cpu" else 1), device=BACKENDS[backend])
    bias = torch.randn(2, 86, device=BACKENDS[backend])
    options = {"softcap": 3.0, "bias": bias, "dropout_p": 0.2, "seed": 3, "key_lengths": lengths}
    check_gradients(backend, EVERYTHING, HOLES, **options)


def test_gradients_of_entries_that_are_read_twice_and_past_either_end(backend):
    check_gradients(backend, PRODUCTS)


def test_gradients_of_tensors_and_few_queries(backend):
    check_gradients(backend, SLOPES, lengths=(2, 50))


def test_gradients_of_tensors_and_pairs_that_a_function_masks(backend):
    device = BACKENDS[backend]
    inputs = make_inputs(1, 2, *LENGTHS, 16, kv_heads=1, device=device)
    read, wanted = with_gradients(SOFT_DOCUMENTS, device)
    options = {"score": SOFT_DOCUMENTS, "score_tensors": read}
    document = read[1][0].clamp(0, 2)
    within = document[: LENGTHS[0], None] == document
    mask = HOLES(LENGTHS, 16, device)
    allowed = within & mask.to_dense().to(device)
    out = sparseflash.attention(*inputs[:3], mask, backend=backend, **options)
    grads = torch.autograd.grad(out, wanted, inputs[3])
    expected, _ = standard_attention(*inputs[:3], allowed, **options)
    torch.testing.assert_close(grads, torch.autograd.grad(expected, wanted, inputs[3].double()))


def test_every_sum_of_one_call(backend):
    """Gradients of score tensors, a bias and blocks are those that each has alone."""
    device = BACKENDS[backend]
    inputs = make_inputs(1, 2, *LENGTHS, 16, device=device)
    (slopes,), _ = with_gradients(SLOPES, device)
    bias = torch.randn(1, 86, device=device, requires_grad=True)
    scores = torch.rand(3, 4, device=device, requires_grad=True)
    support = masks.full()(LENGTHS, 16, device)

    def gradients(*wanted):
        slopes_here, bias_here, scores_here = (
            x if any(x is y for y in wanted) else x.detach() for x in (slopes, bias, scores)
        )
        out = sparseflash.attention(
            *inputs[:3], support.select_topk(scores_here, 2), bias=bias_here, score=SLOPES,
            score_tensors=[slopes_here], backend=backend,
        )  # fmt: skip
        return torch.autograd.grad(out, wanted, inputs[3])

    together = gradients(slopes, bias, scores)
    for found, leaf in zip(together, (slopes, bias, scores), strict=True):
        assert torch.equal(found, *gradients(leaf))


def test_portable_kernels_compute_the_sums_of_a_call_of_another_backend(monkeypatch):
    """They start from the O and LSE of that backend, which computes the other gradients."""
    capable = HAS_GPU and torch.cuda.get_device_capability() == (9, 0)
    passes = (hopper if capable else cpu, triton)
    monkeypatch.setattr(plan, "select_passes", lambda spec, mask: passes)
    ran, backward = [], triton.backward
    monkeypatch.setattr(
        triton, "backward", lambda *given: (ran.append(given[4]), backward(*given))[1]
    )
    options = {"dropout_p": 0.2, "seed": 3, "dtype": torch.float16}
    check_gradients("triton", TABLE, HOLES, **options)
    assert set(ran) == {(False, False, False, False, False, True)}  # a first call also compiles


def test_sums_are_the_same_bits_in_any_order():
    *tensors, grad_out = make_inputs(3, 2, 20, 30, 16, device=BACKENDS[FIRST])
    (table,), _ = with_gradients(TABLE, BACKENDS[FIRST])

    def gradient(order):
        here = (x[order] for x in tensors)
        options = {"score": TABLE, "score_tensors": [table], "backend": "triton"}
        out = sparseflash.attention(*here, CAUSAL, **options)
        return torch.autograd.grad(out, table, grad_out[order])[0]

    assert torch.equal(gradient([0, 1, 2]), gradient([2, 0, 1]))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("number", [torch.inf, torch.nan])
def test_sums_that_are_not_finite_do_not_look_as_if_they_were(backend, number):
    inputs = make_inputs(1, 2, 20, 20, 16, device=BACKENDS[backend])
    (slopes,), _ = with_gradients(SLOPES, BACKENDS[backend])
    out = sparseflash.attention(*inputs[:3], score=SLOPES, score_tensors=[slopes], backend=backend)
    inputs[3][0, 1, 3, 2] = number
    (grad,) = torch.autograd.grad(out, slopes, inputs[3])
    assert grad.isfinite().tolist() == [True, False]


def test_one_tensor_alone_has_a_gradient(backend):
    device = BACKENDS[backend]
    inputs = make_inputs(1, 2, *LENGTHS, 16, device=device)
    read, _ = with_gradients(EVERYTHING, device)
    grads = []
    for listed in (read, [*(x.detach() for x in read[:3]), read[3]]):
        out = sparseflash.attention(
            *inputs[:3], score=EVERYTHING, score_tensors=listed, backend=backend
        )
        grads.append(torch.autograd.grad(out, read[3], inputs[3])[0])
    assert torch.equal(*grads)


def test_a_tensor_of_numbers_has_the_gradient_0(backend):
    inputs = make_inputs(1, 2, *LENGTHS, 16, device=BACKENDS[backend])
    read, _ = with_gradients(NUMBERS, BACKENDS[backend])
    options = {"score": NUMBERS, "score_tensors": read}
    out = sparseflash.attention(*inputs[:3], backend=backend, **options)
    of_numbers, of_slopes = torch.autograd.grad(out, read, inputs[3])
    assert (of_numbers == 0).all()
    expected, _ = standard_attention(*inputs[:3], **options)
    (exact,) = torch.autograd.grad(expected, read[1], inputs[3].double())
    torch.testing.assert_close(of_slopes, exact)


@pytest.mark.parametrize("score", [DOCUMENTS, EVERYTHING], ids=lambda score: score.name)
def test_in_graphs(score):
    device = BACKENDS[FIRST]
    tensors = make_inputs(1, 2, *LENGTHS, 16, kv_heads=1, device=device)[:3]
    read, wanted = with_gradients(score, device)
    wanted = [*(x.requires_grad_() for x in tensors), *wanted]
    mask = CAUSAL(LENGTHS, 16, device)

    def attend(*tensors):
        return sparseflash.attention(*tensors[:3], mask, score=score, score_tensors=tensors[3:])

    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    results = [f(*tensors, *read) for f in (compiled, attend)]
    assert torch.equal(*results)
    grads = [torch.autograd.grad(x.square().sum(), wanted) for x in results]
    assert all(map(torch.equal, *grads))
    torch._dynamo.reset()


def test_derivatives_that_score_tensors_do_not_have():
    query = torch.ones(1, 2, 20, 8, device=BACKENDS[FIRST])
    (slopes,), _ = with_gradients(SLOPES, BACKENDS[FIRST])

    def attend(slopes):
        return sparseflash.attention(
            query, query, query, score=SLOPES, score_tensors=[slopes]
        ).sum()

    with pytest.raises(NotImplementedError, match=r"torch\.func cannot differentiate by score_"):
        torch.func.grad(attend)(slopes.detach())
    (grad,) = torch.autograd.grad(attend(slopes), slopes, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        grad.sum().backward()
    by_hand = sparseflash.ScoreFunction("by hand", SLOPES.torch, None, SLOPES.tensors)
    with pytest.raises(ValueError, match=r"score_tensors\[0\] must not require a gradient: "):
        sparseflash.attention(*[query.cpu()] * 3, score=by_hand, score_tensors=[slopes.cpu()])


def test_tensors_that_change_before_the_backward_pass_are_an_error():
    tensors = [
        x.requires_grad_() for x in make_inputs(1, 2, *LENGTHS, 16, device=BACKENDS[FIRST])[:3]
    ]
    (slopes,) = tensors_of(SLOPES, BACKENDS[FIRST])
    out = sparseflash.attention(*tensors, score=SLOPES, score_tensors=[slopes], backend=FIRST)
    slopes += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_hopper_takes_them_but_not_their_gradients():
    query = torch.zeros(1, 2, 256, 64, dtype=torch.float16)
    facts = {"score": SLOPES, "differentiates_score_tensors": True}
    spec = spec_of(query, query, masks.full()(256, 128), **facts)
    assert spec.extras - hopper.extras == {"gradient of score tensors"}
    slopes = torch.ones(2)
    options = {"score": SLOPES, "score_tensors": [slopes], "bias": torch.zeros(1, 511)}
    assert "does not support" not in str(sparseflash.explain(query, query, query, **options))
    for tensor in (slopes, options["bias"]):
        tensor.requires_grad_()
    found = str(sparseflash.explain(query, query, query, **options))
    assert "does not support gradient of bias; does not support gradient of score tensors" in found


WRONG = {
    r"a list of the 1 tensors that score function 'slopes of heads' reads, got 0": (),
    "a list of the 1 tensors .* got Tensor": torch.ones(2),
    r"score_tensors\[0\] must be a tensor of float, got torch.int64": [torch.ones(2).long()],
    r"score_tensors\[0\] must be a tensor of float, got int": [3],
    r"score_tensors\[0\] must have 1 dims, none of size 0, on cpu, got \(2, 1\)": [
        torch.ones(2, 1)
    ],
    r"score_tensors\[0\] must have 1 dims, none of size 0, on cpu, got \(0,\)": [torch.ones(0)],
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_tensors_are_named(message):
    tensors = torch.zeros(3, 1, 2, 16, 8).unbind()
    with pytest.raises((TypeError, ValueError), match=message):
        sparseflash.attention(*tensors, score=SLOPES, score_tensors=WRONG[message])


TOO_SHORT = {
    "at least 4 entries in dim 0, .* by head, got (3,)": (SLOPES, [(3,)]),
    "score_tensors[0] must have at least 30 entries in dim 1, .* by query, got (2, 29)": (
        DOCUMENTS, [(2, 29), (2, 40)]
    ),
    "score_tensors[1] must have at least 40 entries in dim 1, .* by key, got (40, 2)": (
        DOCUMENTS, [(2, 30), (40, 2)]
    ),
    "at least 40 entries in dim 1, .* by key, got (2, 30)": (SOFT_DOCUMENTS, [(3,), (2, 30)]),
}  # fmt: skip


@pytest.mark.parametrize("message", TOO_SHORT)
def test_tensors_without_an_entry_for_each_argument_are_refused(message):
    """Their nearest entries would give a wrong result, as for the transpose of a tensor."""
    function, shapes = TOO_SHORT[message]
    kinds = [float if kind is float else torch.int64 for kind, _ in function.tensors]
    tensors = [torch.ones(shape, dtype=kind) for shape, kind in zip(shapes, kinds, strict=True)]
    query, key = torch.zeros(2, 4, 30, 8), torch.zeros(2, 4, 40, 8)
    options = {"score": function, "score_tensors": tensors}
    pattern = ".*".join(map(re.escape, message.split(".*")))
    for call in (sparseflash.attention, sparseflash.explain):
        with pytest.raises(ValueError, match=pattern):
            call(query, key, key, None, **options)
    with pytest.raises(ValueError, match=pattern):
        sparseflash.warmup(heads=4, head_dim=8, seq_len=(30, 40), batch=2, device="cpu", **options)


def test_one_entry_for_all_more_entries_and_keys_past_their_lengths():
    inputs = make_inputs(2, 4, 30, 30, 8)[:3]
    numbers = torch.arange(30) // 8

    def attend(document, **options):
        options |= {"score": SOFT_DOCUMENTS, "score_tensors": [torch.arange(3.0), document]}
        return sparseflash.attention(*inputs, **options)

    expected = attend(numbers.expand(2, 30))
    assert torch.equal(attend(numbers[None]), expected)
    longer = torch.cat([numbers, torch.tensor([7, 7])]).expand(5, 32)
    assert torch.equal(attend(longer), expected)
    lengths = {"key_lengths": torch.tensor([20, 9])}
    of_queries = (numbers.expand(2, 30)[:, :20], numbers.expand(2, 30))
    options = {"score": DOCUMENTS, **lengths}
    short, full = (
        sparseflash.attention(*inputs, score_tensors=[of_queries[1], of_keys], **options)
        for of_keys in of_queries
    )
    assert torch.equal(short, full)


@pytest.mark.parametrize("score", [None, SHIFTED], ids=["no function", "one that reads none"])
@pytest.mark.parametrize("empty", [None, (), []], ids=str)
def test_no_tensors(score, empty):
    tensors = make_inputs(1, 2, 20, 20, 8)[:3]
    mask, bounds = CAUSAL(20, 16), torch.tensor([0, 20])
    expected = sparseflash.attention(*tensors, mask, score=score)
    options = {"score": score, "score_tensors": empty}

    def attend(*tensors):
        return sparseflash.attention(*tensors, mask, **options)

    packed = [x[0].transpose(0, 1) for x in tensors]
    of_documents = sparseflash.attention_varlen(*packed, bounds, bounds, CAUSAL, **options)
    results = [
        attend(*tensors),
        torch.compile(attend, backend="eager", fullgraph=True)(*tensors),
        of_documents.transpose(0, 1)[None],
        context_parallel_attention(*tensors, make_plan(mask, 1), **options),
        standard_attention(*tensors, mask, dtype=torch.float32, **options)[0],
    ]
    for out in results:
        torch.testing.assert_close(out, expected)
    assert sparseflash.explain(*tensors, mask, **options).backend == "cpu"
    sparseflash.warmup(mask, heads=2, head_dim=8, device="cpu", **options)
    torch._dynamo.reset()


def test_tensors_without_a_function_that_reads_them():
    tensors = torch.zeros(3, 1, 2, 64, 8).unbind()
    with pytest.raises(ValueError, match="must be empty without a score function, got 1"):
        sparseflash.attention(*tensors, score_tensors=[torch.ones(2)])
    with pytest.raises(ValueError, match="must be empty without a score function, got Tensor"):
        sparseflash.attention(*tensors, score_tensors=torch.ones(2))  # pyright: ignore[reportArgumentType]
    plan = make_plan(masks.full()(64, 16), 1)
    with pytest.raises(ValueError, match=r"the 1 tensors that score function .* got 0"):
        context_parallel_attention(*tensors, plan, score=SLOPES)


LEARNED = torch.ones((), requires_grad=True)
REFUSED = {
    "tensors must be float or int for each": (lambda s, b, h, q, k, t: s, (torch.float32,)),
    "must be indexed by integers, got torch.float32": (
        lambda s, b, h, q, k, t: s + t[s],
        (float,),
    ),
    "must not read a tensor from outside that requires a gradient": (
        lambda s, b, h, q, k, t: s * LEARNED + t[h],
        (float,),
    ),
    r"must read tensor 0, .* got no read": (lambda s, *rest: s, (float,)),
    r"must read tensor 0, .* got \[1, 2\]": (
        lambda s, b, h, q, k, t: s + t[h] + t[q, k],
        (float,),
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_functions_that_read_otherwise_are_refused(message):
    function, kinds = REFUSED[message]
    with pytest.raises((TypeError, ValueError), match=message):
        from_torch("reads otherwise", function, kinds)
