"""Exchanges between the GPUs of one host by copy engines, which leave multiprocessors to kernels.

The kernel of an all-to-all of NCCL needs multiprocessors. If a kernel of attention runs on all of
them, each of the two delays the other. The copy engines of a GPU need none, so a copy and a kernel
run side by side. A rank copies from and to memory of the other ranks that it has mapped: a
`Buffer`. An exchange has two forms, and each needs one barrier, a tiny all-reduce for which the
current stream waits:

    pulled    the sender writes rows to its buffer | barrier | each receiver copies them
    pushed    the sender copies rows to the buffers of receivers | barrier | they are read there

Buffers are used again, so what must remain after the exchange is pulled. The barrier of a pushed
exchange comes last, so that a push can be overlapped with kernels although ranks start it at
different times.

A rank releases a buffer when it has launched its last read of that exchange. So a buffer is free
after the first barrier that follows its release. All ranks start exchanges, and wait for them, in
the same order, so that they choose the same buffer without communication.

A CUDA graph always uses the buffers that were chosen when it was captured. Only captured passes
use them, and each of these begins with a barrier. So all of them are free then, whatever was
replayed before, and in which order.
"""

import os
import secrets
import socket
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from masks._core.grid import is_captured
from sparseflash.distributed.exchange import Exchange, Splits, Transport, explain_errors
from sparseflash.distributed.transport import Group, group_or_world

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PROCESSES = Path("/proc/self/ns/pid")  # a link to the namespace of process ids
# Symmetric memory of torch sends handles by sockets in the first of these folders that is set. The
# name of a socket ends with the process id, and has 107 characters at most.
TEMPORARY = ("TMPDIR", "TMP", "TEMP", "TEMPDIR")
MAX_FOLDER = 107 - len("/symm_mem-4194304")
# A larger buffer than needed is also large enough for the next, slightly longer sequence.
SIZES_OF_AN_OCTAVE = 16


@dataclass(eq=False)
class Buffer:
    """Memory of equal size on each rank, which all ranks of a group have mapped.

    Attributes:
        of_ranks: uint8 (bytes,): the memory of each rank.
        released: Number of barriers before the buffer was released; None if it is in use.
    """

    of_ranks: list[Tensor]
    released: int | None = -1

    @property
    def nbytes(self) -> int:
        return self.of_ranks[0].nbytes


@dataclass(eq=False)
class Launched:
    """Copies of one exchange.

    Attributes:
        pairs: (to, from) of each copy. They are referred to until the current stream waits: if an
            error ends the pass before, their memory must not be used again yet.
        end: When they have ended; None without a GPU.
    """

    pairs: list[tuple[Tensor, Tensor]]
    end: torch.Event | None


