"""Exchanges by copies: with files in place of the memory of GPUs, against one process."""

import weakref
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef

import masks
from sparseflash.distributed import (
    Copies,
    context_parallel_attention,
    copies,
    in_place,
    make_plan,
)
from sparseflash.distributed.copies import Location, SharedMemory
from sparseflash.distributed.exchange import Splits
from tests.helpers import context_gradients as gradients
from tests.helpers import context_parallel as cases
from tests.helpers.copied import ONE_RANK, captured, copies_of, copies_of_files, with_copies

EXACT = 1e-12


def check_exact(answers):
    for answer in answers:
        assert isinstance(answer, dict), answer
        assert max(answer.values()) < EXACT, answer


@pytest.mark.parametrize("mask", ["causal", "empty rows", "butterfly", "head masks"])
@pytest.mark.parametrize(
    ("strategy", "split"),
    [
        *(("contiguous", "rows"), ("shuffled", "keys")),
        *(("zigzag", "rounds"), ("zigzag", "shared rows")),
    ],
)
def test_same_as_one_process(ranks, mask, strategy, split):
    check_exact(ranks.run(with_copies, cases.errors, mask, strategy, split, {}))


@pytest.mark.parametrize("groups", [1, 2])
def test_in_place(ranks, groups):
    for mask in ("butterfly", "causal", "global tokens"):
        case = (cases.errors_in_groups, mask, "shuffled", (), groups, 1, {})
        answers = ranks.run(with_copies, *case)
        check_exact([errors for errors, *_ in answers])


def order_of_exchanges(rank: int) -> list[str]:
    """The exchanges of both passes in two groups of heads, in the order in which keys are fetched,
    and gradients of fetched keys computed.
    """
    found: list[str] = []

    def noting(name, begin):
        def noted(*arguments):
            found.append(name)
            return begin(*arguments)

        return noted

    with (
        mock.patch.object(in_place, "Fetch", noting("keys", in_place.Fetch)),
        mock.patch.object(in_place, "Return", noting("gradients", in_place.Return)),
    ):
        cases.errors_in_groups(rank, "butterfly", "shuffled", (), 2, 1, {})
    return found


def test_several_copies_run_beside_one_kernel_and_only_one_all_to_all(two_ranks):
    """So copies fetch the keys of the second group when those of the first are not needed."""
    forward = ["keys", "keys"]
    for answer in two_ranks.run(with_copies, order_of_exchanges):
        assert answer == [*forward, "keys", "gradients", "keys", "gradients"], answer
    for answer in two_ranks.run(order_of_exchanges):
        assert answer == [*forward, "keys", "keys", "gradients", "gradients"], answer


@pytest.mark.parametrize("split", ["rows", "rounds"])
def test_a_second_backward_pass_and_equal_bits(ranks, split):
    assert all(ranks.run(with_copies, gradients.second_backward_pass, "butterfly", split))
    assert all(ranks.run(with_copies, gradients.same_bits, split))


def exchanged(rank: int) -> list[int]:
    """The number of buffers after each of some exchanges; checks what ranks receive."""
    group = dist.group.WORLD
    assert group is not None
    size, found, like = group.size(), [], torch.empty(0, dtype=torch.float64)
    with copies_of_files():
        transport = Copies()
        # Rank a sends a + b rows to rank b, and none to itself.
        counts = [[(a + b) * (a != b) for b in range(size)] for a in range(size)]
        for number in range(6):
            kind = (transport.pulled, transport.pushed)[number % 3 == 2]
            splits, elements = Splits(rank, counts), 3 if number < 4 else 300
            exchange = kind(splits, like, elements, "rows")
            values = [number + 10 * rank + b for b in range(size) for _ in range(counts[rank][b])]
            exchange.rows.copy_(torch.tensor(values).double().unsqueeze(1).expand(-1, elements))
            exchange.start()
            received = exchange.wait()
            expected = [
                number + 10 * a + rank for a in range(size) for _ in range(counts[a][rank])
            ]
            assert received.shape == (len(expected), elements)
            assert received[:, 0].tolist() == received[:, -1].tolist() == expected
            exchange.release()
            found.append(len(transport.memory._buffers))
        assert transport.nbytes == transport.memory.nbytes > 0
        transport.free()
        assert transport.nbytes == 0
    return found


def test_buffers_alternate_and_are_replaced_by_larger_ones(ranks):
    """A buffer is free after the barrier of the next exchange, so two are enough."""
    for answer in ranks.run(exchanged):
        assert answer == [1, 2, 2, 2, 2, 2], answer


