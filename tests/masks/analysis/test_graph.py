import numpy as np
import pytest
import torch

import masks
from masks import BlockMask
from masks.analysis.graph import is_causal, token_graph


def test_full_blocks_are_classes_and_tokens_of_bit_tiles_are_not():
    assert token_graph([masks.butterfly()(1024, 64)]).classes == 16
    assert token_graph([masks.causal()(200, 64)]).classes == 200
    one_apart = token_graph([masks.global_tokens([5])(256, 64)])
    assert one_apart.classes == 5
    assert one_apart.weight.tolist() == [63, 1, 64, 64, 64]
    assert one_apart.class_of_token[:7].tolist() == [0, 0, 0, 0, 0, 1, 0]


def test_tokens_past_the_end_are_of_no_class():
    assert token_graph([masks.full()(70, 64)]).weight.tolist() == [64, 6]


@pytest.mark.parametrize("size", [16, (16, 32), (64, 16)])
def test_sums_over_keys_and_queries_are_those_of_the_dense_mask(size):
    dense = torch.rand(150, 150) < 0.2
    dense[:40] = dense[0]
    dense[:, 100:120] = dense[:, 100:101]
    graph = token_graph([BlockMask.from_dense(dense, size)])
    (layer,) = graph.layers
    values = np.random.default_rng(0).random(graph.classes)
    expanded = values[graph.class_of_token]
    by_query = layer.attended_sums(values * graph.weight)[graph.class_of_token]
    by_key = layer.attending_sums(values * graph.weight)[graph.class_of_token]
    assert np.allclose(by_query, dense.double().numpy() @ expanded)
    assert np.allclose(by_key, dense.double().numpy().T @ expanded)
    assert (layer.attends_itself[graph.class_of_token] == dense.diagonal().numpy()).all()


def test_blocks_with_equal_rows_take_one_range_for_each_run_of_keys_not_for_each_query():
    pattern = masks.pattern(lambda q, k: (k % 10 == 0) | ((q - k).abs() < 64))
    (layer,) = token_graph([pattern(1280, 128)]).layers
    blocks, near, most_runs = 10, 3, 14
    assert len(layer.full.row) <= blocks**2 * most_runs
    assert len(layer.partial.row) <= 1280 * near * most_runs


def test_a_mask_that_sees_one_later_key_is_not_causal():
    dense = torch.ones(100, 100, dtype=torch.bool).tril()
    assert is_causal([BlockMask.from_dense(dense, 16)])
    dense[3, 4] = True
    assert not is_causal([masks.causal()(100, 16), BlockMask.from_dense(dense, 16)])


def test_layers_of_other_lengths_are_refused():
    with pytest.raises(ValueError, match="as many keys as queries"):
        token_graph([masks.full()((64, 128), 64)])
    with pytest.raises(ValueError, match=r"\[64, 128\]"):
        token_graph([masks.full()(64, 64), masks.full()(128, 64)])
