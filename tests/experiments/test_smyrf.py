"""SMYRF attention."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from experiments import smyrf
from experiments.packaged import PACKAGED


def inputs(tokens=64, dim=8):
    generator = torch.Generator().manual_seed(0)
    shape = (2, 3, tokens, dim)
    return tuple(torch.randn(shape, generator=generator) for _ in range(3))


def test_distances_of_embedded_queries_and_keys_fall_as_their_products_rise():
    query, key, _ = inputs()
    a, b = smyrf.embedded(query, key)
    distances = torch.cdist(a, b).square()
    longest = sum(x.square().sum(-1).amax(-1)[..., None, None] for x in (query, key))
    torch.testing.assert_close(distances, 2 * (longest - query @ key.mT), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("rounds", [1, 3])
def test_one_cluster_is_dense_attention(rounds):
    query, key, value = inputs()
    out = smyrf.clustered_attention(query, key, value, None, rounds, cluster=64)
    torch.testing.assert_close(out, scaled_dot_product_attention(query, key, value))


def test_clusters_hold_large_products():
    query, key, value = inputs(256)
    query, key = 4 * query, 4 * key
    dense = scaled_dot_product_attention(query, key, value)

    def error(rounds):
        torch.manual_seed(0)
        out = smyrf.clustered_attention(query, key, value, None, rounds, cluster=32)
        return float((out - dense).square().mean())

    shuffled = float((dense[:, :, torch.randperm(256)] - dense).square().mean())
    assert error(1) < shuffled
    assert error(16) < error(4) < error(1)


def test_tokens_outside_are_not_attended():
    query, key, value = inputs()
    inside = torch.arange(64)[None] < torch.tensor([[40], [64]])
    outs = []
    for filler in (0.0, 100.0):
        torch.manual_seed(0)
        other = torch.where(inside[:, None, :, None], value, filler)
        outs.append(smyrf.clustered_attention(query, key, other, inside, 2, cluster=8))
    torch.testing.assert_close(outs[0][0, :, :40], outs[1][0, :, :40])
    assert torch.equal(outs[0][1], outs[1][1])
    whole = smyrf.clustered_attention(query, key, value, inside, 2, cluster=64)
    dense = scaled_dot_product_attention(query, key, value, inside[:, None, None])
    torch.testing.assert_close(whole, dense)


def test_a_layer_trains_and_names_lengths_that_clusters_do_not_fill():
    layer = PACKAGED["smyrf"](16, 2, 64)
    x = torch.randn(2, 64, 16, requires_grad=True)
    layer(x, torch.ones(2, 64, dtype=torch.bool)).square().sum().backward()
    assert x.grad is not None
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.parameters())
    with pytest.raises(ValueError, match="smyrf needs a multiple of 32 tokens, got 40"):
        PACKAGED["smyrf"](16, 2, 40)
