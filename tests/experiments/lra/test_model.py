import pytest
import torch

from experiments.attention import NAMED, parse_attention
from experiments.lra.model import Classifier, Encoder, EncoderConfig, pooled_by
from experiments.lra.tasks import Shape
from masks.analysis.reach import pixels_in_order

TEXT = Shape(seq_len=40, vocabulary=20, classes=3)
IMAGE = Shape(seq_len=64, vocabulary=256, classes=2, side=8)
SMALL = {"dim": 16, "heads": 2, "feedforward": 32, "block_size": 16, "dropout": 0.0}


def small(**options) -> EncoderConfig:
    return EncoderConfig(**SMALL | {"attention_dropout": 0.0} | options)


@pytest.mark.parametrize("expression", ["flash", "sdpa", "full()", ["full()", "full()"]])
def test_dense_attentions_agree_with_the_materialised_one(expression):
    query, key, value = torch.randn(3, 2, 2, 40, 8).unbind()
    lengths = torch.tensor([40, 13])
    expected = NAMED["standard"](query, key, value, lengths, 0.0)
    actual = parse_attention(expression, 16)(query, key, value, lengths, 0.0)
    torch.testing.assert_close(actual, expected)


def test_heads_attend_by_patterns_of_their_own():
    query, key, value = torch.randn(3, 1, 2, 40, 8).unbind()
    out = parse_attention(["local(3)", "full()"], 16)(query, key, value, None, 0.0)
    full = NAMED["standard"](query, key, value, None, 0.0)
    local = parse_attention("local(3)", 16)(query, key, value, None, 0.0)
    torch.testing.assert_close(out[:, 1], full[:, 1])
    torch.testing.assert_close(out[:, 0], local[:, 0])


def test_linear_attention_ignores_padding():
    query, key, value = torch.randn(3, 1, 2, 40, 8).unbind()
    lengths = torch.tensor([13])
    out = NAMED["linear"](query, key, value, lengths, 0.0)
    cut = NAMED["linear"](query, key[:, :, :13], value[:, :, :13], None, 0.0)
    torch.testing.assert_close(out, cut)


def test_unknown_attentions_list_the_known_ones():
    with pytest.raises(
        ValueError, match=r"unknown pattern 'nearby'.*known: .*'butterfly'.*'sdpa'"
    ):
        parse_attention("nearby(3)")


@pytest.mark.parametrize("pool", ["mean", "mean_padded", "max", "cls"])
@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "rotary", "none"])
def test_padding_changes_nothing(pool, positions):
    model = Classifier(small(pool=pool, positions=positions), TEXT).eval()
    ids = torch.randint(1, 20, (2, 1, 40))
    lengths = torch.tensor([[40], [25]])
    other = ids.clone()
    other[1, :, 25:] = 0
    torch.testing.assert_close(model(ids, lengths), model(other, lengths))


def test_positions_tell_tokens_apart():
    ids = torch.randint(1, 20, (1, 1, 40))
    for positions in ("learned", "sinusoidal", "rotary"):
        model = Classifier(small(positions=positions), TEXT).eval()
        assert not torch.allclose(model(ids, None), model(ids.flip(-1), None))
    model = Classifier(small(positions="none"), TEXT).eval()
    torch.testing.assert_close(model(ids, None), model(ids.flip(-1), None))


@pytest.mark.parametrize("positions", ["learned", "sinusoidal", "rotary", "axial"])
@pytest.mark.parametrize("pool", ["mean", "cls"])
def test_full_attention_does_not_depend_on_the_order_of_pixels(positions, pool):
    raster, tiles = (
        Classifier(small(positions=positions, pool=pool, order=order, tile=(2, 4)), IMAGE).eval()
        for order in ("raster", "tiles")
    )
    tiles.load_state_dict(raster.state_dict())
    ids = torch.randint(256, (2, 1, 64))
    torch.testing.assert_close(raster(ids, None), tiles(ids, None))


