"""Passes with copies that are captured in a CUDA graph: the buffers that they take over."""

import weakref
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import masks
from sparseflash.distributed import Copies, context_parallel_attention, copies, make_plan
from sparseflash.distributed.copies import SharedMemory
from tests.helpers.copied import ONE_RANK, captured, copies_of, copies_of_files


def captured_passes(rank: int, mask: str, options: dict) -> list[bool]:
    """Whether captured passes equal the same passes before, and properties of buffers.

    options: of the plan
    """
    pattern = {"butterfly": masks.butterfly(), "causal": masks.causal()}[mask]
    plan = make_plan(pattern(256, 16), dist.get_world_size(), **options)
    own = torch.randn(3, 1, 4, len(plan.positions(rank)), 16).double().requires_grad_()

    def both(transport: Copies) -> tuple[torch.Tensor, ...]:
        out = context_parallel_attention(*own.unbind(), plan, transport=transport)
        return out, *torch.autograd.grad(out.square().sum(), own)

    with copies_of_files():
        transport = Copies()
        expected = both(transport)
        held = transport.nbytes
        with captured(), mock.patch.object(SharedMemory, "_allocated", side_effect=AssertionError):
            found = [both(transport) for _ in range(3)]
        taken_over = transport.nbytes == held
        of_graphs = transport._of_captured[0]._buffers
        both(transport)  # allocates others
        apart = not any(x in of_graphs for x in transport.memory._buffers)
    pairs = [pair for each in found for pair in zip(each, expected, strict=True)]
    equal = all(torch.equal(*pair) for pair in pairs)  # not so if one has NaN of a free buffer
    return [equal, taken_over, apart, len(of_graphs) > 0]


UNEQUAL = {"split": "in place", "strategy": "zigzag", "shared_rows": (), "round_tokens": 32}


@pytest.mark.parametrize(
    ("mask", "options"),
    [
        ("butterfly", {}),
        ("butterfly", {"round_tokens": 64}),
        ("causal", UNEQUAL),  # exchanges of several sizes, of which four ranks have four buffers
    ],
)
def test_captured_passes_keep_the_buffers_of_earlier_ones(ranks, mask, options):
    for answer in ranks.run(captured_passes, mask, options):
        assert answer == [True, True, True, True], answer


def passes_that_begin(rank: int) -> int:
    """How often both passes of a call say that a pass begins."""
    plan = make_plan(masks.butterfly()(256, 16), dist.get_world_size())
    own = torch.randn(3, 1, 2, len(plan.positions(rank)), 16).requires_grad_()
    begin = Copies.begin_pass
    with (
        copies_of_files(),
        mock.patch.object(Copies, "begin_pass", autospec=True, side_effect=begin) as called,
    ):
        context_parallel_attention(*own.unbind(), plan, transport=Copies()).sum().backward()
    return called.call_count


def test_each_pass_says_that_it_begins(two_ranks):
    assert two_ranks.run(passes_that_begin) == [2, 2]


def refused_in_a_graph(rank: int) -> str:
    plan = make_plan(masks.causal()(64, 16), dist.get_world_size())
    own = torch.randn(3, 1, 2, len(plan.positions(rank)), 16).unbind()
    with copies_of_files():
        transport = Copies()
        context_parallel_attention(*own, plan)
        with captured(), pytest.raises(RuntimeError, match="transport has no buffer") as error:
            context_parallel_attention(*own, plan, transport=transport)
    return str(error.value)


def test_captured_passes_need_buffers_of_earlier_ones(ranks):
    for answer in ranks.run(refused_in_a_graph):
        assert "for a pass that is captured in a CUDA graph: each pass must run with" in answer


@contextmanager
def alone():
    """A context with copies of one rank, whose buffers are memory of this process."""

    def allocated(_, group: dist.ProcessGroup, nbytes: int) -> list[torch.Tensor]:
        return [torch.empty(nbytes, dtype=torch.uint8)]

    with (
        mock.patch.object(copies.dist, "all_reduce"),
        mock.patch.object(SharedMemory, "_allocated", allocated),
    ):
        yield copies_of(ONE_RANK, torch.device("cpu"))


def test_a_captured_pass_begins_with_all_buffers_free():
    """What was replayed before has read them last, and no barrier has followed."""
    with alone() as transport:
        eager = transport.memory
        lent = eager.take(ONE_RANK, 100)
        eager.release(lent)
        with captured():
            for _ in range(3):
                transport.begin_pass()
                taken = transport.memory.take(ONE_RANK, 100)
                assert taken is lent
                transport.memory.release(taken)
        transport.begin_pass()  # it waits for nothing if nothing is captured
        assert eager._barriers == 0


def test_a_captured_pass_takes_over_the_smallest_buffer_that_is_large_enough():
    """As an earlier pass chose: else a small exchange would have the only large buffer."""
    with alone() as transport:
        eager = transport.memory
        large, small = (eager.take(ONE_RANK, nbytes) for nbytes in (9000, 5000))
        for each in (large, small):
            eager.release(each)
        with captured():
            for sizes, expected in (((9000,), [large]), ((5000, 9000), [small, large])):
                transport.begin_pass()
                assert [transport.memory.take(ONE_RANK, x) for x in sizes] == expected
            barriers = transport.memory._barriers
            transport.memory.release(small)
            assert transport.memory.take(ONE_RANK, 5000) is small
            assert transport.memory._barriers == barriers + 1  # which frees it
        assert eager.nbytes == 0


def test_a_capture_that_failed_keeps_no_buffer_in_use():
    """The next one would need others, which no pass may have left."""
    with alone() as transport:
        lent = transport.memory.take(ONE_RANK, 100)
        transport.memory.release(lent)
        with captured():
            for _ in range(2):
                transport.begin_pass()
                assert transport.memory.take(ONE_RANK, 100) is lent
                transport.memory.copy([])
                assert len(transport.memory._launched) == 1


def freed_after_capture(rank: int) -> list[bool]:
    """Whether `free` frees the buffers that captured passes took over."""
    plan = make_plan(masks.causal()(64, 16), dist.get_world_size())
    own = torch.ones(3, 1, 2, len(plan.positions(rank)), 16).unbind()
    with copies_of_files():
        transport = Copies()
        context_parallel_attention(*own, plan, transport=transport)
        buffers = [weakref.ref(each) for each in transport.memory._buffers]
        with captured():
            context_parallel_attention(*own, plan, transport=transport)
        found = [transport._of_captured[0].nbytes > 0, all(each() for each in buffers)]
        transport.free()
    return [*found, transport.nbytes == 0, not any(each() for each in buffers)]


def test_buffers_of_captured_passes_are_freed(ranks):
    for answer in ranks.run(freed_after_capture):
        assert answer == [True, True, True, True], answer
