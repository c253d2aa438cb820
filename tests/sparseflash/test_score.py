"""Soft caps, own functions, biases of distances and sinks, on every backend, against float64."""

from concurrent.futures import ThreadPoolExecutor
from threading import Thread

import pytest
import torch
import triton
import triton.language as tl

import masks
import sparseflash
from sparseflash import score as score_module
from sparseflash.reference import standard_attention
from sparseflash.testing import check_attention, make_inputs, poisoned_empty

HAS_GPU = torch.cuda.is_available()
BACKENDS = {"triton": "cuda"} if HAS_GPU else {"cpu": "cpu", "triton": "cpu"}
MASKS = {
    "causal": masks.causal(align="bottom-right"),
    "holes": masks.random(0.5) - masks.global_tokens(20),
    "full": masks.full(),
}


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


def check(backend, mask, *, heads=2, lengths=(34, 49), dtype=torch.float32, scale=1.0, **options):
    device = BACKENDS[backend]
    shape = (1, heads, *lengths, 16)
    inputs = make_inputs(*shape, kv_heads=1, dtype=dtype, device=device, scale=scale)
    mask = MASKS[mask](lengths, 16, device=device)
    options = {n: x.to(device) if torch.is_tensor(x) else x for n, x in options.items()}

    def attend(q, k, v):
        return sparseflash.attention(q, k, v, mask, return_lse=True, backend=backend, **options)

    with poisoned_empty():
        return check_attention(attend, *inputs[:3], mask, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("softcap", "scale"), [(2.0, 1.0), (50.0, 1.0), (3.0, 2.5)])
def test_softcap(backend, softcap, scale, dtype):
    check(backend, "causal", softcap=softcap, scale=scale, dtype=dtype)


def test_softcap_of_huge_scores(backend):
    query, key, value, grad = make_inputs(1, 2, 34, 49, 16, device=BACKENDS[backend], scale=1e4)
    leaves = [x.requires_grad_() for x in (query, key, value)]
    out, lse = sparseflash.attention(*leaves, softcap=20.0, return_lse=True, backend=backend)
    assert (lse <= 20 + torch.log(torch.tensor(49.0))).all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out, leaves, grad))


@triton.jit
def bent_of_triton(score, batch, head, query, key):
    slope = 1.0 / (1.0 + head)
    near = (query - key + batch) % 3 == 0
    bent = score * slope + 0.1 * score * score
    return tl.where(near, bent, score), tl.where(near, slope + 0.2 * score, 1.0)


def bent_of_torch(score, batch, head, query, key):
    near, slope = (query - key + batch) % 3 == 0, 1.0 / (1.0 + head)
    bent = score * slope + 0.1 * score**2
    return torch.where(near, bent, score), torch.where(near, slope + 0.2 * score, 1.0)


