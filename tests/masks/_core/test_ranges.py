"""Ranges of operations against every value, and masks that they decide against every pair."""

import operator
import random

import numpy as np
import pytest
import torch

import masks
from masks import BlockMask
from masks._core.elementwise import ElementwiseFunction
from masks._core.ranges import OF_CONDITIONS, OF_INTEGERS, Range

_aten = torch.ops.aten
BINARY = {
    _aten.add: operator.add,
    _aten.sub: operator.sub,
    _aten.rsub: lambda x, y: y - x,
    _aten.mul: operator.mul,
    _aten.minimum: min,
    _aten.maximum: max,
    _aten.bitwise_and: operator.and_,
    _aten.bitwise_or: operator.or_,
    _aten.bitwise_xor: operator.xor,
}
BY_NUMBER = {
    _aten.floor_divide: operator.floordiv,
    _aten.remainder: operator.mod,
    _aten.pow: operator.pow,
    _aten.__lshift__: operator.lshift,
    _aten.__rshift__: operator.rshift,
}
UNARY = {_aten.neg: operator.neg, _aten.abs: abs, _aten.bitwise_not: operator.invert}
SIGNS = {
    _aten.lt: operator.lt,
    _aten.le: operator.le,
    _aten.gt: operator.gt,
    _aten.ge: operator.ge,
    _aten.eq: operator.eq,
    _aten.ne: operator.ne,
}
SMALL = [(a, b) for a in range(-5, 6) for b in range(a, 6)]
ENDS = [-(2**63), -(2**32), -(2**31), -(2**15), -9, -1, 0, 1, 8, 2**15 - 1, 2**31, 2**63 - 1]


def within(draw: random.Random, of: Range) -> Range:
    return Range(*sorted(draw.choice([*of, draw.randint(*of)]) for _ in range(2)))


@pytest.mark.parametrize("packet", BINARY | SIGNS, ids=str)
def test_small_ranges_hold_every_result_of_two_values(packet):
    rule = (OF_INTEGERS if packet in BINARY else OF_CONDITIONS)[packet]
    operation = (BINARY | SIGNS)[packet]
    x, y = (np.array(ends) for ends in zip(*((a, b) for a in SMALL for b in SMALL), strict=True))
    found = rule(*(Range(each[:, 0], each[:, 1]) for each in (x, y)))
    for n, (a, b) in enumerate((a, b) for a in SMALL for b in SMALL):
        results = [operation(i, j) for i in range(a[0], a[1] + 1) for j in range(b[0], b[1] + 1)]
        assert found.least[n] <= min(results) <= max(results) <= found.largest[n], (a, b)
        assert rule(Range(*a), Range(*b)) == (found.least[n], found.largest[n])
        if packet in SIGNS:  # whether a condition holds is known where it is the same everywhere
            assert (found.least[n], found.largest[n]) == (min(results), max(results))


@pytest.mark.parametrize("packet", BY_NUMBER | UNARY, ids=str)
def test_small_ranges_hold_every_result_with_a_number(packet):
    rule, operation = OF_INTEGERS[packet], (BY_NUMBER | UNARY)[packet]
    x = Range(*np.array(SMALL).T)
    numbers = (
        [n for n in range(-4, 5) if rule(Range(0, 0), Range(n, n))] if packet in BY_NUMBER else [0]
    )
    assert numbers
    for number in numbers:
        rest = [number] * (packet in BY_NUMBER)
        found = rule(x, *(Range(n, n) for n in rest))
        for n, (least, largest) in enumerate(SMALL):
            results = [operation(i, *rest) for i in range(least, largest + 1)]
            ends = found.least[n], found.largest[n]
            assert ends[0] <= min(results) <= max(results) <= ends[1], (least, largest, number)
            assert rule(Range(least, largest), *(Range(n, n) for n in rest)) == ends


@pytest.mark.parametrize("packet", BINARY | BY_NUMBER | UNARY, ids=str)
def test_arrays_do_not_wrap_around_within_ranges_that_int64_holds(packet):
    draw, rule, cases = random.Random(0), OF_INTEGERS[packet], 0
    while cases < 300:
        x, y = (Range(*sorted(draw.choices(ENDS, k=2))) for _ in range(2))
        if packet in BY_NUMBER:
            number = draw.choice([2, 3, -5, 17, 62])
            y = Range(number, number)
        arguments = [x] if packet in UNARY else [x, y]
        found = rule(*arguments)
        if found is None or found.dtype() is None:
            cases += 1 / 16  # of some numbers there is none
            continue
        cases += 1
        narrower = [y if a is y and packet in BY_NUMBER else within(draw, a) for a in arguments]
        arrays = [
            each if each is y else Range(*(np.array([end, end]) for end in each))
            for each in narrower
        ]
        exact, tiles = rule(*narrower), rule(*arrays)
        assert found.least <= exact.least <= exact.largest <= found.largest or packet not in BINARY
        assert (int(tiles.least[1]), int(tiles.largest[1])) == exact