class SharedMemory:
    """The buffers of a group on one stream of a device, and the stream of its copies.

    Args:
        group: The ranks.
        device: The device of this rank.
        lenders: For captured passes, during which nothing can be allocated: the memories of other
            passes, which lend their free buffers. None to allocate new ones.
    """

    def __init__(
        self,
        group: ProcessGroup,
        device: torch.device,
        lenders: "Mapping[Any, SharedMemory] | None" = None,
    ):
        self.device, self.rank, self._lenders = device, group.rank(), lenders
        self._buffers: list[Buffer] = []
        self._barriers = 0
        self._launched: list[Launched] = []
        self._arrived = torch.zeros(1, dtype=torch.int32, device=device)
        self._copying = torch.cuda.Stream(device) if device.type == "cuda" else None

    def take(self, group: ProcessGroup, nbytes: int) -> Buffer:
        """A free buffer of at least `nbytes` bytes, the smallest, or a new one."""
        free = [x for x in self._buffers if x.released is not None and x.released < self._barriers]
        large = [x for x in free if x.nbytes >= nbytes]
        if self._lenders is not None:
            found = self._found_in_capture(group, nbytes)
        elif large:
            found = min(large, key=lambda x: x.nbytes)
        else:
            if free:  # they are replaced by the new one
                with explain_errors("its buffers"):
                    self.barrier(group)
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
                self._buffers = [x for x in self._buffers if x not in free]
                free.clear()  # their memory is not needed beside the new one
            with torch.inference_mode(False):  # later calls may be of training
                found = Buffer(self._allocated(group, _rounded(nbytes)))
            self._buffers.append(found)
        found.released = None
        return found

    def _found_in_capture(self, group: ProcessGroup, nbytes: int) -> Buffer:
        """The smallest large enough buffer that is not in use, if need be after a barrier.

        A larger one may be the only one for a later exchange. Of equal ones it is a free one, then
        one of a lender, which does not use it any more.
        """
        lenders = (self._lenders or {}).values()
        own, lent = (
            [x for each in memories for x in each._buffers if x.released is not None]
            for memories in ([self], lenders)
        )
        free = [x for x in own if x.released != self._barriers]
        large = [x for x in (*free, *lent, *own) if x.nbytes >= nbytes]
        if not large:
            raise RuntimeError(
                f"transport has no buffer of {nbytes} bytes for a pass that is captured in a CUDA "
                "graph: each pass must run with the same Copies before it is captured, and again "
                "before it is captured on another stream"
            )
        found = min(large, key=lambda x: x.nbytes)
        if found in lent:
            for each in lenders:
                each._buffers = [x for x in each._buffers if x is not found]
            self._buffers.append(found)
        elif found not in free:
            with explain_errors("its buffers"):
                self.barrier(group)
        return found

    def begin_captured_pass(self, group: ProcessGroup) -> None:
        """Frees all buffers, also those of a pass whose capture failed, which never runs."""
        for each in self._buffers:
            self.release(each)
        self._launched.clear()
        self.barrier(group)

    def release(self, buffer: Buffer) -> None:
        """Says that this rank has launched all of its reads of a buffer."""
        buffer.released = self._barriers

    def barrier(self, group: ProcessGroup) -> None:
        """The current stream waits until those of all ranks come here."""
        # Asynchronous, so that NCCL runs it on the stream of the other exchanges, after those. On
        # the current stream it could run beside that of shared rows, with the same communicator.
        work = dist.all_reduce(self._arrived, op=dist.ReduceOp.MAX, group=group, async_op=True)
        cast(dist.Work, work).wait()
        self._barriers += 1

    def copy(self, pairs: list[tuple[Tensor, Tensor]]) -> Launched:
        """Copies (to, from) beside the current stream, after what that has launched."""
        if self._copying is None:
            context = nullcontext()
        else:
            self._copying.wait_stream(torch.cuda.current_stream(self.device))
            context = torch.cuda.stream(self._copying)
        launched = Launched(pairs, None)
        self._launched.append(launched)
        with context:
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        if self._copying is not None:
            launched.end = self._copying.record_event()
        return launched

    def wait(self, launched: Launched) -> None:
        """The current stream waits for these copies, which follow those that began earlier.

        It does not wait for later ones: those of the next heads run beside attention.
        """
        if launched.end is not None:
            torch.cuda.current_stream(self.device).wait_event(launched.end)
        if launched in self._launched:  # else later ones have already been waited for
            del self._launched[: self._launched.index(launched) + 1]

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers of this rank. The statistics of torch.cuda do not count them."""
        return sum(x.nbytes for x in self._buffers)

    def _allocated(self, group: ProcessGroup, nbytes: int) -> list[Tensor]:
        """New memory of all ranks."""
        import torch.distributed._symmetric_memory as symmetric

        try:
            own = symmetric.empty(nbytes, dtype=torch.uint8, device=self.device)
        except RuntimeError:
            # It is not memory of the caching allocator, which may hold all that is left.
            torch.cuda.empty_cache()
            own = symmetric.empty(nbytes, dtype=torch.uint8, device=self.device)
        # torch fills new memory with zeros, which must not follow what another rank pushes to it.
        torch.cuda.synchronize(self.device)
        with explain_errors("its buffers"):
            handle = symmetric.rendezvous(own, group)
        return [
            own if rank == self.rank else handle.get_buffer(rank, (nbytes,), torch.uint8)
            for rank in range(group.size())
        ]


class _Copied(Exchange):
    """What pulled and pushed exchanges have in common."""

    def __init__(self, copies: "Copies", splits: Splits, like: Tensor, elements: int, what: str):
        self._group, self._memory, self._what = copies.group, copies.memory, what
        self._splits, self._like, self._elements = splits, like, elements

    def _take(self) -> None:
        """Takes a buffer for the rows that the rank with most of them sends or receives."""
        nbytes = self._most_rows() * self._elements * self._like.element_size()
        self._buffer = self._memory.take(self._group, nbytes)

    @abstractmethod
    def _most_rows(self) -> int:
        """The number of rows in the buffer of the rank that has most."""

    def _part(self, rank: int, first: int, count: int) -> Tensor:
        """Some rows in the buffer of a rank."""
        size = self._elements * self._like.element_size()
        memory = self._buffer.of_ranks[rank][first * size : (first + count) * size]
        return memory.view(self._like.dtype).view(count, self._elements)

    def _others(self) -> list[int]:
        """The other ranks from the next one on, so that not all use the same one at a time."""
        rank, ranks = self._splits.rank, len(self._splits.counts)
        return [(rank + distance) % ranks for distance in range(1, ranks)]


class _Pulled(_Copied):
    """Rows in the buffer of their sender, which the receivers copy."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._take()
        self.rows = self._part(self._splits.rank, 0, sum(self._splits.send))

    def _most_rows(self) -> int:
        return self._splits.most_sent

    def start(self) -> None:
        splits = self._splits
        self._received = self._like.new_empty(sum(splits.receive), self._elements)
        with explain_errors(self._what):
            self._memory.barrier(self._group)
        parts, pairs = self._received.split(splits.receive), []
        for sender in self._others():
            first = sum(splits.counts[sender][: splits.rank])
            pairs.append((parts[sender], self._part(sender, first, splits.receive[sender])))
        self._launched = self._memory.copy(pairs)

    def wait(self) -> Tensor:
        self._memory.wait(self._launched)
        self._memory.release(self._buffer)
        received = self._received
        del self.rows, self._received, self._buffer, self._launched
        return received

    def release(self) -> None:
        pass  # the received rows are not in a buffer


