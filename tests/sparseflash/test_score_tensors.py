"""Score functions that read tensors, on every backend, against float64."""

from functools import partial

import pytest
import torch

import masks
import sparseflash
from sparseflash.backends import hopper
from sparseflash.distributed import context_parallel_attention, make_plan
from sparseflash.testing import check_attention, make_inputs, poisoned_empty
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
SLOPES = from_torch("slopes of heads", with_slopes, (float,))
TABLE = from_torch("table of distances", with_table, [float])
DOCUMENTS = from_torch("in documents", in_documents, (int, int))
EVERYTHING = from_torch("every kind", with_all, (float, int, float, float))


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


def test_pairs_that_a_function_masks(backend):
    device = BACKENDS[backend]
    tensors = make_inputs(1, 2, *LENGTHS, 16, kv_heads=1, device=device)[:3]
    read = tensors_of(DOCUMENTS, device)
    read[0][:, :5] = -1  # of no document: queries without a key
    allowed = (read[0].unsqueeze(2) == read[1].unsqueeze(1)).unsqueeze(1)
    mask = HOLES(LENGTHS, 16, device)
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
    tensors = make_inputs(1, 2, 9, 12, 3, dtype=torch.float64)[:3]
    read = tensors_of(EVERYTHING)
    attend = partial(sparseflash.attention, score=EVERYTHING, score_tensors=read, backend="cpu")
    assert torch.autograd.gradcheck(attend, [x.requires_grad_() for x in tensors])


def test_in_graphs():
    device = BACKENDS[FIRST]
    tensors = make_inputs(1, 2, *LENGTHS, 16, kv_heads=1, device=device)[:3]
    tensors = [x.requires_grad_() for x in tensors]
    read = tensors_of(DOCUMENTS, device)
    mask = CAUSAL(LENGTHS, 16, device)

    def attend(*tensors):
        return sparseflash.attention(
            *tensors[:3], mask, score=DOCUMENTS, score_tensors=tensors[3:]
        )

    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    results = [f(*tensors, *read) for f in (compiled, attend)]
    assert torch.equal(*results)
    grads = [torch.autograd.grad(x.square().sum(), tensors) for x in results]
    assert all(map(torch.equal, *grads))
    torch._dynamo.reset()


def test_tensors_that_change_before_the_backward_pass_are_an_error():
    tensors = [
        x.requires_grad_() for x in make_inputs(1, 2, *LENGTHS, 16, device=BACKENDS[FIRST])[:3]
    ]
    (slopes,) = tensors_of(SLOPES, BACKENDS[FIRST])
    out = sparseflash.attention(*tensors, score=SLOPES, score_tensors=[slopes], backend=FIRST)
    slopes += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_hopper_does_not_take_them_and_is_passed_over():
    query = torch.zeros(1, 2, 256, 64, dtype=torch.float16)
    spec = spec_of(query, query, masks.full()(256, 128), score=SLOPES)
    assert spec.extras - hopper.extras == {"score tensors"}
    slopes = torch.ones(2)
    found = sparseflash.explain(query, query, query, score=SLOPES, score_tensors=[slopes])
    assert "takes no score tensors" in str(found)


WRONG = {
    r"a list of the 1 tensors that score function 'slopes of heads' reads, got 0": (),
    "a list of the 1 tensors .* got Tensor": torch.ones(2),
    r"score_tensors\[0\] must be a tensor of float, got torch.int64": [torch.ones(2).long()],
    r"score_tensors\[0\] must be a tensor of float, got int": [3],
    r"score_tensors\[0\] must be of 1 dims, none of them 0, on cpu, got \(2, 1\)": [
        torch.ones(2, 1)
    ],
    r"score_tensors\[0\] must be of 1 dims, none of them 0, on cpu, got \(0,\)": [torch.ones(0)],
    r"score_tensors\[0\] must not require a gradient": [torch.ones(2, requires_grad=True)],
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_tensors_are_named(message):
    tensors = torch.zeros(3, 1, 2, 16, 8).unbind()
    with pytest.raises((TypeError, ValueError), match=message):
        sparseflash.attention(*tensors, score=SLOPES, score_tensors=WRONG[message])


def test_tensors_without_a_function_that_reads_them():
    tensors = torch.zeros(3, 1, 2, 64, 8).unbind()
    with pytest.raises(ValueError, match="the 0 tensors that score function None reads, got 1"):
        sparseflash.attention(*tensors, score_tensors=[torch.ones(2)])
    plan = make_plan(masks.full()(64, 16), 1)
    with pytest.raises(ValueError, match=r"the 1 tensors that score function .* got 0"):
        context_parallel_attention(*tensors, plan, score=SLOPES)


REFUSED = {
    "tensors must be float or int for each": (lambda s, b, h, q, k, t: s, (torch.float32,)),
    "must be indexed by integers, got torch.float32": (
        lambda s, b, h, q, k, t: s + t[s],
        (float,),
    ),
    r"must index tensor 0 .* got a tensor that it does not read": (lambda s, *rest: s, (float,)),
    r"must index tensor 0 .* got \[1, 2\]": (
        lambda s, b, h, q, k, t: s + t[h] + t[q, k],
        (float,),
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_functions_that_read_otherwise_are_refused(message):
    function, kinds = REFUSED[message]
    with pytest.raises((TypeError, ValueError), match=message):
        from_torch("reads otherwise", function, kinds)
