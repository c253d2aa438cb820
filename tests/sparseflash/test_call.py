"""How a call is made ready for its backend."""

from dataclasses import replace

import pytest
import torch

import masks
from sparseflash.backends import BACKENDS, select
from sparseflash.call import block_mask, prepare, spec_of


@pytest.fixture
def tiled(monkeypatch):
    """A backend that reads tables of blocks of 128, whatever those of the mask."""
    backend = replace(BACKENDS[0], name="tiled", tiling=lambda spec: (128, 128))
    monkeypatch.setattr("sparseflash.backends.BACKENDS", (backend,))
    select.cache_clear()
    yield backend
    select.cache_clear()


def test_a_backend_gets_the_table_that_it_reads(tiled):
    tensors = torch.empty(2, 1, 1, 300, 16)
    mask = masks.local(40)(300, block_size=32)
    call = prepare(*tensors, mask)
    assert (call.backend, call.spec.block_size) == (tiled, (32, 32))
    assert call.table is mask.table(block_size=(128, 128))
    assert call.table is prepare(*tensors, mask).table


def test_a_spec_says_how_far_blocks_fill_tiles():
    tensors = torch.empty(2, 1, 1, 512, 16)

    def fill(pattern, block_size):
        mask = block_mask(pattern(512, block_size), *tensors)
        return spec_of(*tensors, mask, False, None, 0.0, None, 0.0, "ieee").fill

    assert fill(masks.full(), 16) == 1.0
    assert fill(masks.local(1), 256) == 1.0
    assert fill(masks.local(1, align="top-left"), 32) < 0.8
    one_of_each_row = masks.pattern(lambda q, k: q // 32 == k // 32)
    assert fill(one_of_each_row, 32) == 0.25