class _Pushed(_Copied):
    """Rows that their sender copies to the buffers of the receivers, where they are read."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.rows = self._like.new_empty(sum(self._splits.send), self._elements)

    def _most_rows(self) -> int:
        return self._splits.back.most_sent

    def start(self) -> None:
        self._take()
        splits = self._splits
        parts, pairs = self.rows.split(splits.send), []
        for receiver in self._others():
            first = sum(of_sender[receiver] for of_sender in splits.counts[: splits.rank])
            pairs.append((self._part(receiver, first, splits.send[receiver]), parts[receiver]))
        self._launched = self._memory.copy(pairs)

    def wait(self) -> Tensor:
        self._memory.wait(self._launched)
        with explain_errors(self._what):
            self._memory.barrier(self._group)
        del self.rows, self._launched
        return self._part(self._splits.rank, 0, sum(self._splits.receive))

    def release(self) -> None:
        self._memory.release(self._buffer)
        del self._buffer


class Copies(Transport):
    """Copies between the ranks of a group, all of which are GPUs of one host.

    Pass one object as `transport` to all calls of a group: of all layers, masks and plans. It has
    buffers, about twice what the rank that sends most sends at a time, which the statistics of
    torch.cuda do not count. Each stream has its own, so all ranks must divide calls among streams
    in the same way. The buffers live as long as the object, to which calls and the autograd graphs
    of their results refer, but no plans and no CUDA graphs.

    Passes that are captured in a CUDA graph take over buffers of passes that ran before, and keep
    them for all graphs that are captured on the same stream. The object must live as long as the
    graphs, and all ranks must capture and replay them in the same order, one after another. If a
    capture fails on some ranks only, all must make a new object, or call `free`.

    All ranks of the group must make the object, which waits for the device.

    Args:
        group: The ranks, as a process group or a mesh of one dimension; by default all processes.
            If heads are divided among ranks, the first dimension of that mesh: mesh.get_group(0).
        device: Device of the tensors of this rank; by default the current GPU.

    Raises:
        TypeError: `group` has another type.
        ValueError: The ranks cannot copy, and why; the same on every rank. Or there is no group.
        RuntimeError: Another rank died or did not answer within the time-out of the group.
    """

    several_at_once = True

    def __init__(self, group: Group = None, device: torch.device | str | None = None):
        found = group_or_world(group)
        if found is None:
            raise ValueError(
                "group must be a process group, got None: torch.distributed.init_process_group "
                "has not been called"
            )
        self.group, self.device = found, _device(device)
        if (problem := refusal(found, self.device)) is not None:
            raise ValueError(f"transport must be None, because {problem}")
        # By it ranks check that they pass the same object to a call.
        self.number: str = _of_all_ranks(found, self.device, secrets.token_hex(4))[0]
        # By stream: of passes that Python calls, and of those that are captured in a CUDA graph.
        self._of_streams: dict[int, SharedMemory] = {}
        self._of_captured: dict[int, SharedMemory] = {}

    @staticmethod
    def where_possible(
        group: Group = None, device: torch.device | str | None = None
    ) -> "Copies | None":
        """Copies, or None if the ranks cannot copy; the same on every rank.

        Without a transport calls exchange by all-to-alls, so both can be passed to them.

        Args:
            group: As in Copies; None is returned if torch.distributed is not initialised.
            device: As in Copies.

        Returns:
            A new object, or None.

        Raises:
            TypeError: `group` has another type.
            RuntimeError: Another rank died or did not answer within the time-out of the group.
        """
        found = group_or_world(group)
        if found is None or refusal(found, _device(device)) is not None:
            return None
        return Copies(found, device)

    @property
    def memory(self) -> SharedMemory:
        """The buffers of the current stream, which the work of other streams does not touch."""
        stream = 0
        if self.device.type == "cuda":
            stream = torch.cuda.current_stream(self.device).cuda_stream
        captured = is_captured(self.device)
        of_streams = self._of_captured if captured else self._of_streams
        if stream not in of_streams:
            lenders = self._of_streams if captured else None
            of_streams[stream] = SharedMemory(self.group, self.device, lenders)
        return of_streams[stream]

    def begin_pass(self) -> None:
        """Frees all buffers of captured passes, at the beginning of one.

        What a graph that is replayed before it reads last is not known while it is captured.
        """
        if is_captured(self.device):
            with explain_errors("that a pass begins"):
                self.memory.begin_captured_pass(self.group)

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers of this rank."""
        return sum(x.nbytes for x in (*self._of_streams.values(), *self._of_captured.values()))

    def free(self) -> None:
        """Frees the buffers; the next exchange allocates new ones.

        All ranks of the group must call it, without a pass in progress. It waits for the device.
        CUDA graphs that were captured with the object must not be replayed afterwards.
        If an error ended a pass on all ranks, it also frees the buffers of that pass, which would
        otherwise not be used again.

        Raises:
            RuntimeError: Another rank died or did not answer within the time-out of the group.
        """
        freed = self._of_streams, self._of_captured
        self._of_streams, self._of_captured = {}, {}
        if not any(freed):  # on all ranks
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        with explain_errors("that they free their buffers"):
            dist.barrier(self.group)  # no rank reads them any more

    def check(self, group: ProcessGroup | None, device: torch.device) -> None:
        """Raises ValueError if tensors on a device cannot be copied between these ranks."""
        if group is not self.group:
            raise ValueError("transport must be made for the group of the call, got another one")
        if device != self.device:
            raise ValueError(f"transport must be made for {device}, got one for {self.device}")

    def pulled(self, splits: Splits, like: Tensor, elements: int, what: str) -> Exchange:
        return _Pulled(self, splits, like, elements, what)

    def pushed(self, splits: Splits, like: Tensor, elements: int, what: str) -> Exchange:
        return _Pushed(self, splits, like, elements, what)

    def __repr__(self) -> str:
        return f"Copies({self.number}, ranks={self.group.size()}, device={self.device})"


