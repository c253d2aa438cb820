"""Conditions of pairs, eight to a byte: tabulated ones and bitwise operations of them."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from masks._core.bit_tiles import pack_bytes

_aten = torch.ops.aten
# The operation on bytes with the result of an operation on conditions.
OPERATIONS: dict[Any, Any] = {
    _aten.bitwise_and.Tensor: torch.bitwise_and,
    _aten.bitwise_or.Tensor: torch.bitwise_or,
    _aten.bitwise_xor.Tensor: torch.bitwise_xor,
    _aten.bitwise_not.default: torch.bitwise_not,
    _aten.logical_and.default: torch.bitwise_and,
    _aten.logical_or.default: torch.bitwise_or,
    _aten.logical_xor.default: torch.bitwise_xor,
    _aten.logical_not.default: torch.bitwise_not,
}


class PackedRows:
    """Rows of conditions that overlap in one tensor, of which any eight bits can be read.

    Args:
        conditions: bool, of all rows.
        begins: int64 (rows,), where each row begins in `conditions`; (1,) if all queries read one.
        width: Most conditions that are read of a row, in bits, counted from its begin.
    """

    def __init__(self, conditions: Tensor, begins: Tensor, width: int) -> None:
        conditions = conditions.flatten()
        missing = max(0, int(begins.max()) + width - len(conditions))
        conditions = torch.nn.functional.pad(conditions, (0, missing + 15))
        # A row may begin at any bit of a byte: there is a packed copy for each that is used.
        length = (len(conditions) - 7) // 8
        shifts = torch.unique(begins % 8).tolist()
        copies = [pack_bytes(conditions[shift:][: 8 * length]) for shift in shifts]
        first = torch.zeros(8, dtype=torch.int64, device=begins.device)
        first[shifts] = torch.arange(len(shifts), device=begins.device) * length
        self._bytes, self._begins = torch.cat(copies), first[begins % 8] + begins // 8

    def read(self, rows: slice, first: Tensor, width: int) -> Tensor:
        """uint8 (rows, spans * width / 8): so many conditions from each of `first` on.

        Args:
            rows: The rows to read.
            first: int64 (spans,), multiples of 8.
            width: Conditions of a span, a multiple of 8. Past the end of a row they are arbitrary.
        """
        begins = self._begins[rows] if len(self._begins) > 1 else self._begins
        offsets = (begins[:, None] + first // 8).flatten()
        windows = self._bytes.as_strided((len(self._bytes) - width // 8 + 1, width // 8), (1, 1))
        return windows.index_select(0, offsets).view(len(begins), -1)


class PackedQueries:
    """Conditions of the query alone: bool (q_len, 1)."""

    def __init__(self, conditions: Tensor) -> None:
        self._bytes = conditions.to(torch.uint8).neg()  # all bits of a byte

    def read(self, rows: slice, _first: Tensor, _width: int) -> Tensor:
        """uint8 (rows, 1), which broadcasts."""
        return self._bytes[rows]


class PackedFunction:
    """A function of tabulated conditions, evaluated for eight pairs at a time.

    Args:
        values: The tabulated conditions, by number.
        steps: (operation on bytes, numbers of its arguments, number of its result), in order.
        output: The number of the result.
    """

    def __init__(
        self,
        values: dict[int, PackedRows | PackedQueries],
        steps: Iterable[tuple[Any, list[int], int]],
        output: int,
    ) -> None:
        self._values, self._steps, self._output = values, list(steps), output

    def pairs(self, queries: slice, first: Tensor, width: int) -> Tensor:
        """uint8 (queries, spans * width / 8): so many keys from each of `first` on."""
        values = {i: value.read(queries, first, width) for i, value in self._values.items()}
        for operation, arguments, result in self._steps:
            values[result] = operation(*(values[i] for i in arguments))
        shape = (queries.stop - queries.start, len(first) * width // 8)
        return values[self._output].expand(shape).contiguous()