BENT = sparseflash.ScoreFunction("bent", bent_of_torch, bent_of_triton)
NO_SLOPE = sparseflash.ScoreFunction("no slope", lambda score, *pair: -score)
TORCH_ALONE = sparseflash.ScoreFunction("torch alone", lambda score, *pair: (-score, -1.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("mask", MASKS)
def test_score_function(backend, mask, dtype):
    check(backend, mask, score=BENT, dtype=dtype)


def test_score_function_with_every_other_option(backend):
    options = {"softcap": 3.0, "bias": torch.randn(2, 82), "dropout_p": 0.2, "seed": 3}
    check(backend, "causal", score=BENT, key_lengths=torch.tensor([40]), **options)


def test_score_functions_are_found_by_name(backend):
    device = BACKENDS[backend]
    *tensors, grad_out = make_inputs(1, 2, 30, 30, 16, device=device)
    tensors = [x.requires_grad_() for x in tensors]

    def attend(*tensors):
        return sparseflash.attention(*tensors, MASKS["full"], score="bent", backend=backend)

    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    expected = sparseflash.attention(*tensors, MASKS["full"], score=BENT, backend=backend)
    assert torch.equal(compiled(*tensors), expected)
    grads = torch.autograd.grad(compiled(*tensors), tensors, grad_out)
    assert all(map(torch.equal, grads, torch.autograd.grad(expected, tensors, grad_out)))
    torch._dynamo.reset()


def test_functions_without_a_form_for_triton_are_refused():
    tensors = [x.to(BACKENDS["triton"]) for x in make_inputs(1, 2, 30, 30, 16)[:3]]
    with pytest.raises(sparseflash.BackendError, match="no function for Triton"):
        sparseflash.attention(*tensors, score=TORCH_ALONE, backend="triton")
    with pytest.raises(ValueError, match="name must be unique, got 'bent'"):
        sparseflash.ScoreFunction("bent", bent_of_torch)
    with pytest.raises(TypeError, match="torch must be a function, got 3"):
        sparseflash.ScoreFunction("no function", 3)
    with pytest.raises(TypeError, match="name must be a string, got 3"):
        sparseflash.ScoreFunction(3, bent_of_torch)


def test_the_same_function_can_be_made_again():
    """As by a notebook cell that is run twice."""

    def make(slope, name="made again"):
        number = torch.tensor(slope)

        def bend(score, batch, head, query, key):
            return score * number - 0.5

        return sparseflash.ScoreFunction.from_torch(name, bend)

    first = make(2.0)
    assert make(2.0) is first
    assert make(2.0, "made under another name") is not first
    with pytest.raises(ValueError, match="name must be unique, got 'made again'"):
        make(3.0)


@triton.jit
def of_query(score, batch, head, query, key):
    return 0.1 * query, 0.0


@triton.jit
def of_head(score, batch, head, query, key):
    return score * 0.5, 0.1 * head


OF_QUERY = sparseflash.ScoreFunction(
    "of the query", lambda s, b, h, q, k: (0.1 * q, 0.0), of_query
)
OF_HEAD = sparseflash.ScoreFunction("of the head", lambda s, b, h, q, k: (s / 2, 0.1 * h), of_head)


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("q_len", [3, 34])  # decoding has a kernel of its own
def test_score_functions_of_another_shape_are_refused(backend, mask, q_len):
    """A tile of one column would broadcast to any mask, and be right in some places alone."""
    *tensors, grad = make_inputs(1, 2, q_len, q_len, 16, device=BACKENDS[backend])
    leaves = [x.requires_grad_() for x in tensors]
    with pytest.raises(Exception) as raised:  # noqa: PT011 (Triton's compiler chains its errors)
        sparseflash.attention(*leaves, MASKS[mask], score=OF_QUERY, backend=backend)
    causes = [raised.value]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    assert any("must have the shape of score" in str(cause) for cause in causes)
    out = sparseflash.attention(*leaves, MASKS[mask], score=OF_HEAD, backend=backend)
    out.backward(grad)  # a derivative may broadcast


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("mask", MASKS)
def test_bias(backend, mask, heads):
    check(backend, mask, bias=torch.randn(heads, 34 + 49 - 1))


def test_alibi_as_written_down(backend):
    slopes = torch.tensor([0.5, 0.125])
    bias = sparseflash.alibi(slopes, 34, 49)
    check(backend, "causal", bias=bias, softcap=4.0, dropout_p=0.2, seed=3)
    query, key, value, _ = make_inputs(1, 2, 34, 49, 16, device=BACKENDS[backend])
    distance = torch.arange(34)[:, None] + 15 - torch.arange(49)
    mask = -slopes[:, None, None] * distance.abs()
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask.to(query.device)
    )
    out = sparseflash.attention(query, key, value, bias=bias.to(query.device), backend=backend)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sparseflash.alibi([1.0], 3, 3), "slopes must be a floating-point tensor, got li"),
        (lambda: sparseflash.alibi(torch.ones(2, 2), 3, 3), r"slopes must be \(heads,\), got"),
        (lambda: sparseflash.alibi(torch.ones(2), 0, 3), "q_len must be at least 1, got 0"),
        (lambda: sparseflash.relative_bias(torch.ones(2, 4), 3, 3), r"weights must be \(heads, 2"),
        (lambda: sparseflash.relative_bias(None, 3, 3), "weights must be a floating-point tensor"),
    ],
)
def test_biases_refuse_what_they_cannot_read(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_relative_bias_holds_far_distances():
    weights = torch.randn(3, 5)
    bias = sparseflash.relative_bias(weights, 4, 6)
    for q in range(4):
        for k in range(6):
            distance = max(-2, min(2, k - (q + 2)))
            assert torch.equal(bias[:, k - q + 3], weights[:, 2 + distance])


@pytest.mark.parametrize("mask", MASKS)
def test_sinks(backend, mask):
    results = check(backend, mask, sinks=torch.tensor([0.5, -2.0]), key_lengths=torch.tensor([33]))
    if mask == "holes":
        assert (results["out"][:, :, :20] == 0).all()


def test_gradients_of_bias_and_sinks():
    tensors = make_inputs(1, 2, 6, 8, 3, dtype=torch.float64)[:3]
    bias, sinks = torch.randn(2, 13, dtype=torch.float64), torch.randn(2, dtype=torch.float64)
    mask = masks.local(3, align="top-left")((6, 8), 16)

    def attend(query, bias, sinks):
        return sparseflash.attention(
            query, *tensors[1:], mask, bias=bias, sinks=sinks, softcap=3.0, return_lse=True
        )

    inputs = [x.requires_grad_() for x in (tensors[0], bias, sinks)]
    assert torch.autograd.gradcheck(attend, inputs)


def test_learned_distances(backend):
    device = BACKENDS[backend]
    query, key, value, grad = make_inputs(2, 2, 40, 40, 16, device=device)
    weights = torch.randn(2, 9, device=device, requires_grad=True)
    attend = lambda: sparseflash.attention(  # noqa: E731
        query, key, value, bias=sparseflash.relative_bias(weights, 40, 40), backend=backend
    )
    (result,) = torch.autograd.grad(attend(), weights, grad)
    bias = sparseflash.relative_bias(weights, 40, 40)
    expected, _ = standard_attention(query, key, value, bias=bias)
    (expected,) = torch.autograd.grad(expected, weights, grad.double())
    torch.testing.assert_close(result, expected)


def test_scores_in_a_graph(backend):
    device = BACKENDS[backend]
    tensors = [x.requires_grad_() for x in make_inputs(1, 2, 30, 30, 16, device=device)[:3]]
    slopes = torch.tensor([0.5, 0.1], device=device, requires_grad=True)
    sinks = torch.zeros(2, device=device, requires_grad=True)

    def attend(*tensors):
        bias = sparseflash.alibi(slopes, tensors[0].shape[2], tensors[1].shape[2])
        return sparseflash.attention(
            *tensors, MASKS["full"], bias=bias, sinks=sinks, softcap=5.0, backend=backend
        )

    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    leaves = [*tensors, sinks, slopes]
    for result, expected in zip(
        torch.autograd.grad(compiled(*tensors).square().sum(), leaves),
        torch.autograd.grad(attend(*tensors).square().sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(result, expected)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"softcap": 0.0}, "softcap must be positive"),
        ({"score": "unheard of"}, "score must be a ScoreFunction or the name of one, got 'unhe"),
        ({"score": bent_of_torch}, "got function, of which ScoreFunction.from_torch makes"),
        ({"score": NO_SLOPE}, r"'no slope' must return \(f, df / dscore\), got Tensor"),
        ({"bias": torch.zeros(3, 31)}, r"bias must have shape \(1, 31\) or \(2, 31\)"),
        ({"bias": torch.zeros(2, 31, dtype=torch.int64)}, "bias must be a floating-point"),
        ({"sinks": torch.zeros(3)}, r"sinks must have shape \(1,\) or \(2,\)"),
    ],
)
def test_bad_input_names_the_argument(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        sparseflash.attention(*torch.zeros(3, 1, 2, 16, 8).unbind(), **options)


@pytest.mark.parametrize(
    ("name", "function", "message"),
    [
        ("first key alone", lambda s, *pair: (s[..., :1], 1.0), "f of score function 'first key"),
        ("one less", lambda s, *pair: (s, s[..., 1:]), "df / dscore .* broadcast"),
        ("too many", lambda s, *pair: (s, s.new_ones(3, *s.shape)), "df / dscore .* broadcast"),
    ],
)
def test_results_of_another_shape_are_refused(name, function, message):
    query = torch.randn(1, 2, 40, 8)
    with pytest.raises(ValueError, match=message):
        sparseflash.attention(query, query, query, score=sparseflash.ScoreFunction(name, function))


def bent_alone(score, batch, head, query, key):
    near, slope = (query - key + batch) % 3 == 0, 1.0 / (1.0 + head)
    return torch.where(near, score * slope + 0.1 * score**2, score)


def with_many_operations(score, batch, head, query, key):
    distance = (query - key).abs()
    steep = torch.exp2(-(head + 1)) + torch.exp(-0.1 * distance)
    capped = 3 * torch.tanh(score / 3) + torch.sigmoid(score).clamp(0.2, 0.9)
    far = (distance // 4 > 3) | ~(key % 5 != (query - 40) % 5)
    return torch.where(far, capped - steep * distance, torch.maximum(score, -score) + batch)


def without_score(score, batch, head, query, key):
    return torch.log2(1 + key) / (2 + head)


ALONE = sparseflash.ScoreFunction.from_torch("bent alone", bent_alone)
MANY = sparseflash.ScoreFunction.from_torch("many operations", with_many_operations)
NO_SCORE = sparseflash.ScoreFunction.from_torch("no score", without_score)


@pytest.mark.parametrize("score", [ALONE, MANY], ids=lambda score: score.name)
def test_score_functions_of_torch_alone(backend, score):
    check(backend, "causal", score=score, lengths=(20, 34))


def test_a_function_of_the_pair_alone(backend):
    tensors = [x.to(BACKENDS[backend]) for x in torch.randn(3, 1, 2, 20, 16).unbind()]
    out = sparseflash.attention(*tensors, score=NO_SCORE, backend=backend)
    expected, _ = standard_attention(*tensors, score=NO_SCORE)
    torch.testing.assert_close(out, expected.float())


# Where an operation of Triton is not that of torch: of bools, of integers and their products, of
# negative bases of powers, and where all arguments are constants.
UNLIKE_TRITON = {
    "logical": lambda s, b, h, q, k: torch.where(torch.logical_and(q % 4, k % 3), s, s - 1),
    "bools": lambda s, b, h, q, k: torch.where((q > 3) + (k > 3), s, s + (q > 5) * (k > 5)),
    "products": lambda s, b, h, q, k: s - 1e-9 * (q - k - 46340) ** 2 - 1e-9 * q * 2**27,
    "hash": lambda s, b, h, q, k: torch.where((q * 2654435761 + k * 40503) % 64 < 32, s, s - 1),
    "large": lambda s, b, h, q, k: torch.where(q + 2**31 > k + 2**31, s, s - 1),
    "powers": lambda s, b, h, q, k: 0.1 * s ** (k % 4) + s**9 / 9 + (s * 0) ** (q % 3) + q**0.5,
    "signs": lambda s, b, h, q, k: torch.where((torch.relu(q - k) & q.sgn()) == 1, s, s - 1),
    "floors": lambda s, b, h, q, k: torch.div(s, 0.1, rounding_mode="floor") + 0.1 * q.floor(),
    "constants": lambda s, b, h, q, k: s.sgn() * torch.maximum(s, s + s) + torch.ones(()).exp(),
    "nothing": lambda s, b, h, q, k: torch.ones(()) / 3,
}


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # log2 of 0 and below
@pytest.mark.parametrize("name", UNLIKE_TRITON)
def test_operations_of_torch_that_differ_in_triton(backend, name):
    function, device = UNLIKE_TRITON[name], BACKENDS[backend]
    score = sparseflash.ScoreFunction.from_torch(f"{name}, {backend}", function)
    tensors = [x.to(device).requires_grad_() for x in torch.randn(3, 1, 1, 12, 8).unbind()]
    double = [x.detach().double().requires_grad_() for x in tensors]
    out = sparseflash.attention(*tensors, score=score, backend=backend)
    pairs = [torch.arange(n, device=device) for n in (1, 1, 12, 12)]
    pairs = [x.view([-1 if i == j else 1 for j in range(4)]) for i, x in enumerate(pairs)]
    scores = double[0] @ double[1].mT / 8**0.5
    expected = (scores * 0 + function(scores, *pairs)).softmax(-1) @ double[2]
    torch.testing.assert_close(out.double(), expected, atol=1e-4, rtol=1e-4)
    grads = zip(
        torch.autograd.grad(out.square().sum(), tensors[:2]),
        torch.autograd.grad(expected.square().sum(), double[:2]),
        strict=True,
    )
    for grad, right in grads:
        torch.testing.assert_close(grad.double(), right, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_derivative_is_that_of_autograd(dtype):
    score = torch.randn(2, 3, 20, 30, dtype=dtype, requires_grad=True)
    indices = [torch.arange(n) for n in score.shape]
    sizes = [n.view([-1 if i == j else 1 for j in range(4)]) for i, n in enumerate(indices)]
    functions = (bent_alone, with_many_operations, without_score)
    for own, function in zip((ALONE, MANY, NO_SCORE), functions, strict=True):
        f, slope = own.evaluate(score, *sizes)
        expected = torch.as_tensor(function(score, *sizes)).expand(score.shape)
        torch.testing.assert_close(f, expected)
        if expected.requires_grad:
            (expected_slope,) = torch.autograd.grad(expected.sum(), score)
            torch.testing.assert_close(torch.as_tensor(slope).expand_as(score), expected_slope)
        else:
            assert torch.as_tensor(slope == 0).all()


def test_a_function_of_torch_in_inference_mode():
    tensors = torch.randn(3, 1, 2, 20, 8).unbind()
    expected = sparseflash.attention(*tensors, score=BENT)
    fresh = sparseflash.ScoreFunction.from_torch("bent in inference mode", bent_alone)
    with torch.inference_mode():
        torch.testing.assert_close(sparseflash.attention(*tensors, score=fresh), expected)


def test_threads_that_trace_functions_at_once():
    name = "traced by thread {} for the first time"
    score, *pair = (torch.arange(5), *[torch.zeros((), dtype=torch.int64)] * 4)

    def traced(thread: int) -> torch.Tensor | float:
        fresh = sparseflash.ScoreFunction.from_torch(name.format(thread), bent_alone)
        return fresh.evaluate(score.double(), *pair)[1]

    with ThreadPoolExecutor(8) as pool:
        slopes = [*pool.map(traced, range(8))]
    assert all(torch.equal(slope, slopes[0]) for slope in slopes)


def test_a_function_that_calls_another_one():
    far = sparseflash.ScoreFunction.from_torch(
        "far", lambda s, b, h, q, k: s - 0.1 * (q - k).abs()
    )
    both = sparseflash.ScoreFunction.from_torch("both", lambda *a: 2 * far.torch(*a)[0])
    pair = [torch.tensor(n) for n in (0, 0, 7, 2)]
    found = []
    other = Thread(
        target=lambda: found.append(both.evaluate(torch.tensor(1.0).double(), *pair)), daemon=True
    )
    other.start()
    other.join(60)
    assert found == [(1.0, 2.0)]  # 2 (1 - 0.1 * 5), and its derivative


@pytest.mark.interpret
def test_products_of_integers_have_64_bits():
    def wide(score, batch, head, q, k):
        return (
            score + (q * 100 * 100 * 100 * 100 + k) % 97 * 0.01 + (q * 127 * 127 * 127 * 127) % 89
        )

    function = sparseflash.ScoreFunction.from_torch("products of 64 bits", wide)
    tensors = torch.randn(3, 1, 1, 32, 16).unbind()
    results = [
        sparseflash.attention(*tensors, masks.full(), score=function, backend=backend)
        for backend in ("cpu", "triton")
    ]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


TABLE, LEARNED = torch.ones(3), torch.nn.Parameter(torch.ones(()))
REFUSED = {
    "the operation erfinv is not translated": lambda s, *pair: torch.erfinv(s),
    "a conversion to torch.float16 is not translated": lambda s, *pair: s.half().float(),
    "a power of -1 is not translated": lambda s, batch, *pair: s * (-1) ** batch,
    "a power of 3 is not translated": lambda s, batch, head, q, k: torch.where(3**k > 9, s, -s),
    "the operation __rshift__ is not translated": lambda s, batch, head, q, k: s + (q >> 2),
    "cannot be traced": lambda s, *pair: s if s > 0 else -s,
    "Its arguments are scalars": lambda s, *pair: s / s.shape[0],
    "it may index only tensors that it gets": lambda s, batch, head, *pair: s + TABLE[head],
    "f must have a floating-point dtype, got torch.bool": lambda s, *pair: s > 0,
    "must not read a tensor from outside that requires a gradient": lambda s, *pair: s * LEARNED,
    "more than one element must be a score tensor": lambda s, *pair: s + TABLE.sum(),
    r"f must be one number for each pair, got \(3,\)": lambda s, *pair: s + TABLE,
    "f must be a tensor, got float": lambda s, *pair: 1.0,
    "function must be callable, got 3": 3,
    r"a function of \(score, .*, key\), got <lambda>\(s, q, k\)": lambda s, q, k: s,
}


@pytest.mark.parametrize("message", REFUSED)
def test_functions_that_cannot_be_translated_say_why(message):
    error = TypeError if " got " in message else ValueError
    with pytest.raises(error, match=message):
        sparseflash.ScoreFunction.from_torch("refused", REFUSED[message])
    assert "refused" not in score_module._functions


def test_a_tensor_of_one_number_from_outside_is_a_constant():
    factor = torch.tensor(2.0)
    function = sparseflash.ScoreFunction.from_torch("constant", lambda s, *pair: s * factor)
    factor.fill_(3.0)
    score, *pair = torch.ones(5).unbind()
    assert function.evaluate(score, *pair) == (2.0, 2.0)


def test_names_and_kinds_of_tensors_are_checked():
    with pytest.raises(TypeError, match=r"name must be a string, got \{\}"):
        sparseflash.ScoreFunction.from_torch({}, bent_alone)
    with pytest.raises(TypeError, match="tensors must be a list of float or int, got 3"):
        sparseflash.ScoreFunction.from_torch("refused", bent_alone, 3)


def test_repr_is_short():
    function = sparseflash.ScoreFunction.from_torch(
        "slope of each head", lambda score, b, h, q, k, slope: score + slope[h] * k, (float,)
    )
    assert repr(function) == (
        "ScoreFunction(name='slope of each head', has_triton=True, "
        "tensors=((<class 'float'>, 1),), of_batch=False, of_query=False)"
    )
