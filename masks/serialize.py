"""Saves and loads masks (safetensors with a JSON header) and patterns (also as JSON text).

Files have a version and contain no code, so loading one runs nothing. A pickle of a pattern, such
as one by torch.save of a module, contains the same JSON.
"""

import json
import operator
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from masks._core.bit_tiles import words_per_row
from masks._core.block_set import BlockSet, assemble
from masks._core.grid import Grid
from masks._core.intervals import Runs
from masks._parse import UNREADABLE, call_builtin, shortened
from masks._pattern import Pattern, stack
from masks.block_mask import BlockMask
from masks.mask_batch import MaskBatch

VERSION = 1
_DEEP = "too many levels"
MAX_PATTERNS = 10_000  # of an expression; p = (p & a) | p has twice as many in each step
HEADER = "masks"  # the key of the safetensors metadata
_MAKERS = {
    "&": operator.and_,
    "|": operator.or_,
    "-": operator.sub,
    "^": operator.xor,
    "~": operator.invert,
    "stack": stack,
    "with_block_size": Pattern.with_block_size,
    "in_blocks": Pattern.with_block_size,  # its name in files of version 1 until 2026-11
}


def save(mask: Pattern | BlockMask, path: str | Path) -> None:
    """Writes a mask or a pattern to a safetensors file.

    Args:
        mask: The mask or pattern.
        path: The file, which is overwritten if it exists.

    Raises:
        TypeError: `mask` is neither a BlockMask nor a Pattern.
        ValueError: `mask` is a pattern that to_json refuses. Its mask at a length can be saved.
        OSError: The file cannot be written.
    """
    if isinstance(mask, Pattern):
        text, tensors = to_json(mask), {}
    elif isinstance(mask, BlockMask):
        text = json.dumps({"version": VERSION} | _header(mask))
        tensors = _tensors(mask.block_set)
    else:
        hint = "; save its stacked" if isinstance(mask, MaskBatch) else ""
        raise TypeError(f"mask must be a Pattern or a BlockMask, got {type(mask).__name__}{hint}")
    try:
        save_file(tensors, path, metadata={HEADER: text})
    except SafetensorError as error:
        raise OSError(f"file {path} cannot be written: {error}") from error


def load(path: str | Path, device: torch.device | str = "cpu") -> Pattern | BlockMask:
    """Reads a mask or a pattern that `save` wrote.

    Args:
        path: The file.
        device: Device of a mask; a pattern has none.

    Returns:
        A mask or pattern that is equal to the saved one.

    Raises:
        ValueError: The file contains no valid mask or pattern, or has another version.
        OSError: The file does not exist or cannot be read.
    """
    name = f"file {path}"
    try:
        with safe_open(path, framework="pt") as file:
            header = _read_header((file.metadata() or {}).get(HEADER), name)
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        if "pattern" not in header:
            mask = BlockMask(_block_set(header, tensors))
    except ValueError:
        raise
    except (SafetensorError, *UNREADABLE) as error:
        raise ValueError(f"{name} has no mask that can be read: {error}") from error
    if "pattern" in header:
        return _read_pattern(header["pattern"], name)
    return mask.to(device)


def to_json(pattern: Pattern) -> str:
    """A pattern as JSON text, for the configuration of a model.

    Args:
        pattern: A built-in pattern or a combination of built-in patterns.

    Returns:
        Text that from_json reads.

    Raises:
        TypeError: `pattern` is not a Pattern.
        ValueError: It is a pattern of a Python function, or an expression of too many levels or of
            more than 10,000 patterns: it cannot be saved.
    """
    if not isinstance(pattern, Pattern):
        raise TypeError(f"pattern must be a Pattern, got {type(pattern).__name__}")
    try:
        return json.dumps({"version": VERSION, "pattern": _written(pattern, _Counter())})
    except RecursionError:
        raise ValueError(
            f"pattern has {_DEEP} to be saved: {shortened(pattern)}; save its mask at a length"
        ) from None


def from_json(text: str) -> Pattern:
    """The pattern that to_json wrote.

    Args:
        text: The JSON text.

    Returns:
        A pattern that is equal to the one that was written.

    Raises:
        TypeError: `text` is not a string.
        ValueError: `text` was not written by to_json.
    """
    if not isinstance(text, str):
        raise TypeError(f"text must be what to_json wrote, got {type(text).__name__}")
    header = _read_header(text, "text")
    if "pattern" not in header:
        raise ValueError(f"text must have a pattern, got {shortened(text)}")
    return _read_pattern(header["pattern"], "text")


class _Counter:
    """Counts the patterns of an expression, and refuses too many."""

    def __init__(self) -> None:
        self._count = 0

    def add(self) -> None:
        """Counts one. Raises ValueError if there are too many."""
        self._count += 1
        if self._count > MAX_PATTERNS:
            raise ValueError(f"an expression may have at most {MAX_PATTERNS:,} patterns")


def _written(value: Any, counter: _Counter) -> Any:
    """A recipe as {maker: arguments}; other values as values of JSON."""
    if isinstance(value, Pattern):
        counter.add()
        if value.recipe is None:
            raise ValueError(
                f"pattern {shortened(value)} has a Python function, which cannot be saved or "
                "pickled; a BlockMask, pattern(seq_len), can be"
            )
        maker, arguments = value.recipe
        return {maker: {name: _written(part, counter) for name, part in arguments.items()}}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_written(item, counter) for item in value]
    return value