def square_by_product(q, k):
    row, column = q // 32 - k // 32, q % 32 - k % 32
    return row * row + column * column < 9


TABLE = torch.arange(30_000) // 7 % 11
# With what share of the pairs is read at 150 queries and 690 keys in spans of 16.
RULES = {
    "window": (lambda q, k: (q - k).abs() < 9, 0.1),
    "documents": (lambda q, k: (q // 100 == k // 100) & (k <= q), 0.1),
    "late keys": (lambda q, k: q + 2 * k > 900, 0.5),
    "late queries": (lambda q, k: (q * 50 + k) > 5000, 0.2),
    "plane": (lambda q, k: ((q // 32 - k // 32) ** 2 + (q % 32 - k % 32) ** 2) < 9, 0.5),
    "plane, by products": (square_by_product, 0.5),
    "greatest distance": (
        lambda q, k: torch.maximum((q // 16 - k // 16).abs(), (q % 16 - k % 16).abs()) < 2,
        0.3,
    ),
    "no common bit": (lambda q, k: (q & k) == 0, 0.5),
    "one bit": (lambda q, k: ((q ^ k) & ((q ^ k) - 1)) == 0, 0.3),
    "remainder of bits": (lambda q, k: (q ^ k) % 200 < 10, 0.3),
    "without some": (lambda q, k: ~((q > k) ^ (k - 2 * q > 30)), 0.3),
    "number": (lambda q, k: (q ^ k) >= 0, 0.1),
    "query alone": (lambda q, k: q >= 70, 0.2),
    "key alone": (lambda q, k: k % 300 < 70, 0.3),
    "table": (lambda q, k: TABLE[k // 3] == q // 60, 0.5),
    "unknown or known": (lambda q, k: ((q / (k + 1)).floor() % 3 == 0) & (q > k), 0.5),
    "wrapping": (lambda q, k: (q ^ k) * 2**55 > 5, 1),
    "number that int64 does not hold": (lambda q, k: (q ^ k) < 2**63, 1),
}


@pytest.mark.parametrize("lengths", [(150, 690), (128, 688)], ids=str)
@pytest.mark.parametrize("name", RULES)
def test_only_pairs_that_ranges_leave_open_are_read(name, lengths, monkeypatch):
    monkeypatch.setattr("masks._core.convert.SPAN", 16)
    monkeypatch.setattr("masks._core.convert.STRIP", 1)
    function, share = RULES[name]
    read, pairs = [], ElementwiseFunction.pairs

    def counted(self, queries, keys=None):
        read.append((queries.stop - queries.start) * (len(keys.first) * 16 if keys else 690))
        return pairs(self, queries, keys)

    monkeypatch.setattr(ElementwiseFunction, "pairs", counted)
    q, k = torch.arange(lengths[0])[:, None], torch.arange(lengths[1])[None]
    expected = BlockMask.from_dense(function(q, k).expand(lengths), 16)
    assert masks.pattern(function)(lengths, 16) == expected
    assert sum(read) <= share * q.numel() * 690


def number(draw: random.Random) -> int:
    edge = draw.choice([1, 3, 16, 17, 64, 100, 1000, 2**15, 2**16, 2**31, 2**40, 2**62])
    return draw.choice([1, 1, -1]) * (edge + draw.randrange(-1, 2))


def integer(draw: random.Random, depth: int):
    """A random function of (q, k) whose values are int64."""
    if depth == 0:
        n, a, b = number(draw), draw.randrange(-3, 4), draw.randrange(1, 90)
        leaves = [
            lambda q, k: q,
            lambda q, k: k,
            lambda q, k: q // b,
            lambda q, k: k % b,
            lambda q, k: q + n,
            lambda q, k: k + abs(n),
            lambda q, k: TABLE[k],
            lambda q, k: TABLE[q // b],
            lambda q, k: q - k,
            lambda q, k: a * q + b * k,
            lambda q, k: (q % b - k % b) ** 2,
            lambda q, k: ((q % b == 0) + (k % b < 2)) * n,
        ]
        return draw.choice(leaves)
    left, right = integer(draw, depth - 1), integer(draw, draw.randrange(depth))
    rules = [operator.add, operator.sub, operator.mul, torch.minimum, torch.maximum]
    rules += 2 * [operator.and_, operator.or_, operator.xor]
    kind, n = draw.randrange(6), number(draw)
    if kind < 3:
        rule = draw.choice(rules)
        return lambda q, k: rule(left(q, k), right(q, k))
    if kind == 3:
        rule = draw.choice(
            [operator.neg, operator.invert, torch.abs, lambda x: torch.clamp(x, -70, 900)]
        )
        return lambda q, k: rule(left(q, k))
    if kind == 4:
        sign = condition(draw, depth - 1)
        return lambda q, k: torch.where(sign(q, k), left(q, k), right(q, k))
    rule = draw.choice([operator.floordiv, operator.mod, operator.and_, operator.mod])
    if draw.random() < 0.4:
        rule, n = draw.choice([operator.lshift, operator.rshift]), draw.choice([0, 1, 5, 16, 47])
    n = draw.choice([n or 3, 2 ** draw.randrange(1, 12), 2 ** draw.randrange(1, 63) - 1])
    n = n % 64 if rule in (operator.lshift, operator.rshift) else n
    return lambda q, k: rule(left(q, k), n if n != -1 else -3)


def condition(draw: random.Random, depth: int):
    """A random function of (q, k) whose values are bool."""
    left, right = integer(draw, max(depth, 0)), integer(draw, draw.randrange(2))
    sign, n, kind = draw.choice([*SIGNS.values()]), number(draw), draw.randrange(4)
    if depth > 0 and kind == 0:
        join = draw.choice([operator.and_, operator.or_, operator.xor, torch.logical_and])
        one, other = condition(draw, depth - 1), condition(draw, depth - 1)
        return lambda q, k: join(one(q, k), ~other(q, k))
    if kind == 1:
        return lambda q, k: sign(left(q, k), right(q, k))
    if kind == 2:
        factor, modulus = draw.choice([0.5, 1 / 3]), draw.choice([8, 5, -4])
        return lambda q, k: left(q, k) * factor % modulus < right(q, k)
    return lambda q, k: sign(left(q, k), n)


def check_random_mask(seed: int, monkeypatch) -> None:
    draw = random.Random(seed)
    lengths = draw.choice([1, 15, 64, 150, draw.randrange(1, 260)]), draw.randrange(1, 700)
    block = draw.choice([16, 32, (16, 64), (64, 16)])
    monkeypatch.setattr("masks._core.convert.SPAN", draw.choice([16, 32, 128]))
    monkeypatch.setattr("masks._core.convert.STRIP", draw.choice([1, 20_000, 1 << 22]))
    monkeypatch.setattr("masks._core.convert.CACHED_BYTES", draw.choice([500, 9_000, 1 << 20]))
    monkeypatch.setattr("masks._core.elementwise.MAX_SHARED_VALUES", draw.choice([0, 2**26]))
    attends = condition(draw, draw.randrange(4))

    def function(q, k):
        return attends(q, k) ^ (q < 0) ^ (k < 0)

    q, k = torch.arange(lengths[0])[:, None], torch.arange(lengths[1])[None]
    expected = BlockMask.from_dense(function(q, k).expand(lengths), block)
    assert masks.pattern(function)(lengths, block) == expected, f"seed {seed}"


@pytest.mark.parametrize("first", range(0, 120, 10))
def test_random_rules_are_those_of_every_pair(first, monkeypatch):
    for seed in range(first, first + 10):
        check_random_mask(seed, monkeypatch)


@pytest.mark.parametrize("name", RULES)
def test_tokens_that_16_bits_do_not_hold(name):
    function, _ = RULES[name]
    q, k = torch.arange(30)[:, None], torch.arange(70_001)[None]

    def far(q, k):
        return function(q + 2**16 - 9, k)

    expected = BlockMask.from_dense(far(q, k).expand(30, 70_001), 16)
    assert masks.pattern(far)((30, 70_001), 16) == expected


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 1000, 250))
def test_many_random_rules_are_those_of_every_pair(first, monkeypatch):
    start = random.randrange(2**40)
    print("first seed", start)
    for seed in range(start, start + 250):
        check_random_mask(seed, monkeypatch)
