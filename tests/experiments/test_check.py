from contextlib import nullcontext

import pytest
import torch

import masks
from experiments import check as checking
from experiments.check import CheckError, SampledRows, _compare, dense_rows

N = 200
MASKS = {
    "ragged causal": masks.causal()(N, block_size=32),
    "butterfly": masks.butterfly()(N, block_size=16),
    "per head": masks.stack([masks.local(20)(N, block_size=32), masks.full()(N, block_size=32)]),
    "empty rows": masks.BlockMask.from_dense(torch.arange(N)[:, None] > torch.arange(N), 32),
}


@pytest.fixture(params=MASKS.values(), ids=list(MASKS))
def mask(request):
    return request.param


@pytest.fixture
def inputs():
    return [torch.randn(2, 2, N, 16, requires_grad=True) for _ in range(3)]


def check(attend, inputs, mask, what, **options):
    checking.check(attend, inputs, SampledRows.of(mask, inputs[0].device), what, **options)


def exact(mask):
    """Standard attention with the dense mask."""
    allowed = mask.to_dense()

    def attend(query, key, value):
        scores = (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(~allowed, -torch.inf)
        return scores.softmax(-1).masked_fill(~allowed, 0) @ value

    return attend


def test_dense_rows_are_rows_of_the_dense_mask(mask):
    rows = torch.tensor([0, 3, 32, 150, N - 1])
    expected = mask.to_dense().reshape(-1, N, N)[:, rows]
    assert torch.equal(dense_rows(mask, rows), expected)


def test_right_results_pass(mask, inputs):
    check(exact(mask), inputs, mask, "exact")


def test_few_queries_and_heads_that_share_keys():
    mask = masks.causal(align="bottom-right")((3, N), 16)
    shapes = [(2, 4, 3, 16), (2, 2, N, 16), (2, 2, N, 16)]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]

    def attend(query, key, value):
        return exact(mask)(query, *(x.repeat_interleave(2, 1) for x in (key, value)))

    check(attend, inputs, mask, "grouped")
    with pytest.raises(CheckError, match="heads"):
        check(lambda q, k, v: attend(q, k.flip(1), v.flip(1)), inputs, mask, "heads swapped")


@pytest.mark.parametrize("row", [0, N - 1])
def test_a_wrong_output_is_named(inputs, row):
    mask = MASKS["ragged causal"]

    def attend(*inputs):
        out = exact(mask)(*inputs).clone()
        out[1, 0, row, 3] += 1e-3
        return out

    with pytest.raises(CheckError, match=rf"broken, out: .* batch 1, head 0, token {row}"):
        check(attend, inputs, mask, "broken")


@pytest.mark.parametrize(("wrong", "token"), [(0, N - 1), (1, 77), (2, 77)])
def test_a_wrong_gradient_is_named(inputs, wrong, token):
    mask = MASKS["ragged causal"]

    def attend(*inputs):
        inputs[wrong].register_hook(lambda grad: grad + (torch.arange(N) == token)[:, None])
        return exact(mask)(*inputs)

    name = ("dq", "dk", "dv")[wrong]
    with pytest.raises(CheckError, match=rf"broken, {name}: .* token {token}"):
        check(attend, [t.clone() for t in inputs], mask, "broken")
    check(attend, [t.clone() for t in inputs], mask, "forward alone", backward=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_is_judged_by_what_it_costs_materialised_attention(inputs, dtype):
    mask = MASKS["per head"]
    inputs = [t.detach().to(dtype).requires_grad_() for t in inputs]

    def in_float64(*inputs):
        return exact(mask)(*(t.double() for t in inputs)).to(dtype)

    for attend in (exact(mask), in_float64):
        check(attend, inputs, mask, "right")
    with pytest.raises(CheckError, match="broken, out"):
        check(lambda *t: in_float64(*t) + 0.1, inputs, mask, "broken")


@pytest.mark.parametrize(("times", "passes"), [(2.9, True), (3.1, False)])
def test_an_error_may_be_three_times_that_of_materialised_attention(times, passes):
    expected = torch.rand(1, 1, 4, 8, dtype=torch.float64)
    standard, actual = expected.clone(), expected.clone()
    standard[0, 0, 1, 2] += 0.01
    actual[0, 0, 3, 5] -= 0.01 * times
    with nullcontext() if passes else pytest.raises(CheckError, match=r"x: .* token 3"):
        _compare("x", actual, standard, expected, None)


def test_nan_never_passes(inputs):
    mask = MASKS["butterfly"]
    with pytest.raises(CheckError, match="error inf"):
        check(lambda q, k, v: exact(mask)(q, k, v) * float("nan"), inputs, mask, "broken")
