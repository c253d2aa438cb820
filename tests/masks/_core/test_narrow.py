"""Operations on pairs in fewer bits, against the same functions of every pair in int64."""

import operator
import random
import warnings

import pytest
import torch

import masks
from masks._core.elementwise import ElementwiseFunction
from masks._core.narrow import Narrowed, narrowed
from masks._core.ranges import Range

BINARY = [operator.add, operator.sub, operator.mul, operator.and_, operator.or_, operator.xor]
BINARY += [torch.minimum, torch.maximum]
OF_NUMBERS = [operator.floordiv, operator.mod, operator.lshift, operator.rshift, *BINARY[:6]]
UNARY = [operator.neg, operator.invert, torch.abs, torch.square, lambda x: x.clamp(-70, 2**31)]
SIGNS = [operator.lt, operator.le, operator.eq, operator.ne, operator.ge, operator.gt]


def number(draw: random.Random) -> int:
    """A number close to where integers of some width end, most often a small one."""
    edge = draw.choice([1, 7, 7, 100, 2**14, 2**15, 2**16, 2**30, 2**31, 2**32, 2**62, 2**63 - 5])
    return draw.choice([1, 1, -1]) * (edge + draw.randrange(-4, 5))


def integer(draw: random.Random, depth: int):
    """A random function of (q, k) whose values are int64."""
    if depth == 0:
        a, b = draw.randrange(-3, 4), number(draw)
        return draw.choice(
            [lambda q, k: q, lambda q, k: k, lambda q, k: (q ^ k) * a, lambda q, k: q + b]
        )
    left, right = integer(draw, depth - 1), integer(draw, depth - 1)
    kind = draw.randrange(5)
    if kind < 2:
        rule = draw.choice(BINARY)
        return lambda q, k: rule(left(q, k), right(q, k))
    if kind == 2:
        rule = draw.choice(UNARY)
        return lambda q, k: rule(left(q, k))
    rule, n = draw.choice(OF_NUMBERS), number(draw) or 3
    if rule in (operator.lshift, operator.rshift):
        n = draw.choice([0, 1, 5, 14, 15, 16, 30, 31, 33, 62, 63])
    if n == -1:
        n = -3
    return lambda q, k: rule(left(q, k), n)


@pytest.mark.parametrize("seed", range(200))
def test_random_functions_are_those_of_int64(seed, monkeypatch):
    monkeypatch.setattr("masks._core.elementwise.MAX_SHARED_VALUES", 0)
    draw = random.Random(seed)
    left, right = integer(draw, draw.randrange(1, 5)), integer(draw, draw.randrange(3))
    sign, n = draw.choice(SIGNS), number(draw)

    def function(q, k):
        return sign(left(q, k) ^ (q & k), right(q, k)) ^ (left(q, k) + (q | k) > n)

    q, k = torch.arange(90)[:, None], torch.arange(70)[None]
    expected = function(q, k).expand(90, 70)
    assert torch.equal(masks.pattern(function)((90, 70), 16).to_dense(), expected)


@pytest.mark.parametrize("length", [181, 182, 183, 46340, 46341, 46342])
def test_products_at_the_ends_of_a_width(length):
    def function(q, k):
        return ((q + (length - 2)) * k) ^ (q & k) > 100

    q, k = torch.arange(2)[:, None], torch.arange(length)[None]
    assert torch.equal(masks.pattern(function)((2, length), 16).to_dense(), function(q, k))


