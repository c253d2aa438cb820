import re

import pytest
import torch
from matplotlib.image import imread
from typer.testing import CliRunner

import masks
from masks import BlockMask, plot
from masks.__main__ import app


def test_figures_of_a_mask_by_hand():
    dense = torch.zeros(96, 96, dtype=torch.bool)
    dense[:32] = True  # row 0: three full blocks
    dense[32:64, :8] = True  # row 1: one partial block; row 2: none
    figures = plot.figures(BlockMask.from_dense(dense, 32))
    assert figures["density"] == "0.4444"
    assert figures["non-zero blocks"] == "4"
    assert figures["blocks per row"] == "0 min, 1 median, 3 max"
    assert figures["partial blocks"] == figures["distinct tiles"] == "1"


def test_density_is_the_fraction_of_pairs_of_each_cell():
    mask = masks.causal()(64, block_size=16)
    density = plot.cell_density(mask, most=4)
    expected = torch.full((4, 4), 1.0).tril(-1) + torch.eye(4) * (136 / 256)
    assert torch.allclose(density, expected)
    halves = plot.cell_density(mask, most=2)
    assert torch.allclose(halves, expected.view(2, 2, 2, 2).mean((1, 3)))


def test_text_is_darker_where_more_pairs_are_set():
    blocks = torch.tensor([[1, 0], [1, 1]], dtype=torch.bool)
    assert plot.text(BlockMask.from_blocks(blocks, 16, 32)).splitlines() == [
        "██  ",
        "████",
    ]
    assert "░" in plot.text(masks.local(0)(32, block_size=16))


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_command_draws_and_prints(tmp_path):
    path = tmp_path / "picture.png"
    result = invoke("local(64) & causal()", "--seq-len", 512, "--block-size", 64, "--output", path)
    assert result.exit_code == 0, result.output
    assert re.search(r"density +0\.2344", result.output)
    assert imread(path).std() > 0


def test_the_picture_is_named_after_the_pattern(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert invoke("butterfly", "--seq-len", 256).exit_code == 0
    assert (tmp_path / "butterfly.png").exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("buterfly",), "butterfly"),
        (("local(-1)",), "window"),
        (("full", "--block-size", 48), "block_size"),
        (("full", "--seq-len", 0), "seq_len"),
        (("strided(2.5)",), "stride"),
        (("full", "--output", "nowhere/x.png"), "--output"),
        (("full", "--output", "x.pdf"), ".png"),
    ],
)
def test_bad_input_is_named(arguments, named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert named in result.output
    assert not list(tmp_path.iterdir())
