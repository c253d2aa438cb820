import numpy as np
import pytest
import torch
from torch import Tensor

import masks
from masks import BlockMask
from masks.analysis import hops, pixel_reach, receptive_field, spectral_gap


def random_mask(tokens: int, size, heads: int, seed: int) -> BlockMask:
    """Blocks that are full, empty, and partial by element masks that have equal rows and not."""
    torch.manual_seed(seed)
    pairs = masks.random(0.15, seed)(tokens, size).to_dense() & (torch.rand(tokens, 1) < 0.7)
    stacked = [pairs]
    for _ in range(heads - 1):
        stacked.append((torch.rand(tokens, tokens) < 0.004) & (torch.arange(tokens) % 3 > 0))
    return BlockMask.from_dense(torch.stack(stacked), size)


def connected_after(stack: list[BlockMask]) -> list[Tensor]:
    """bool (tokens, tokens) after each layer, by products of dense matrices."""
    reach, after = torch.eye(stack[0].seq_len[0]), []
    for mask in stack:
        dense = mask.to_dense().view(-1, *mask.seq_len).any(0).float()
        reach = ((reach + dense @ reach) > 0).float()
        after.append(reach > 0)
    return after


@pytest.mark.parametrize("size", [16, (16, 32)])
@pytest.mark.parametrize("heads", [1, 2])
def test_shares_and_paths_are_those_of_dense_matrices(heads, size):
    tokens = 150
    stack = [random_mask(tokens, size, heads, seed) for seed in range(3)]
    found = receptive_field(stack)
    after = connected_after(stack)
    assert found.exact
    assert found.share == pytest.approx([float(r.double().mean()) for r in after], abs=1e-12)
    needed = np.zeros((tokens, tokens)) + sum((~r).numpy().astype(int) for r in after) + 1
    linked = after[-1].numpy() & ~np.eye(tokens, dtype=bool)
    assert found.mean_path == pytest.approx(needed[linked].mean())
    assert found.longest_path == needed[linked].max()
    attended = sum(mask.to_dense().view(-1, tokens, tokens).any(0) for mask in stack) > 0
    attended &= ~torch.eye(tokens, dtype=torch.bool)
    assert found.unreached == int((~attended.any(0)).sum())
    assert found.blind == int((~attended.any(1)).sum())


def test_hops_of_one_token_are_those_of_dense_matrices():
    stack = [random_mask(150, 16, 2, seed) for seed in range(3)]
    seen = [r.numpy() for r in connected_after(stack)]
    as_keys = hops(stack, [0, 77], seen_by=True)
    for row, key in zip(as_keys, [0, 77], strict=True):
        for layer, reach in enumerate(seen, 1):
            assert (((row >= 0) & (row <= layer)) == reach[:, key]).all()
    as_queries = hops(stack, [0, 77])
    assert ((as_queries >= 0) == seen[-1][[0, 77]]).all()
    for layer in (1, 2):  # counted from the last layer down
        reach = connected_after(stack[-layer:])[-1].numpy()
        assert (((as_queries >= 0) & (as_queries <= layer)) == reach[[0, 77]]).all()


def test_butterfly_connects_all_after_as_many_layers_as_it_has_factors():
    found = receptive_field(masks.butterfly()(16 * 64, 64))
    assert found.full_after == found.layers == found.longest_path == 4
    assert found.share == pytest.approx([5 / 16, 11 / 16, 15 / 16, 1])
    assert found.mean_path == pytest.approx(
        (16 * (1 + 4 + 2 * 6 + 3 * 4 + 4) * 64 * 64 - 1024) / (1024 * 1023)
    )


def test_shares_of_causal_masks_are_of_causal_pairs():
    found = receptive_field((masks.local(9) & masks.causal())(100, 16), 12)
    assert found.causal
    assert found.full_after == 11
    assert found.share[-1] == 1
    assert found.share[0] == pytest.approx(sum(min(q, 9) + 1 for q in range(100)) / 5050)


def test_a_single_mask_ends_when_layers_add_nothing_and_a_list_names_those_that_do_not():
    near, far = masks.local(0)(64, 16), masks.full()(64, 16)
    assert receptive_field(near, 8).layers == 1
    assert receptive_field(near, 8).added == (False,)
    assert receptive_field([near, far, near, far]).added == (False, True, False, False)
    assert receptive_field([near, far], 3).layers == 3


def test_heads_are_united():
    mask = masks.stack([masks.local(0), masks.full()])(64, 16)
    assert receptive_field(mask).full_after == 1