def test_a_buffer_in_use_is_not_taken():
    memory = SharedMemory(ONE_RANK, torch.device("cpu"))
    group = mock.Mock()
    with (
        mock.patch.object(memory, "_allocated", lambda _, nbytes: [torch.empty(nbytes)]),
        mock.patch.object(copies.dist, "all_reduce"),
    ):
        first = memory.take(group, 5000)
        second = memory.take(group, 100)
        assert first is not second
        memory.release(second)
        assert memory.take(group, 100) is not second  # no barrier has followed the release
        memory.barrier(group)
        assert memory.take(group, 100) is second


def test_sizes_of_buffers():
    sizes = [copies._rounded(n) for n in (0, 1, 5000, 2**20, 2**20 + 1, 2**21 - 1)]
    assert sizes == [4096, 4096, 5120, 2**20, 2**20 + 2**16, 2**21]


def refused(rank: int) -> tuple[str, bool]:
    with pytest.raises(ValueError, match="transport must be") as error:
        Copies()
    return str(error.value), Copies.where_possible() is None


def test_copies_that_are_not_possible_are_refused_on_every_rank(ranks):
    expected = "transport must be None, because rank 0: the device is cpu, not a GPU"
    for answer in ranks.run(refused):
        assert answer == (expected, True), answer


def test_one_process_has_no_copies():
    assert Copies.where_possible() is None
    with pytest.raises(ValueError, match=r"group must be a process group, got None: torch.dist"):
        Copies()


def refused_calls(rank: int) -> list[str]:
    """The errors of calls with copies that are not those of the call, or not of all its ranks."""
    plan = make_plan(masks.causal()(64, 16), dist.get_world_size())
    own = torch.randn(3, 1, 2, len(plan.positions(rank)), 16).unbind()
    every = [*range(dist.get_world_size())]
    with copies_of_files():
        one, two, other = Copies(), Copies(), Copies(dist.new_group(every))
        errors = []
        for transport in (other, (one, two)[rank % 2], (one, None)[rank % 2], "nvlink"):
            try:
                context_parallel_attention(*own, plan, transport=transport)
            except (TypeError, ValueError) as error:
                errors.append(str(error))
    with mock.patch.object(one, "device", torch.device("meta")):
        try:
            context_parallel_attention(*own, plan, transport=one, check=True)
        except ValueError as error:
            errors.append(str(error))
    return errors


def test_copies_of_other_ranks_are_refused_on_every_rank(ranks):
    for answer in ranks.run(refused_calls):
        assert isinstance(answer, list), answer
        another, differ, none, unknown, device = answer
        assert "transport must be made for the group of the call, got another one" in another
        assert "transport must be equal on all ranks, got Copies(" in differ
        assert none.endswith("and None on rank 1")
        assert "transport must be Copies or None, got 'nvlink'" in unknown
        assert "transport must be made for cpu, got one for meta" in device


def refused_later(rank: int) -> str:
    """The error of a call with one of two objects that all ranks have used, another on rank 1."""
    plan = make_plan(masks.causal()(64, 16), dist.get_world_size())
    own = torch.randn(3, 1, 2, len(plan.positions(rank)), 16).unbind()
    with copies_of_files():
        used = Copies(), Copies()
        for transport in (*used, *used, used[rank == 1]):
            try:
                context_parallel_attention(*own, plan, transport=transport)
            except ValueError as error:
                return str(error)
    return "nothing"


def test_other_copies_in_a_later_call_are_refused_on_every_rank(ranks):
    for answer in ranks.run(refused_later):
        assert answer.startswith("transport must be equal on all ranks, got Copies("), answer


