"""The comparison of the arguments of all ranks, in full and by one number.

A call in which a rank has another plan, option or size would exchange rows that the others do not
expect: it would wait for ever, or compute wrong results. So ranks compare their arguments before
they exchange anything. The first call with a plan and its options compares them in full, by name,
which waits for the device. Each later call compares one number, a digest of the same properties:

    max over ranks of number = min over ranks of number

The number of a call that needs the full comparison is NEW, and that of invalid arguments INVALID.
So ranks of which only some compare in full, or raise an error, find that they disagree. On a CPU
all then compare in full, which says what differs. On a GPU the host does not wait for the answer:
a device-side assertion ends all ranks.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import blake2b
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from masks._core.grid import is_captured
from sparseflash.distributed.capture import check_not_captured
from sparseflash.distributed.exchange import explain_errors

NEW, INVALID = -1, -2
LOW_BITS = 2**60 - 1  # two such numbers can be added in int64
# Odd numbers of 63 bits with about as many ones as zeros in binary.
OF_LENGTHS, OF_ELEMENTS = 0x5851F42D4C957F2D, 0x14057B7EF767814F
DISAGREEMENT = (
    "context_parallel_attention: plans, options, sizes or key lengths differ between ranks, or "
    "those of one rank are invalid; check=True reports which"
)


class Comparison:
    """The comparison of one call on all ranks.

    Args:
        group: The ranks.
        heads_group: The ranks among which heads are divided, if they are.
        tensors: query, key and value of this rank, which may be invalid.
        check: As in context_parallel_attention.
    """

    def __init__(
        self,
        group: ProcessGroup,
        heads_group: ProcessGroup | None,
        tensors: Sequence[object],
        check: bool | None,
    ):
        self._group, self._heads_group, self._check = group, heads_group, check
        self._tensors = tensors
        self._captured = any(isinstance(x, Tensor) and is_captured(x.device) for x in tensors)

    def compare_numbers(
        self, number: int | None, lengths: Tensor | None = None, valid: bool = True
    ) -> bool:
        """Compares numbers; returns whether all ranks must compare in full, the same on each.

        Args:
            number: The number of the call; None if ranks have not compared such a call in full.
            lengths: Its key lengths (batch,), if it has any.
            valid: Whether the arguments of this rank are valid.

        Raises:
            RuntimeError: A valid call is captured that must be compared in full; or another rank
                died or did not answer within the time-out of the group.
        """
        in_full = number is None if self._check is None else self._check
        if self._captured:
            query = self._tensors[0]
            if in_full and valid and isinstance(query, Tensor):
                check_not_captured(query.device)
            return False  # the rank alone raises the error of invalid arguments
        if self._check is False:
            return False
        if in_full or number is None:
            number, lengths = NEW, None
        elif not valid:
            number, lengths = INVALID, None
        groups = [x for x in (self._heads_group, self._group) if x is not None]
        device = _device_of(self._group, self._tensors)
        return not numbers_agree(groups, device, number, lengths) or in_full

    def compare_in_full(
        self,
        facts: Mapping[str, Any],
        problem: str | None,
        of_ranks: Mapping[str, Any] | None = None,
    ) -> None:
        """Compares in full; raises ValueError on all ranks if they differ.

        Along both dimensions of a mesh, so that every rank raises the error of any rank.

        Args:
            facts: Values that must be equal on all ranks, by name.
            problem: An error of this rank; None if its arguments are valid.
            of_ranks: What must be equal on the ranks of `group` alone, which have the same heads.

        Raises:
            ValueError: The errors of all ranks, or the first difference, the same on every rank.
            RuntimeError: A rank did not answer.
        """
        if self._heads_group is not None:
            problem = _disagreement(self._heads_group, facts, problem)
        message = _disagreement(self._group, {**(of_ranks or {}), **facts}, problem)
        if message is not None:
            raise ValueError(message)


def number_of(facts: Mapping[str, Any]) -> int:
    """A number of 60 bits, a digest: equal for equal facts, and for others with chance 2^-60."""
    digest = blake2b(repr(tuple(facts.items())).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") & LOW_BITS


def with_seed(number: int, seed: int) -> int:
    """The number of a call with a seed of dropout, which has 64 bits."""
    return number_of({"number": number, "seed": seed})


def numbers_agree(
    groups: Sequence[ProcessGroup],
    device: torch.device,
    number: int,
    lengths: Tensor | None = None,
) -> bool:
    """Compares the numbers and key lengths of all ranks of a mesh with these groups.

    Args:
        groups: The group of this rank along each dimension of the mesh.
        device: Device of the tensors that the groups exchange.
        number: The number of the call.
        lengths: Its key lengths (batch,) if they are compared.

    Returns:
        Whether all agree, the same on every rank. On a GPU always True: if ranks disagree, the
        device raises DISAGREEMENT on all of them, at the latest when the host waits for it.

    Raises:
        RuntimeError: Another rank died or did not answer within the time-out of the group.
    """
    if all(group.size() == 1 for group in groups):
        return True
    if device.type != "cuda":
        both = _both(device, number, lengths)
        _maximum(groups, both)
        return bool(both.sum() == 0)
    # On a stream of its own, so that no kernel of attention waits for the assertion.
    beside, current = _stream(device), torch.cuda.current_stream(device)
    beside.wait_stream(current)
    with torch.cuda.stream(beside):
        both = _both(device, number, lengths)
        _maximum(groups, both)
        # The exchange of keys runs after this one. If attention to own keys did not wait for this
        # one, too, it would occupy all multiprocessors before the exchange of keys does.
        current.wait_stream(beside)
        torch.ops.aten._assert_async.msg(both.sum() == 0, DISAGREEMENT)
    return True


def _both(device: torch.device, number: int, lengths: Tensor | None) -> Tensor:
    """The number of the call with its key lengths, and its negative, int64 (2,)."""
    if lengths is None:  # a scalar is an argument of the kernel, for which the host does not wait
        return _signs(device) * number
    return _signs(device) * (_hash(lengths.to(device, torch.int64)) + number)


def _maximum(groups: Sequence[ProcessGroup], both: Tensor) -> None:
    """Replaces numbers by their maxima over the ranks of a mesh. The current stream waits."""
    with explain_errors("the numbers of the call"):
        for group in groups:
            # Asynchronous for the same reason as the barrier of SharedMemory.
            work = dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group, async_op=True)
            cast(dist.Work, work).wait()


@cache
def _signs(device: torch.device) -> Tensor:
    """1 and -1; the maxima of both products are the maximum, and the minimum with the sign -1."""
    with torch.inference_mode(False):
        return torch.tensor([1, -1], device=device)


def _hash(lengths: Tensor) -> Tensor:
    """A number of an int64 tensor (batch,): the sum of its elements, each with a factor.

    The factors of elements i and j differ by an odd multiple of the power of 2 in i - j. So the
    number changes if one length changes, or if two are exchanged.
    """
    factors = (torch.arange(1, len(lengths) + 1, device=lengths.device) * OF_ELEMENTS) ^ OF_LENGTHS
    return (lengths * factors).sum() & LOW_BITS


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of comparisons on a device."""
    return torch.cuda.Stream(device)


