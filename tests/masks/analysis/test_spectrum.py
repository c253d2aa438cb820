import numpy as np
import pytest
import torch

import masks
from masks import BlockMask
from masks.analysis import spectral_gap


def gap_of(dense: torch.Tensor) -> float:
    chain = dense.double() / dense.sum(1, keepdim=True).clamp(min=1)
    return 1 - np.sort(np.abs(np.linalg.eigvals(chain.numpy())))[-2]


@pytest.mark.parametrize(
    "pattern", ["butterfly", "local(20)", "bigbird(1, 1, 1)", "longformer(9, 3)"]
)
def test_gap_is_that_of_the_dense_chain(pattern):
    mask = masks.parse(pattern)(500, 32)
    assert spectral_gap(mask) == pytest.approx(gap_of(mask.to_dense()), abs=1e-5)


def test_full_mask_forgets_at_once_and_unconnected_ones_never():
    assert spectral_gap(masks.full()(64, 16)) == 1
    assert spectral_gap(masks.full()(16, 16)) == 1
    assert spectral_gap(masks.documents([32, 32])(64, 16)) == pytest.approx(0, abs=1e-6)


def test_heads_are_united_and_queries_without_a_key_count():
    dense = torch.rand(2, 90, 90) < 0.2
    dense[:, 7] = False
    assert spectral_gap(BlockMask.from_dense(dense, 16)) == pytest.approx(
        gap_of(dense.any(0)), abs=1e-5
    )


def test_causal_masks_have_none():
    assert spectral_gap(masks.causal()(64, 16)) is None