def shared_heads(rank: int) -> list[int]:
    """Buffers of ranks that divide heads: those of each head are of its own group."""
    mesh = init_device_mesh("cpu", (2, 2))
    plan = make_plan(masks.causal()(64, 16), 2)
    half = plan.shard(torch.ones(3, 1, 2, 64, 16), rank // 2, 3).tensor_split(2, 3)[rank % 2]
    with copies_of_files():
        transport = Copies(mesh.get_group(0))
        for _ in range(2):
            context_parallel_attention(*half, plan, group=mesh, transport=transport)
    return [transport.nbytes]


def test_ranks_that_divide_heads_copy_along_the_sequence(four_ranks):
    for answer in four_ranks.run(shared_heads):
        assert answer[0] > 0, answer


HERE = (("a", "1"), ("pid:[1]", "/tmp"))  # a host and a container
GPUS = ["GPU-0", "GPU-1"]


@pytest.mark.parametrize(
    ("locations", "problem"),
    [
        (
            [Location(*HERE, 0, "GPU-0"), Location(("b", "2"), HERE[1], 1, "GPU-1")],
            "the ranks are on 2 hosts",
        ),
        (
            [Location(*HERE, 0, "GPU-0"), Location(HERE[0], ("pid:[2]", "/tmp"), 1, "GPU-1")],
            "the ranks are in several containers, or have several folders for temporary files, so "
            "that they cannot map the memory of each other",
        ),
        (
            [Location(*HERE, 0, "GPU-0"), Location(*HERE, 0, "GPU-1")],
            "several ranks have a GPU of the same index; each must see the GPUs of all",
        ),
        (
            [Location(*HERE, 0, "GPU-0"), "the GPU is not from NVIDIA"],
            "rank 1: the GPU is not from NVIDIA",
        ),
        (  # as many as are visible here, but the other rank sees more
            [Location(*HERE, 0, "GPU-0"), Location(*HERE, 2, "GPU-2")],
            "rank 0: the GPU that another rank has as cuda:2 is not visible as such",
        ),
        (  # CUDA_VISIBLE_DEVICES of the other rank has another order
            [Location(*HERE, 0, "GPU-0"), Location(*HERE, 1, "GPU-2")],
            "rank 0: the GPU that another rank has as cuda:1 is not visible as such",
        ),
        (
            [Location(*HERE, 0, "GPU-0"), Location(*HERE, 1, "GPU-1")],
            "rank 0: its GPU cannot read the memory of cuda:1",
        ),
    ],
)
def test_ranks_that_cannot_copy(monkeypatch, locations, problem):
    """Rank 0 sees two GPUs, which cannot read the memory of each other."""
    asked = []

    def all_gather_object(answers, own, group):
        asked.append(own)
        answers[:] = locations if len(asked) == 1 else [own, None]

    monkeypatch.setattr(copies.dist, "all_gather_object", all_gather_object)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(GPUS))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: False)
    monkeypatch.setattr(copies, "_uuid", lambda number: GPUS[number])
    group = mock.Mock(size=lambda: 2)
    assert copies.refusal(group, torch.device("cuda", 0)) == problem
    assert isinstance(asked[0], Location)


def test_folders_in_which_sockets_cannot_be_made(monkeypatch, tmp_path):
    monkeypatch.setattr(copies, "_uuid", lambda number: GPUS[number])
    cuda = torch.device("cuda", 1)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    found = copies._location(cuda)
    assert isinstance(found, Location)
    assert found.number == 1
    assert str(tmp_path) in found.container
    (tmp_path / (91 * "a")).mkdir()  # the name of a socket in it would be too long
    for folder in (tmp_path / "missing", tmp_path / (91 * "a")):
        monkeypatch.setenv("TMPDIR", str(folder))
        assert "sockets cannot be made in the folder" in str(copies._location(cuda))


def test_symmetric_memory_of_another_backend_is_refused(monkeypatch):
    """It has other ways to map the memory of a rank, which copies do not know."""
    monkeypatch.setattr(copies, "_uuid", lambda number: GPUS[number])
    for backend in ("CUDA", None):
        monkeypatch.setattr(copies, "_backend", lambda _, found=backend: found)
        assert isinstance(copies._location(torch.device("cuda", 1)), Location)
    monkeypatch.setattr(copies, "_backend", lambda _: "NVSHMEM")
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def all_gather_object(answers, own, group):
        answers[:] = [own, own]

    monkeypatch.setattr(copies.dist, "all_gather_object", all_gather_object)
    group = mock.Mock(size=lambda: 2)
    problem = copies.refusal(group, torch.device("cuda", 1))
    assert problem.startswith("rank 0: symmetric memory of torch has the backend NVSHMEM, and")