def _read_pattern(written: Any, name: str) -> Pattern:
    try:
        pattern = _read(written, _Counter())
    except UNREADABLE as error:
        raise ValueError(f"pattern of {name} cannot be read: {error or _DEEP}") from error
    if not isinstance(pattern, Pattern):
        raise ValueError(f"{name} must have a pattern, got {shortened(written)}")
    return pattern


def _read(value: Any, counter: _Counter) -> Any:
    """The inverse of _written."""
    if isinstance(value, list):
        return tuple(_read(item, counter) for item in value)
    if not isinstance(value, dict):
        return value
    counter.add()
    if len(value) != 1 or not all(isinstance(written, dict) for written in value.values()):
        raise ValueError(
            'a pattern must be written as {"name": {"argument": value, ...}}, got '
            f"{shortened(value)}"
        )
    ((maker, written),) = value.items()
    arguments = {name: _read(argument, counter) for name, argument in written.items()}
    if maker in _MAKERS:
        return _MAKERS[maker](*arguments.values())
    return call_builtin(maker, **arguments)


def read_json(text: str | bytes) -> Any:
    """json.loads, which refuses an object in which a key is given twice.

    Raises:
        ValueError: The text is not JSON, or gives a key twice.
    """
    return json.loads(text, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the key {shortened(name)} is given twice")
        found[name] = value
    return found


def _read_header(text: str | None, name: str) -> dict[str, Any]:
    if text is None:
        raise ValueError(f"{name} must have a mask, got none")
    try:
        header = read_json(text)
    except (ValueError, RecursionError, MemoryError) as error:
        raise ValueError(
            f"{name} must be written by masks, got {shortened(text)}: {error}"
        ) from error
    version = header.get("version") if isinstance(header, dict) else None
    if version != VERSION:
        raise ValueError(f"{name} must have version {VERSION}, got {shortened(version)}")
    return header


def _header(mask: BlockMask) -> dict[str, Any]:
    return {
        "seq_len": mask.seq_len,
        "block_size": mask.block_size,
        "head_layer": mask.head_to_mask,
    }


def _tensors(blocks: BlockSet) -> dict[str, Tensor]:
    return {
        "full_begin": blocks.full.begin,
        "full_end": blocks.full.end,
        "partial": blocks.partial,
        "partial_tile": blocks.partial_bit_tile,
        "bank": blocks.bit_tiles,
    }


def _block_set(header: dict[str, Any], tensors: dict[str, Tensor]) -> BlockSet:
    try:
        grid = Grid.of(tuple(header["seq_len"]), tuple(header["block_size"]))
        head_to_mask = tuple(header["head_layer"])
        full = Runs(tensors["full_begin"], tensors["full_end"])
        partial, tile, bit_tiles = tensors["partial"], tensors["partial_tile"], tensors["bank"]
    except KeyError as error:
        raise ValueError(f"{error.args[0]} of the saved mask is missing") from None
    for name, is_sound in _checks(grid, head_to_mask, full, partial, tile, bit_tiles):
        if not is_sound:
            raise ValueError(f"{name} of the saved mask is not valid")
    return assemble(grid, head_to_mask, full, partial, bit_tiles, tile)


def _checks(
    grid: Grid, head_to_mask, full: Runs, partial: Tensor, tile: Tensor, bit_tiles: Tensor
) -> Iterator[tuple[str, bool]]:
    """Checks that indices are inside the grid and the bit tiles, since kernels do not check them.

    Each check relies on those before it.
    """
    masks = len(set(head_to_mask))
    limit = grid.mask_stride * masks
    words = (grid.bq, words_per_row(grid.bk))
    yield "head_layer", all(type(mask) is int for mask in head_to_mask)
    yield "head_layer", sorted(set(head_to_mask)) == list(range(masks)) and masks > 0
    yield "full", _equal_shapes(*full)
    yield "full", _ascends(torch.stack(tuple(full), dim=1).flatten(), limit)
    yield "full", bool((grid.locate_runs(full)[3] <= grid.nk).all())
    yield "partial", _equal_shapes(partial) and _ascends(partial, limit)
    yield "partial", bool((grid.locate(partial)[2] < grid.nk).all())
    yield "partial", not bool(full.contains(partial).any())
    yield "bank", bit_tiles.dtype == torch.int32 and bit_tiles.shape[1:] == words
    yield "partial_tile", _equal_shapes(tile, partial)
    yield "partial_tile", bool(((tile >= 0) & (tile < len(bit_tiles))).all())


def _equal_shapes(*columns: Tensor) -> bool:
    """Whether these are one-dimensional int64 tensors of equal lengths."""
    return all(c.dtype == torch.int64 and c.shape == (c.numel(),) for c in columns) and (
        len({c.shape for c in columns}) == 1
    )


def _ascends(numbers: Tensor, limit: int) -> bool:
    """Whether these are strictly ascending integers from 0 to limit - 1."""
    inside = bool(((numbers >= 0) & (numbers < limit)).all())
    return inside and bool((numbers.diff() > 0).all())