@pytest.mark.parametrize("pattern", ["local(40)", "local(40) & causal()", "bigbird(1, 0, 1)"])
def test_samples_are_within_their_error(pattern):
    mask = masks.parse(pattern)(1000, 16)
    exact = receptive_field(mask, 3)
    sampled = receptive_field(mask, 3, samples=200)
    assert exact.exact
    assert not sampled.exact
    assert sampled.followed == 200
    for value, guess, (low, high) in zip(
        exact.share, sampled.share, sampled.interval, strict=True
    ):
        assert 0 <= low <= min(value, guess) <= max(value, guess) <= high <= 1
        assert high - low < 0.8
    assert [*exact.interval] == [(share, share) for share in exact.share]


@pytest.mark.parametrize(("pattern", "end"), [("causal()", 1), ("local(0) & causal()", 0)])
def test_intervals_of_samples_end_where_shares_do(pattern, end):
    (share,), ((low, high),) = (
        getattr(receptive_field(masks.parse(pattern)(4096), 1, samples=100), name)
        for name in ("share", "interval")
    )
    assert end in (low, high)
    assert low <= share <= high
    assert 0.05 < high - low < 0.3


def test_samples_of_a_sparse_causal_mask_say_how_little_is_connected():
    """Keys near the end have few queries that may see them, which is no noise of the share."""
    mask = masks.parse("local(40) & causal()")(8192)
    exact, sampled = (receptive_field(mask, 2, samples=n) for n in (None, 400))
    assert sampled.share == pytest.approx(exact.share, rel=0.2)
    assert sampled.mean_path == pytest.approx(exact.mean_path, rel=0.05)
    assert all(high < 0.1 for _, high in sampled.interval)


def test_progress_ends_at_its_total():
    steps = []
    receptive_field(masks.butterfly()(512, 16), 9, progress=lambda *step: steps.append(step))
    assert steps[-1] == (9, 9)
    assert steps == sorted(steps)


def test_a_million_tokens_take_seconds():
    found = receptive_field(masks.butterfly()(1 << 20, 256))
    assert (found.classes, found.full_after, found.exact) == (4096, 12, True)


def test_tokens_that_are_not_attended_and_those_that_attend_none_are_counted_apart():
    keys = masks.pattern(lambda q, k: (k >= 20) & (q >= 0))(90, 16)
    found = receptive_field(keys)
    assert (found.unreached, found.blind) == (20, 0)
    found = receptive_field(keys.T)
    assert (found.unreached, found.blind) == (0, 20)


def test_reach_in_pixels_depends_on_their_order():
    raster = pixel_reach(masks.local(32)(1024, 16), (32, 32), 2)
    assert (raster.up, raster.down) == ((1, 2), (1, 2))
    assert raster.left == (16, 16)  # a row before and after
    assert raster.radius == (0, 1)
    tiled = pixel_reach(
        masks.neighborhood2d(8, 1)(1024, 16), (32, 32), 8, tile=(4, 4), pixel=(16, 17)
    )
    assert tiled.radius[:3] == (4, 8, 12)
    assert (tiled.up[0], tiled.down[0], tiled.left[0], tiled.right[0]) == (4, 7, 5, 6)
    assert tiled.share[0] == 144 / 1024
    assert tiled.share[-1] == 1
    assert tiled.radius[-1] == 17  # the farthest pixel


@pytest.mark.parametrize("wrong", [masks.full(), [masks.full()], 3, torch.ones(3, 3)])
@pytest.mark.parametrize("function", [receptive_field, spectral_gap])
def test_anything_but_block_masks_is_refused(function, wrong):
    with pytest.raises(TypeError, match="must be a BlockMask"):
        function(wrong)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda mask: receptive_field(mask, 0), "layers"),
        (lambda mask: receptive_field(mask, samples=1), "samples"),
        (lambda mask: receptive_field([]), "masks must have at least 1 entry"),
        (lambda mask: receptive_field(mask, seed=-1), "seed must be at least 0, got -1"),
        (lambda mask: hops([], [3]), "masks must have at least 1 entry"),
        (lambda mask: hops(mask, [64]), "tokens"),
        (lambda mask: hops(mask, []), "tokens"),
        (lambda mask: pixel_reach(mask, (8, 9)), "64 pixels"),
        (lambda mask: pixel_reach(mask, (8, 8), tile=(3, 8)), "tile"),
        (lambda mask: pixel_reach(mask, (8, 8), pixel=(8, 0)), "pixel"),
        (lambda mask: pixel_reach(mask, (8, 8, 1)), "image must be two integers"),
        (lambda mask: pixel_reach(mask, 8), "image must be a sequence of integers, got 8"),
        (lambda mask: pixel_reach(mask, (8, 8), pixel=3.0), "pixel must be a sequence of int"),
        (lambda mask: pixel_reach(mask, (8, 8), tile=("x", 8)), r"tile\[0\] must be an integer"),
    ],
)
def test_bad_input_is_named(call, named):
    with pytest.raises((TypeError, ValueError), match=named):
        call(masks.full()(64, 16))
