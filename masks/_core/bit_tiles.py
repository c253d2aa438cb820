"""Bit tiles: the element masks of partial blocks, one bit per (query, key) pair.

A tile of (bq, bk) pairs is int32 (bq, ceil(bk / 32)); pair (r, c) is bit c % 32 of word
[r, c // 32].
"""

from collections.abc import Iterable
from functools import cache
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

WORD_BITS = 32
_CHUNK = 8192  # rows that are hashed or compared at a time


def words_per_row(block_k: int) -> int:
    """The number of words in a row of a tile of `block_k` keys."""
    return -(-block_k // WORD_BITS)


def pack(pairs: Tensor) -> Tensor:
    """bool (..., bk) -> int32 (..., words); bk is a multiple of 8."""
    return to_words(pack_bytes(pairs))


def pack_bytes(pairs: Tensor) -> Tensor:
    """bool (..., bk) -> uint8 (..., bk / 8); bk is a multiple of 8."""
    # Eight bools are the bytes of an int64. One product gathers their low bits in its top byte:
    # the low bit of byte i becomes bit i.
    octets = _viewable(pairs).view(torch.int64)
    return (octets * 0x0102040810204080).bitwise_right_shift_(56).to(torch.uint8)


def to_words(packed: Tensor) -> Tensor:
    """Rows of packed pairs in integers of any width, (..., n) -> int32 (..., words)."""
    packed = _viewable(packed).view(torch.uint8)
    missing = -packed.shape[-1] % (WORD_BITS // 8)
    return torch.nn.functional.pad(packed, (0, missing)).view(torch.int32)


def unpack(tiles: Tensor, block_k: int) -> Tensor:
    """int32 (..., words) -> bool (..., bk): the inverse of pack."""
    # Each byte is copied to all eight bytes of an int64. A mask leaves only bit i of copy i. If
    # that bit is set, an addition carries into the top bit of its byte.
    octets = _viewable(tiles).view(torch.uint8).long() * 0x0101010101010101
    carried = (octets & (0x8040201008040201 - 2**64)) + 0x7F7F7F7F7F7F7F7F
    return ((carried >> 7) & 0x0101010101010101).view(torch.bool)[..., :block_k]


def _viewable(tensor: Tensor) -> Tensor:
    """The tensor, or a copy, that `view` accepts with wider dtypes: contiguous and aligned."""
    flat = tensor.contiguous().flatten()
    return (flat.clone() if flat.storage_offset() % 8 else flat).view(tensor.shape)


def deduplicate(rows: Tensor) -> tuple[Tensor, Tensor]:
    """(unique, inverse) of the rows of int32 (n, ...), with unique[inverse] equal to `rows`.

    Rows are grouped by a 64-bit hash and then compared. So a collision costs time, but never gives
    a wrong result.
    """
    if len(rows) == 0:
        return rows, torch.zeros(0, dtype=torch.int64, device=rows.device)
    flat = rows.flatten(1)
    _, inverse = torch.unique(hash_rows(flat), return_inverse=True)
    count = int(inverse.max()) + 1
    first_row = torch.full((count,), len(flat), dtype=torch.int64, device=rows.device)
    positions = torch.arange(len(flat), device=rows.device)
    first_row.scatter_reduce_(0, inverse, positions, "amin")
    unique = flat[first_row]
    for start in range(0, len(flat), _CHUNK):
        chunk = slice(start, start + _CHUNK)
        if not torch.equal(unique[inverse[chunk]], flat[chunk]):
            unique, inverse = torch.unique(flat, dim=0, return_inverse=True)
            break
    return unique.unflatten(1, rows.shape[1:]), inverse


def renumbered(numbers: Iterable[Tensor], tiles: Iterable[Tensor]) -> Tensor:
    """The numbers of bit tiles after the lists of tiles that they refer to are concatenated."""
    first = accumulate((len(each) for each in tiles), initial=0)
    return torch.cat([n + start for n, start in zip(numbers, first, strict=False)])


def unique_codes(codes: Tensor, limit: int) -> tuple[Tensor, Tensor]:
    """torch.unique with the inverse, for integers in [0, limit).

    It does not sort if `limit` is not much larger than the number of codes.
    """
    if limit > 4 * len(codes) + _CHUNK:
        return torch.unique(codes, return_inverse=True)
    present = torch.zeros(limit, dtype=torch.bool, device=codes.device)
    present[codes] = True
    return present.nonzero().flatten(), (present.cumsum(0) - 1)[codes]


def hash_rows(flat: Tensor) -> Tensor:
    """A 64-bit hash of each row: the sum of its words times odd numbers, modulo 2^64."""
    weights = torch.from_numpy(_odd_numbers(flat.shape[1])).to(flat.device)
    return torch.cat([(part.long() * weights).sum(1) for part in flat.split(_CHUNK)])


@cache
def _odd_numbers(count: int) -> np.ndarray:
    """Random odd numbers, by numpy: torch draws none under torch.func.vmap."""
    return np.random.default_rng(0).integers(-(2**62), 2**62, count) * 2 + 1