def test_each_stream_has_its_own_buffers(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(copies, "SharedMemory", lambda *_: mock.Mock())
    stream = mock.Mock()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    transport, found = copies_of(mock.Mock(), torch.device("cuda", 0)), []
    for stream.cuda_stream in (1, 2, 1):
        found.append(transport.memory)
    assert found[0] is found[2] is not found[1]


def trained_after_inference(rank: int) -> list[bool]:
    plan = make_plan(masks.causal()(64, 16), dist.get_world_size())
    results = []
    for _ in range(2):
        own = torch.ones(3, 1, 2, len(plan.positions(rank)), 16, requires_grad=True)
        with torch.inference_mode():
            expected = context_parallel_attention(*own.unbind(), plan)
        out = context_parallel_attention(*own.unbind(), plan)
        out.sum().backward()
        results.append(torch.equal(out, expected) and own.grad is not None)
    return results


def test_buffers_of_inference_serve_training(ranks):
    """Tensors that are made in inference mode cannot be written outside it."""
    for answer in ranks.run(with_copies, trained_after_inference):
        assert answer == [True, True], answer


def freed_with_the_copies(rank: int) -> list[bool]:
    """Whether buffers are freed: with the copies in use, and when nothing refers to them.

    At once, not when Python looks for cycles of references.
    """
    plan = make_plan(masks.causal()(64, 16), dist.get_world_size())
    own = torch.ones(3, 1, 2, len(plan.positions(rank)), 16, requires_grad=True)
    with copies_of_files():
        transport = Copies()
        out = context_parallel_attention(*own.unbind(), plan, transport=transport)
        memories = [weakref.ref(transport.memory)]
        with captured(), torch.no_grad():
            context_parallel_attention(*own.unbind(), plan, transport=transport)
            memories.append(weakref.ref(transport.memory))
        del transport
        found = [each() is None for each in memories]  # the backward pass needs them
        out.sum().backward()
        del out
    return [*found, *(each() is None for each in memories)]


def test_a_plan_does_not_keep_the_buffers_of_copies(ranks):
    for answer in ranks.run(freed_with_the_copies):
        assert answer == [False, False, True, True], answer


def test_a_replaced_buffer_is_freed_before_its_successor_is_allocated():
    memory, group, made, alive = SharedMemory(ONE_RANK, torch.device("cpu")), mock.Mock(), [], []

    def allocated(_, nbytes: int) -> list[torch.Tensor]:
        alive.append(sum(each() is not None for each in made))
        found = torch.empty(nbytes, dtype=torch.uint8)
        made.append(weakref.ref(found))
        return [found]

    with mock.patch.object(memory, "_allocated", allocated), mock.patch.object(copies, "dist"):
        for nbytes in (5000, 9000, 20000):
            memory.release(memory.take(group, nbytes))
            memory.barrier(group)
    assert alive == [0, 0, 0]


def test_what_is_copied_is_kept_until_the_copies_are_waited_for():
    """As if an error ended the pass: the memory must not be that of another tensor yet."""
    memory = SharedMemory(ONE_RANK, torch.device("cpu"))
    pairs = [(torch.ones(4), torch.ones(4))]
    freed = [StorageWeakRef(each.untyped_storage()).expired for each in pairs[0]]
    memory.copy([*pairs])
    pairs.clear()
    assert not any(each() for each in freed)
    later = memory.copy([])
    memory.wait(later)
    assert all(each() for each in freed)


def test_an_exchange_does_not_wait_for_copies_of_later_ones(monkeypatch):
    """Groups of heads are fetched one after another, each while the one before is computed."""
    current, copying = mock.Mock(), mock.Mock()
    copying.record_event.side_effect = ["first", "second"]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    memory = SharedMemory(ONE_RANK, torch.device("cpu"))
    memory._copying = copying
    first, second = memory.copy([]), memory.copy([])
    for each in (second, first):
        memory.wait(each)
    assert current.mock_calls == [mock.call.wait_event("second"), mock.call.wait_event("first")]
    assert copying.wait_stream.mock_calls == 2 * [mock.call(current)]


def test_a_buffer_is_allocated_again_if_the_caching_allocator_held_all_memory(monkeypatch):
    from torch.distributed import _symmetric_memory as symmetric

    called = []

    def empty(nbytes, **_):
        called.append("empty")
        if called == ["empty"]:
            raise RuntimeError("CUDA driver error: out of memory")
        return torch.empty(nbytes, dtype=torch.uint8)

    monkeypatch.setattr(symmetric, "empty", empty)
    monkeypatch.setattr(symmetric, "rendezvous", mock.Mock())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: called.append("empty_cache"))
    memory = SharedMemory(ONE_RANK, torch.device("cpu"))
    assert memory.take(ONE_RANK, 5000).nbytes == 5120
    assert called == ["empty", "empty_cache", "empty"]