THRESHOLDS = [0.1, 0.30000001192092896, 1 / 3, -0.0, 1e-40, 16777216.0, 3e10, float("inf"), 7, -2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sign", SIGNS)
def test_thresholds_of_floats(sign, dtype):
    values = torch.tensor([*THRESHOLDS, float("nan"), -float("inf"), 0.1 + 1e-17], dtype=dtype)
    q, k = torch.arange(40)[:, None], torch.arange(50)[None]
    for threshold in THRESHOLDS:

        def function(q, k, n=threshold):
            return sign(values[(q ^ k) % len(values)] * 1, n)

        with warnings.catch_warnings(action="error"):
            got = masks.pattern(function)((40, 50), 16).to_dense()
        assert torch.equal(got, function(q, k))


@pytest.mark.parametrize(
    ("attends", "dtypes"),
    [
        (lambda q, k: ((q ^ k) & 63) == 0, [torch.int16] * 3),
        (lambda q, k: (q ^ k) % 1000 < 10, [torch.int32] * 3),
        (
            lambda q, k: (q ^ k) % 1000 // 3 < 10,
            [torch.int32, torch.int32, torch.int16, torch.int16],
        ),
        (lambda q, k: (q ^ k) < 2**31, [torch.int32, torch.int64]),
        (lambda q, k: (q * k) // 1000 == 7, [torch.int64] * 3),
        (lambda q, k: (q // 2 * (k // 2)) > 5, [torch.int32] * 2),
        (lambda q, k: ((q ^ k) << 15) > 5, [torch.int32] * 3),
        (lambda q, k: ((q ^ k) << 16) > 5, [torch.int32, torch.int64, torch.int64]),
        (lambda q, k: (q % 181 * (k % 181)) ^ 1 > 5, [torch.int16] * 3),
        (lambda q, k: (q % 183 * (k % 183)) ^ 1 > 5, [torch.int32] * 3),
    ],
)
def test_dtypes_at_65536_tokens(attends, dtypes, monkeypatch):
    monkeypatch.setattr("masks._core.elementwise.MAX_SHARED_VALUES", 0)
    function = ElementwiseFunction(attends)
    q, k = torch.arange(1 << 16)[:, None], torch.arange(1 << 16)[None]
    function.record(q[:2], k)
    assert function.prepare(q, k)
    assert [step.operation.dtype for step, _ in function.pair_steps] == dtypes


ENDS = [-(2**63), -(2**31) - 1, -(2**31), -(2**15), -9, -1, 0, 1, 8, 2**15 - 1, 2**31, 2**63 - 1]
OPERATIONS = [
    (torch.ops.aten.add.Tensor, operator.add),
    (torch.ops.aten.sub.Tensor, operator.sub),
    (torch.ops.aten.mul.Tensor, operator.mul),
    (torch.ops.aten.bitwise_and.Tensor, operator.and_),
    (torch.ops.aten.bitwise_or.Tensor, operator.or_),
    (torch.ops.aten.bitwise_xor.Tensor, operator.xor),
    (torch.ops.aten.minimum.default, min),
    (torch.ops.aten.maximum.default, max),
    (torch.ops.aten.floor_divide.default, operator.floordiv),
    (torch.ops.aten.remainder.Scalar, operator.mod),
]


@pytest.mark.parametrize(("operation", "rule"), OPERATIONS, ids=str)
def test_ranges_hold_every_value(operation, rule):
    draw, narrow = random.Random(0), 0
    for _ in range(1000):
        x, y = (Range(*sorted(draw.choices(ENDS, k=2))) for _ in range(2))
        if rule in (operator.floordiv, operator.mod):
            y = Range(y.least, y.least)
        found = narrowed(operation, [x, y])
        if found is None:
            continue
        assert isinstance(found, Narrowed)
        narrow += 1
        limits = torch.iinfo(found.dtype)
        for _ in range(5):
            a, b = draw.randint(*x), draw.randint(*y)
            value = rule(a, b)
            assert found.range.least <= value <= found.range.largest
            assert limits.min <= min(a, b, value) <= max(a, b, value) <= limits.max
            operands = torch.tensor([[a], [b]]).to(found.dtype)
            divisor = b if rule in (operator.floordiv, operator.mod) else operands[1]
            assert int(found(operands[0], divisor)) == value
    assert narrow > 100
