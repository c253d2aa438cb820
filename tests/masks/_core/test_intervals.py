"""Runs of integers against Python's sets."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from masks._core.intervals import Runs, combine, concatenate, empty, from_points, union

CPU = torch.device("cpu")
sets = st.sets(st.integers(0, 40))


def runs_of(integers) -> Runs:
    return from_points(torch.tensor(sorted(integers), dtype=torch.int64))


@given(sets)
def test_points_make_the_fewest_runs(integers):
    runs = runs_of(integers)
    assert runs.expand().tolist() == sorted(integers)
    assert runs.size() == len(integers)
    assert bool((runs.begin[1:] > runs.end[:-1]).all())


@given(sets, sets)
def test_algebra_is_that_of_sets(a, b):
    one, two = runs_of(a), runs_of(b)
    assert set(combine(lambda x, y: x & y, one, two).expand().tolist()) == a & b
    assert set(combine(lambda x, y: x | y, one, two).expand().tolist()) == a | b
    assert set(combine(lambda x, y: x & ~y, one, two).expand().tolist()) == a - b
    assert set(combine(lambda x, y: x ^ y, one, two).expand().tolist()) == a ^ b


@given(sets, st.lists(st.integers(-2, 45), max_size=20))
def test_contains(integers, points):
    found = runs_of(integers).contains(torch.tensor(points, dtype=torch.int64))
    assert found.tolist() == [point in integers for point in points]


@given(sets, sets)
def test_sets_that_follow_one_another(a, b):
    later = runs_of(b).shift(100)
    both = concatenate([runs_of(a), later])
    assert both.expand().tolist() == [*sorted(a), *(100 + n for n in sorted(b))]
    assert both.between(100, 200).expand().tolist() == later.expand().tolist()


def test_runs_that_hold_nothing():
    assert empty(CPU).size() == 0
    backwards = Runs(torch.tensor([3, 7]), torch.tensor([3, 9])).nonempty()
    assert backwards.expand().tolist() == [7, 8]


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)), max_size=12),
    st.sampled_from([0, 2**40, 2**62]),  # past 2**60 a number and a length do not fit 64 bits
)
def test_union_of_runs_that_overlap(runs, far):
    edges = torch.tensor([(begin, begin + length) for begin, length in runs]).long().view(-1, 2)
    found = union(Runs(*edges.T).shift(far), Runs(*edges[:3].T).shift(far))
    expected = from_points(
        torch.tensor(
            sorted({n for begin, end in edges.tolist() for n in range(begin, end)}),
            dtype=torch.int64,
        )
    )
    nonempty = found.nonempty().shift(-far)
    assert nonempty.expand().tolist() == expected.expand().tolist()
    if all(length for _, length in runs):
        assert [edge.tolist() for edge in nonempty] == [edge.tolist() for edge in expected]


class MemoryOf(TorchDispatchMode):
    """Notes the tensors of at least `least` bytes that operations make."""

    def __init__(self, least: int):
        super().__init__()
        self.least, self.made = least, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.untyped_storage().nbytes() >= self.least:
            self.made.append(out)  # kept, so that no other one takes its place
        return out

    def storages(self) -> int:
        return len({out.untyped_storage().data_ptr() for out in self.made})


def test_a_set_becomes_bool_in_the_memory_of_the_result():
    runs = Runs(torch.tensor([0, 7, 9]), torch.tensor([5, 9, 4096]))
    with MemoryOf(4096) as memory:
        found = runs.to_bool(4096)
    assert memory.storages() == 1
    assert found.dtype == torch.bool
    assert found.nonzero().flatten().tolist() == [*range(5), *range(7, 4096)]