def _device(device: torch.device | str | None) -> torch.device:
    """A device with its index; by default the current GPU."""
    found = torch.device(
        ("cuda" if torch.cuda.is_available() else "cpu") if device is None else device
    )
    return torch.device("cuda", _index(found)) if found.type == "cuda" else found


class Location(NamedTuple):
    """Where a rank runs.

    Attributes:
        host: Name and boot of the host.
        container: What processes must share to send each other handles of memory: the namespace
            of process ids, and a folder for sockets.
        number: Number of the GPU, as this process counts.
        uuid: What identifies the GPU in every process.
    """

    host: tuple[str, str]
    container: tuple[str, ...]
    number: int
    uuid: str


def refusal(group: ProcessGroup, device: torch.device) -> str | None:
    """Why the ranks of a group cannot copy from each other; None if they can.

    All ranks must call it, and all get the same answer.
    """
    answers = _of_all_ranks(group, device, _location(device))
    if (problem := _first_problem(answers)) is not None:
        return problem
    if (hosts := len({each.host for each in answers})) > 1:
        return f"the ranks are on {hosts} hosts"
    if len({each.container for each in answers}) > 1:
        return (
            "the ranks are in several containers, or have several folders for temporary files, "
            "so that they cannot map the memory of each other"
        )
    if len({each.number for each in answers}) < len(answers):
        return "several ranks have a GPU of the same index; each must see the GPUs of all"
    return _first_problem(_of_all_ranks(group, device, _unreachable(device, answers)))


