"""Flat indices of blocks."""

import pytest
import torch

from masks._core.grid import Grid
from masks._core.intervals import Runs

GRID = Grid.of((70, 120), (32, 16))  # 3 x 8 blocks, the last row and column clipped


def test_flat_indices_count_rows_and_leave_one_between_them():
    assert (GRID.nq, GRID.nk, GRID.row_stride, GRID.mask_stride) == (3, 8, 9, 27)
    flat = torch.tensor([0, 7, 9, 26 - 1, 27, 40])
    mask, row, column = GRID.locate(flat)
    assert mask.tolist() == [0, 0, 0, 0, 1, 1]
    assert row.tolist() == [0, 0, 1, 2, 0, 1]
    assert column.tolist() == [0, 7, 0, 7, 0, 4]
    assert torch.equal(GRID.flat_index(mask, row, column), flat)


def test_blocks_are_renumbered_in_another_grid():
    other = Grid.of((200, 400), 16)
    flat = torch.tensor([0, 16, 27])
    assert torch.equal(other.renumber(GRID.renumber(flat, other), GRID), flat)


def test_runs_are_located_by_their_columns():
    runs = Runs(torch.tensor([1, 30]), torch.tensor([8, 31]))
    located = GRID.locate_runs(runs)
    assert [t.tolist() for t in located] == [[0, 1], [0, 0], [1, 3], [8, 4]]
    assert all(map(torch.equal, GRID.runs(*located), runs))


@pytest.mark.parametrize(("row", "column", "kind"), [(0, 0, 0), (0, 7, 1), (2, 0, 2), (2, 7, 3)])
def test_how_the_sequence_clips_a_block(row, column, kind):
    flat = GRID.flat_index(1, torch.tensor([row]), torch.tensor([column]))
    assert GRID.clip_kind(flat).tolist() == [kind]


def test_what_a_cuda_graph_computes_is_not_stored(monkeypatch):
    grid = Grid.of((50, 75), (16, 32))
    monkeypatch.setattr("masks._core.grid.is_captured", lambda device: True)
    captured = grid.inbounds_tiles
    assert grid.inbounds_tiles is not captured
    monkeypatch.undo()
    stored = grid.inbounds_tiles
    assert stored.equal(captured)
    assert grid.inbounds_tiles is stored