def _device_of(group: ProcessGroup, tensors: Sequence[object]) -> torch.device:
    """The device of the tensors of a call, or the one that they are likely to have on other ranks.

    All ranks must exchange their numbers on devices of one type, also one of which only some
    tensors are on a GPU, or that has got other objects.
    """
    config = (each.partition(":") for each in dist.get_backend_config(group).split(","))
    backends = {device: backend for device, _, backend in config}
    devices = [x.device for x in tensors if isinstance(x, Tensor) and x.device.type in backends]
    if devices:
        return next((each for each in devices if each.type != "cpu"), devices[0])
    return torch.device("cuda" if backends.get("cuda") == "nccl" else next(iter(backends)))


def _disagreement(
    group: ProcessGroup, values: Mapping[str, Any], problem: str | None
) -> str | None:
    """The errors of all ranks, or the first value that differs; None if all ranks agree."""
    answers: list[Any] = [None] * group.size()
    with explain_errors("its arguments"):
        dist.all_gather_object(answers, (dict(values), problem), group=group)
    problems = [f"rank {r}: {text}" for r, (_, text) in enumerate(answers) if text is not None]
    if problems:
        return "\n".join(["context_parallel_attention was refused on", *problems])
    for name, first in answers[0][0].items():
        for rank, (other, _) in enumerate(answers):
            if other[name] != first:
                return (
                    f"{name} must be equal on all ranks, got {first} on rank 0 and {other[name]} "
                    f"on rank {rank}"
                )
    return None
