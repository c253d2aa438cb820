"""Lookup tables read back."""

import torch

from masks._core.bit_tiles import unpack


def decode(table, rows, transposed: bool) -> torch.Tensor:
    """bool (mask batch, mask heads, q, k): what one direction lists, over whole blocks of its
    columns. A kernel checks the bounds of its own rows, and relies on the table for its columns.
    """
    (bq, bk), bit_tiles = table.block_size, unpack(table.bit_tiles, table.block_size[1])
    nq, nk = (-(-n // b) for n, b in zip(table.seq_len, table.block_size, strict=True))
    dense = torch.zeros(len(rows.row_ptr), nq, bq, nk, bk, dtype=torch.bool)
    for mask, row_ptr in enumerate(rows.row_ptr.tolist()):
        for r, (full_start, full_count, partial_start, partial_count) in enumerate(row_ptr):
            full = rows.full_index[full_start : full_start + full_count].tolist()
            partial = slice(partial_start, partial_start + partial_count)
            listed = [(c, None) for c in full]
            listed += zip(
                rows.partial_index[partial].tolist(),
                rows.partial_bit_tile[partial].tolist(),
                strict=True,
            )
            for c, tile in listed:
                i, j = (c, r) if transposed else (r, c)
                assert not dense[mask, i, :, j].any(), "a block is listed twice"
                dense[mask, i, :, j] = True if tile is None else bit_tiles[tile]
            assert full == sorted(full)
            assert rows.partial_index[partial].tolist() == sorted(
                rows.partial_index[partial].tolist()
            )
    dense = dense.flatten(1, 2).flatten(2)
    dense = dense[:, :, : table.seq_len[1]] if transposed else dense[:, : table.seq_len[0]]
    return dense[table.head_to_mask.long()]