def test_tiles_are_patches():
    order = torch.from_numpy(pixels_in_order(8, 8, (2, 4))).view(8, 8)
    assert order[0].tolist() == [0, 1, 2, 3, 8, 9, 10, 11]
    assert sorted(order.flatten().tolist()) == list(range(64))
    with pytest.raises(ValueError, match="tile must divide an image of 8 x 8"):
        pixels_in_order(8, 8, (3, 4))


@pytest.mark.parametrize("positions", ["learned", "axial"])
@pytest.mark.parametrize(
    "attention", ["flash", "standard", "linear", "local(9)", ["local(9)", "full()"]]
)
def test_black_pixels_can_be_masked(positions, attention):
    config = small(positions=positions, mask_black=True, attention=[attention] * 2)
    model = Encoder(config, IMAGE).eval()
    ids = torch.randint(1, 256, (2, 64))
    ids[0, 10:30] = 0
    features, keys = model(ids, None)
    assert torch.equal(keys, ids > 0)
    with torch.no_grad():
        model.embedding.weight[0] += 100
    again, _ = model(ids, None)
    torch.testing.assert_close(features[keys], again[keys])
    assert not torch.allclose(features[~keys], again[~keys])
    assert not torch.allclose(features, Encoder(small(), IMAGE).eval()(ids, None)[0])


@pytest.mark.parametrize("expression", ["flash", "sdpa", "full()", ["full()", "full()"]])
def test_masked_keys_are_those_of_the_materialised_attention(expression):
    query, key, value = torch.randn(3, 2, 2, 40, 8, requires_grad=True).unbind()
    keys = torch.rand(2, 40) < 0.5
    expected = NAMED["standard"](query, key, value, keys, 0.0)
    actual = parse_attention(expression, 16)(query, key, value, keys, 0.0)
    torch.testing.assert_close(actual, expected)
    wanted, found = (
        torch.autograd.grad(out.square().sum(), (query, key, value), retain_graph=True)
        for out in (expected, actual)
    )
    torch.testing.assert_close(found, wanted)


def test_masked_keys_change_no_pattern():
    query, key, value = torch.randn(3, 1, 2, 40, 8).unbind()
    keys = torch.ones(1, 40, dtype=torch.bool)
    local = parse_attention("local(3)", 16)
    plain = local(query, key, value, None, 0.0)
    torch.testing.assert_close(local(query, key, value, keys, 0.0), plain)
    keys[0, 20] = False
    out = local(query, key, value, keys, 0.0)
    near = torch.arange(17, 24)
    far = [n for n in range(40) if n not in near]
    torch.testing.assert_close(out[:, :, far], plain[:, :, far])
    assert not torch.isclose(out[:, :, near], plain[:, :, near]).any()


def test_axial_positions_hold_for_other_sizes():
    small_image = Classifier(small(positions="axial"), IMAGE)
    large = Classifier(small(positions="axial"), Shape(256, 256, 2, side=16))
    large.load_state_dict(small_image.state_dict())


def test_two_documents_are_compared():
    shape = Shape(seq_len=40, vocabulary=20, classes=2, documents=2)
    model = Classifier(small(), shape)
    logits = model(torch.randint(20, (3, 2, 40)), torch.full((3, 2), 40))
    assert logits.shape == (3, 2)


def test_mean_of_padded_length():
    x, lengths = torch.ones(1, 4, 2), torch.tensor([2])
    assert pooled_by("mean", x, lengths).tolist() == [[1, 1]]
    assert pooled_by("mean_padded", x, lengths).tolist() == [[0.5, 0.5]]
    keys = torch.tensor([[False, True, False, False]])
    x = torch.arange(8.0).view(1, 4, 2)
    assert pooled_by("mean", x, keys).tolist() == [[2, 3]]
    assert pooled_by("mean_padded", x, keys).tolist() == [[0.5, 0.75]]
    assert pooled_by("max", x, keys).tolist() == [[2, 3]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 3}, "heads must divide dim 16, got 3"),
        ({"attention": ["flash"]}, "one for each of 2 layers, got 1"),
        ({"positions": "axial"}, "positions 'axial' are for images"),
        ({"order": "tiles"}, "order 'tiles' is for images"),
        ({"mask_black": True}, "mask_black is for images"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Encoder(small(**options), TEXT)
