"""Functions of (query, key) that are recorded, against the same functions of every pair."""

import operator
import random
import subprocess
import sys

import pytest
import torch

import masks
from masks._core.elementwise import ElementwiseFunction
from masks._core.ranges import Spans

TABLE = torch.arange(100) % 7
SHORT = torch.arange(84) // 9  # for queries and keys, too short for their distances
LONG = torch.arange(300) % 5
PLANE = (torch.arange(100)[:, None] * torch.arange(100)) % 5 < 2
NUMBER = torch.tensor(3)


def doubled(x, times: int):
    return doubled(x + x, times - 1) if times else x


ELEMENTWISE = {
    "causal": lambda q, k: q >= k,
    "near": lambda q, k: (q - k).abs() < 6,
    "rings": lambda q, k: (k - q) % 9 < 2,
    "shifted": lambda q, k: (q + 3 - (k - 2)) // 4 == 1,
    "not shifted": lambda q, k: (3 - q) - k > -40,
    "far shifted": lambda q, k: q + 2**62 >= k + 2**62 - 3,
    "wrapping shift": lambda q, k: q + (2**63 - 30) >= k,
    "wrapping shifts": lambda q, k: q + 2**62 + (2**62 - 30) >= k,
    "scaled": lambda q, k: torch.sub(q, k, alpha=2) > 3,
    "scaled shift": lambda q, k: torch.add(q, 3, alpha=2) <= k,
    "mixed": lambda q, k: ((q - k).abs() < 6) | (k % 10 < 3) & ~(q % 4 == 0),
    "documents": lambda q, k: TABLE[q] == TABLE[k],
    "causal documents": lambda q, k: (SHORT[q] == SHORT[k]) & (q >= k),
    "pairs of a table": lambda q, k: PLANE[q, k],
    "distances of a table": lambda q, k: TABLE[(q - k).abs()] > 3,
    "product": lambda q, k: (q * k) % 7 < 3,
    "query alone": lambda q, k: q % 3 == 0,
    "key alone": lambda q, k: k > 4,
    "where": lambda q, k: torch.where(q > k, q % 3 == 0, k % 5 == 1),
    "where number": lambda q, k: torch.where(q > k, q, 7) % 2 == 0,
    "number": lambda q, k: q - NUMBER > k,
    "new number": lambda q, k: (q - k) > torch.tensor(2),
    "float": lambda q, k: (q.float() / 3 - k / 3).abs() < 2,
    "xor": lambda q, k: ((q ^ k) & 4) == 0,
    "min": lambda q, k: torch.minimum(q, k) > 5,
    "root": lambda q, k: (q - k).clamp(min=0).sqrt().floor() % 2 == 1,
    "sum": lambda q, k: (7 * q + 3 * k) % 100 < 10,
    "negative sum": lambda q, k: (5 - 3 * q - 2 * k) // -7 % -4 == -1,
    "sum of one factor": lambda q, k: (6 * (q - 2) + 4 * -k) // 8 < -20,
    "sum that comes to the query": lambda q, k: (q + k) - k > 7,
    "sum that comes to a number": lambda q, k: (q - q + 3) * k > 50,
    "compared sums": lambda q, k: 3 * q + k > 2 * q + 4 * k - 7,
    "sum of large factors": lambda q, k: (q * 40_000_000 + k * 104_729) % 11 < 3,
    "wrapping sum": lambda q, k: q * 2**62 + k > k - 1,
    "sum of a table": lambda q, k: LONG[q + 2 * k] > 3,
    "sums that no tokens have": lambda q, k: 1000 // (3 * q + 5 * k - 4) > 20,
    "blocks": lambda q, k: q // 16 == k // 20,
    "blocks and strides": lambda q, k: (q // 8 == k // 8) | (q % 5 == k % 5),
    "rows of a table": lambda q, k: (TABLE[q // 9] ^ (k & 3)) > 3,
    "rows of fractions": lambda q, k: ((q // 20).float() / (k + 1) > 0.1) == (q < 30),
    "rows or sums": lambda q, k: torch.where(q // 16 == k // 16, k % 3 == 0, (q + k) % 4 == 0),
    "remainder of a product": lambda q, k: ((q - 9) * (k // 2) - k * 3) % 7 > 3,
    "negative remainder of a product": lambda q, k: (q * k - q * q) % -5 == -2,
    "remainder of a wrapping product": lambda q, k: (q * 2**58 * k) % 7 > 3,
    "remainder of a wrapping sum": lambda q, k: (q * k + 2**63 - 40) % 7 > 3,
    "remainder of a remainder": lambda q, k: ((q * k) % 7 + q * k) % 5 > 2,
    "remainder below a wrapping product": lambda q, k: (q * k) % -(2**40 + 1) > -(2**40) + 99,
    "lowest bits": lambda q, k: (((q ^ k) | (q * 5 - k)) & 12) == 4,
    "lowest bits of a wrapping product": lambda q, k: (~(q * 2**61 * k) & 11 * 2**58) > 0,
    "remainder by a power of two": lambda q, k: (q * k + (q & k)) % -16 < -9,
    "lowest bits of scaled": lambda q, k: (torch.sub(q ^ k, q, alpha=2) & 7) < 3,
    "lowest bit of conditions": lambda q, k: (((q % 3 < 1) + (k % 2 < 1)) & 1) == 1,
    "remainder of halves": lambda q, k: ((q ^ k) * 0.5) % 8 < 3,
    "shift by a number of pairs": lambda q, k: (q ^ k) >> ((q | k) & 0) > 9,
    "quotient by a number of keys": lambda q, k: (q ^ k) // (k * 0 + 3) > 9,
    "much doubled": lambda q, k: doubled(q * k, 20) % 7 < 3,
    "narrow": lambda q, k: (q.to(torch.int8) - k.to(torch.int8)) > 0,
}
OTHERS = {
    "running sum": lambda q, k: (q - k).abs().cumsum(1) % 3 == 0,
    "in place": lambda q, k: (q - k).abs_() < 3,
    "row of keys": lambda q, k: (q >= k) & (TABLE[: k.shape[1]] > 2),
    "masked keys": lambda q, k: (q >= k) & TABLE.index_select(0, k.flatten()).bool(),
    "another tensor": lambda q, k: (torch.ones_like(k) * q > 3).expand(len(q), k.shape[1]),
    "constant": lambda q, k: torch.ones(1, 1, dtype=torch.bool),
    "number alone": lambda q, k: ~torch.tensor(False),
}


@pytest.mark.parametrize("lengths", [(50, 83), (83, 50), (1, 20), (20, 1), (64, 64)], ids=str)
@pytest.mark.parametrize("name", ELEMENTWISE | OTHERS)
def test_every_pair_is_that_of_the_function(name, lengths, monkeypatch):
    monkeypatch.setattr("masks._core.convert.CACHED_BYTES", 400)
    function = (ELEMENTWISE | OTHERS)[name]
    q, k = torch.arange(lengths[0])[:, None], torch.arange(lengths[1])[None]
    expected = function(q, k).expand(lengths)
    assert torch.equal(masks.pattern(function)(lengths, 16).to_dense(), expected)


@pytest.mark.parametrize("name", ELEMENTWISE | OTHERS)
def test_which_functions_are_replayed(name):
    function = ElementwiseFunction((ELEMENTWISE | OTHERS)[name])
    q, k = torch.arange(50)[:, None], torch.arange(83)[None]
    function.record(q[:2], k)
    assert function.prepare(q, k) == (name in ELEMENTWISE)


@pytest.mark.parametrize(
    ("attends", "expected"),
    [
        (lambda q, k: (q - k).abs() < 5, 1),
        (lambda q, k: (q // 7 == k // 7) & (k <= q), 1),
        (lambda q, k: (q + k).int() % 7 == 0, 1),
        (lambda q, k: (q ^ k) % 7 == 0, 2),
        (lambda q, k: (q * k * 2**40).int() % 7 == 0, 8),
    ],
)
def test_bytes_of_a_pair_are_those_of_the_largest_value(attends, expected):
    function = ElementwiseFunction(attends)
    q, k = torch.arange(50)[:, None], torch.arange(83)[None]
    function.record(q[:2], k)
    function.prepare(q, k)
    assert function.pair_bytes() == expected


@pytest.mark.parametrize(
    ("attends", "operations"),
    [
        (lambda q, k: (7 * q + 3 * k) % 100 < 10, 0),
        (lambda q, k: q // 9 == k // 9, 0),
        (lambda q, k: (q // 9 == k // 9) & (k <= q), 1),
        (lambda q, k: (q // 9 == k // 9) | (q % 9 == k % 9), 1),
        (lambda q, k: (q // 9 == k // 9) | (q % 9 == 3), 0),
        (lambda q, k: (3 * q + 7000 * k) % 1001 < 10, 3),
        (lambda q, k: (3 * q + 7000 * k) % 11 < 3, 0),
        (lambda q, k: (q * k - 5 * q * q) % -97 < -3, 0),
        (lambda q, k: (q * k + (q ^ k)) % 97 < 3, 5),
        (lambda q, k: ((q * k + (q ^ k)) & 31) < 3, 0),
        (lambda q, k: (q * 2**40 * k * 2**20) % 97 < 3, 4),
        (lambda q, k: q ^ k < 5, 2),
    ],
)
def test_operations_on_every_pair(attends, operations, monkeypatch):
    monkeypatch.setattr("masks._core.elementwise.MAX_SUMS", 2**16)
    function = ElementwiseFunction(attends)
    q, k = torch.arange(500)[:, None], torch.arange(300)[None]
    function.record(q[:2], k)
    assert function.prepare(q, k)
    assert len(function.pair_steps) == operations


@pytest.mark.parametrize("lengths", [(70, 203), (300, 1024), (1, 5)], ids=str)
@pytest.mark.parametrize(
    ("attends", "packed"),
    [
        (lambda q, k: (7 * q + 3 * k) % 100 < 10, True),
        (lambda q, k: ((q ^ k) & 7) == 0, True),
        (lambda q, k: ((q - k).abs() < 6) & ~(q // 50 == k // 50) | (k % 100 < 3), True),
        (lambda q, k: (q % 3 == 0) ^ (k % 2 == 0).logical_not(), True),
        (lambda q, k: q % 3 == 0, True),
        (lambda q, k: (q ^ k) % 7 == 0, False),
        (lambda q, k: torch.where(q > k, q % 3 == 0, k % 5 == 1), False),
    ],
)
def test_conditions_are_read_eight_pairs_at_a_time(attends, packed, lengths, monkeypatch):
    function = ElementwiseFunction(attends)
    q, k = torch.arange(lengths[0])[:, None], torch.arange(lengths[1])[None]
    function.record(q[:2], k)
    function.prepare(q, k)
    if lengths[0] > 1:
        assert (function.packed(1024) is not None) == packed
    if packed and lengths[0] > 1:
        monkeypatch.delattr(ElementwiseFunction, "pairs")
    expected = attends(q, k).expand(lengths)
    assert torch.equal(masks.pattern(attends)(lengths, 16).to_dense(), expected)


def test_what_depends_on_the_distance_is_computed_once_for_each():
    function = ElementwiseFunction(lambda q, k: ((q + 1 - k).abs() % 5 < 2) & (k % 3 == 0))
    q, k = torch.arange(50)[:, None], torch.arange(83)[None]
    function.record(q[:2], k)
    assert function.prepare(q, k)
    assert sorted(value.numel() for value in function.values.values()) == [83, 132]


RULES = [operator.add, operator.sub, operator.mul, torch.minimum, operator.floordiv, operator.mod]
LEAVES = [
    lambda q, k: q,
    lambda q, k: k,
    lambda q, k: 4,
    lambda q, k: q - k,
    lambda q, k: 5 - 2 * q + 3 * k,
    lambda q, k: q // 11,
    lambda q, k: -k,
]
SIGNS = [operator.lt, operator.le, operator.eq, operator.ne, operator.ge, operator.gt]


def drawn(draw: random.Random, depth: int):
    """A random function of (q, k) with integers."""
    if depth == 0:
        return draw.choice(LEAVES)
    rule, left, right = draw.choice(RULES), drawn(draw, depth - 1), drawn(draw, depth - 1)
    divisor = draw.choice([3, -3, 20, -7])

    def value(q, k):
        a, b = left(q, k), right(q, k)
        if rule is torch.minimum and not (torch.is_tensor(a) and torch.is_tensor(b)):
            return a
        return rule(a, divisor if rule in (operator.floordiv, operator.mod) else b)

    return value


@pytest.mark.parametrize("seed", range(120))
def test_random_functions(seed):
    draw = random.Random(seed)
    left, right, other = (drawn(draw, draw.randrange(4)) for _ in range(3))
    sign, join = draw.choice(SIGNS), draw.choice([operator.and_, operator.or_, operator.xor])

    def function(q, k):
        return join(sign(left(q, k) + 0 * q, right(q, k)), (other(q, k) + 0 * k) % 3 == 1)

    q, k = torch.arange(45)[:, None], torch.arange(37)[None]
    expected = function(q, k).expand(45, 37)
    assert torch.equal(masks.pattern(function)((45, 37), 16).to_dense(), expected)


def test_values_of_consecutive_keys_are_not_copied():
    """Neighbouring queries share a row of one table and read neighbouring rows of the other."""
    attends = ElementwiseFunction(
        lambda q, k: (q // 64 - k // 64) ** 2 + (q % 64 - k % 64) ** 2 <= 100
    )
    q, k = torch.arange(4096)[:, None], torch.arange(4096)[None]
    attends.record(q[:2], k)
    assert attends.prepare(q, k)
    spans = Spans.of(torch.arange(256, 1024, 128), 128)
    assert spans.consecutive
    shapes = []
    for i, table in attends.values.items():
        rows = attends._value(i, slice(64, 80), spans)
        assert rows.untyped_storage().data_ptr() == table.untyped_storage().data_ptr()
        shapes.append(tuple(rows.shape))
    assert sorted(shapes) == [(1, 768), (16, 768)]
    expected = attends.function(q[64:80], k[:, 256:1024])
    assert torch.equal(attends.pairs(slice(64, 80), spans), expected)
    apart = Spans.of(torch.tensor([256, 640]), 128)
    assert not apart.consecutive
    both = torch.cat([expected[:, :128], expected[:, 384:512]], 1)
    assert torch.equal(attends.pairs(slice(64, 80), apart), both)


@pytest.mark.parametrize("compare", ["lt", "le", "gt", "ge", "eq", "ne"])
def test_terms_above_a_number_are_clipped(compare):
    compared, grid = getattr(operator, compare), 64
    q, k = torch.arange(64 * grid)[:, None], torch.arange(64 * grid)[None]
    for number in (-5, -1, 0, 1, 25, 100, 5000, 2**63 - 1):

        def near(q, k, number=number):
            rows, columns = q // grid - k // grid, q % grid - k % grid
            return compared(rows * rows + columns * columns, number)

        attends = ElementwiseFunction(near)
        attends.record(q[:2], k)
        assert attends.prepare(q, k)
        some = slice(17 * grid + 5, 18 * grid + 9)
        assert torch.equal(attends.pairs(some), near(q[some], k))
        largest = max(int(value.max()) for value in attends.values.values())
        assert largest == min(63**2, max(number, -1) + 1)


def test_terms_that_are_negative_or_read_twice_are_not_clipped():
    q, k = torch.arange(4096)[:, None], torch.arange(4096)[None]

    def negative(q, k):
        return (q // 64 - k // 64) + (q % 64 - k % 64) ** 2 < 10

    def term_is_read_twice(q, k):
        rows = (q // 64 - k // 64) ** 2
        return (rows + (q % 64 - k % 64) ** 2 < 10) | (rows + (q % 50 - k % 50) ** 2 > 2000)

    def wraps_around(q, k):
        return 2**62 * (q // 64 - k // 64).abs() % 3 + (2**62 + (q % 64 - k % 64) ** 2) * 2 < 10

    def sum_is_read_twice(q, k):
        distance = (q // 64 - k // 64) ** 2 + (q % 64 - k % 64) ** 2
        return (distance < 10) | (distance > 2000)

    for function in (negative, term_is_read_twice, sum_is_read_twice, wraps_around):
        attends = ElementwiseFunction(function)
        attends.record(q[:2], k)
        assert attends.prepare(q, k)
        assert torch.equal(attends.pairs(slice(70, 90)), function(q[70:90], k))


def test_recording_imports_no_compiler_and_higher_order_operators_are_evaluated_pair_by_pair():
    # In a process of its own: the first operator loads Dynamo, which must find no dispatch mode.
    code = """
import masks, sys, time, torch
from concurrent.futures import ThreadPoolExecutor
masks.pattern(lambda q, k: q > k)(64, 16)
def chosen(q, k):
    return torch.cond(torch.tensor(True), lambda q, k: q >= k, lambda q, k: q < k, (q, k))
for dynamo_was_loaded in (False, True):
    assert ("torch._dynamo.convert_frame" in sys.modules) == dynamo_was_loaded
    assert masks.pattern(chosen)(40, 16) == masks.causal()(40, 16)
def started_and_ended_later(seconds):
    time.sleep(seconds)
    masks.pattern(lambda q, k: time.sleep(2 * seconds) or q > k)(32, 16)
with ThreadPoolExecutor(2) as pool:
    list(pool.map(started_and_ended_later, (0.1, 0.2)))
graphs = []
torch.compile(lambda x: x + 1, backend=lambda g, _: graphs.append(g) or g.forward)(torch.ones(1))
assert graphs, "nothing is compiled any more"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