def _of_all_ranks(group: ProcessGroup, device: torch.device, own: Any) -> list[Any]:
    """The answers of all ranks, in the order of ranks."""
    answers: list[Any] = [None] * group.size()
    # A process group of NCCL sends objects by the current device, which may be another one.
    current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with current, explain_errors("their devices"):
        dist.all_gather_object(answers, own, group=group)
    return answers


def _first_problem(answers: list[Any]) -> str | None:
    """The first answer that is a text, with its rank."""
    problems = (f"rank {r}: {each}" for r, each in enumerate(answers) if isinstance(each, str))
    return next(problems, None)


def _unreachable(device: torch.device, locations: list[Location]) -> str | None:
    """Why this rank cannot read the memory of another one; None if it can read that of all."""
    for other in locations:
        if other.number >= torch.cuda.device_count() or _uuid(other.number) != other.uuid:
            return f"the GPU that another rank has as cuda:{other.number} is not visible as such"
        if other.number != _index(device) and not torch.cuda.can_device_access_peer(
            _index(device), other.number
        ):
            return f"its GPU cannot read the memory of cuda:{other.number}"
    return None


def _location(device: torch.device) -> Location | str:
    """Where this rank runs; or why its memory cannot be mapped by other processes."""
    if device.type != "cuda":
        return f"the device is {device}, not a GPU"
    if torch.version.hip is not None:
        return "the GPU is not from NVIDIA"
    if (backend := _backend(device)) not in ("CUDA", None):
        return (
            f"symmetric memory of torch has the backend {backend}, and copies need CUDA, which "
            "the environment variable TORCH_SYMMMEM or set_backend selects"
        )
    folder = next((os.environ[name] for name in TEMPORARY if name in os.environ), "/tmp")
    if len(folder) > MAX_FOLDER or not os.access(folder, os.W_OK):
        return f"sockets cannot be made in the folder {folder!r} of temporary files"
    boot = BOOT_ID.read_text().strip() if BOOT_ID.exists() else ""
    try:
        processes = str(PROCESSES.readlink())
    except OSError:  # not every system shows it
        processes = ""
    found, number = Path(folder).stat(), _index(device)
    container = processes, folder, str(found.st_dev), str(found.st_ino)
    return Location((socket.gethostname(), boot), container, number, _uuid(number))


def _backend(device: torch.device) -> str | None:
    """The backend of symmetric memory; None if torch does not say."""
    import torch.distributed._symmetric_memory as symmetric

    return symmetric.get_backend(device)


def _uuid(number: int) -> str:
    return str(torch.cuda.get_device_properties(number).uuid)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _rounded(nbytes: int) -> int:
    """The next of SIZES_OF_AN_OCTAVE sizes between a power of two and the next one."""
    step = max(1, 2 ** (max(nbytes, 1).bit_length() - 1) // SIZES_OF_AN_OCTAVE)
    return max(-(-nbytes // step) * step, 1 << 12)
