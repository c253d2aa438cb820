"""Lookup tables read back."""

import torch

from masks import tiles


def decode(table, rows, transposed: bool) -> torch.Tensor:
    """bool (mask batch, mask heads, q, k): what one direction lists, over whole blocks of its
    columns. A kernel bounds its own rows, and relies on the table for its columns.
    """
    (bq, bk), bank = table.block_size, tiles.unpack(table.bank, table.block_size[1])
    nq, nk = (-(-n // b) for n, b in zip(table.seq_len, table.block_size, strict=True))
    dense = torch.zeros(len(rows.bounds), nq, bq, nk, bk, dtype=torch.bool)
    for layer, bounds in enumerate(rows.bounds.tolist()):
        for r, (full_start, full_count, partial_start, partial_count) in enumerate(bounds):
            full = rows.full_index[full_start : full_start + full_count].tolist()
            partial = slice(partial_start, partial_start + partial_count)
            listed = [(c, None) for c in full]
            listed += zip(
                rows.partial_index[partial].tolist(),
                rows.partial_tile[partial].tolist(),
                strict=True,
            )
            for c, tile in listed:
                i, j = (c, r) if transposed else (r, c)
                assert not dense[layer, i, :, j].any(), "a block is listed twice"
                dense[layer, i, :, j] = True if tile is None else bank[tile]
            assert full == sorted(full)
            assert rows.partial_index[partial].tolist() == sorted(
                rows.partial_index[partial].tolist()
            )
    dense = dense.flatten(1, 2).flatten(2)
    dense = dense[:, :, : table.seq_len[1]] if transposed else dense[:, : table.seq_len[0]]
    return dense[table.head_layer.long()]
