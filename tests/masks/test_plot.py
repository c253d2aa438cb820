import inspect
import re

import pytest
import torch
from matplotlib.image import imread
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typer.testing import CliRunner

import masks
from masks import BlockMask, plot
from masks.__main__ import app
from masks._pattern import BUILTIN


def test_figures_of_a_mask_by_hand():
    dense = torch.zeros(96, 96, dtype=torch.bool)
    dense[:32] = True  # row 0: three full blocks
    dense[32:64, :8] = True  # row 1: one partial block; row 2: none
    figures = plot.figures(BlockMask.from_dense(dense, 32))
    assert figures["density"] == "0.4444"
    assert figures["non-zero blocks"] == "4"
    assert figures["blocks per row"] == "0 min, 1 median, 3 max"
    assert figures["partial blocks"] == figures["bit tiles"] == "1"


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


@pytest.mark.parametrize("lengths", [(300, 300), (1, 300), (300, 129), (128, 128)])
def test_clipped_blocks_are_as_dark_as_full_ones(lengths):
    assert (plot.cell_density(masks.full()(lengths), 2) == 1).all()


def test_every_cell_that_attends_is_shown():
    mask = masks.global_tokens([70_000])(1 << 17, block_size=16)
    assert all("░" in line for line in plot.text(mask).splitlines())


class LargestTensor(TorchDispatchMode):
    """Notes the most entries of a tensor that an operation returns."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.entries = max([self.entries, *sizes])
        return out


def test_no_cell_of_a_picture_needs_memory_for_all_block_columns():
    mask = masks.full()(1 << 22)
    with LargestTensor() as largest:
        assert (plot.cell_density(mask, 512) == 1).all()
    assert largest.entries <= 2 * 512 * 513


def test_the_text_fits_into_a_terminal_of_80_columns():
    assert max(map(len, plot.text(masks.causal()(6144, 128)).splitlines())) <= 80


def test_every_row_of_cells_is_seen_in_the_picture(tmp_path):
    blocks = torch.zeros(1024, 1024, dtype=torch.bool)
    blocks[::50] = True
    plot.save(BlockMask.from_blocks(blocks, 16), tmp_path / "x.png", "rows")
    column = torch.tensor(imread(tmp_path / "x.png"))[:, 400, 0]
    dark = (column > 0.1) & (column < 0.9)
    assert int((dark[1:] & ~dark[:-1]).sum()) >= 21


def test_the_frame_hides_no_first_or_last_token(tmp_path):
    blocks = torch.zeros(2048, 2048, dtype=torch.bool)
    blocks[[0, -1]] = True
    plot.save(BlockMask.from_blocks(blocks, 16), tmp_path / "x.png", "rows")
    column = torch.tensor(imread(tmp_path / "x.png"))[:, 400]
    blue = column[:, 2] - column[:, 0] > 0.2
    assert int((blue[1:] & ~blue[:-1]).sum()) == 2


def test_masks_that_are_not_drawn_are_counted(tmp_path, figures):
    blocks = torch.eye(20, dtype=torch.bool)[:, None].expand(20, 20, 20)
    plot.save(BlockMask.from_blocks(blocks, 16), tmp_path / "x.png", "twenty")
    assert len(figures[0].axes) == plot.MAX_PICTURES
    assert figures[0]._suptitle.get_text().endswith("the first 16 of 20 masks")


@pytest.fixture
def figures(monkeypatch) -> list:
    """The figures that are saved."""
    saved = []
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig", lambda figure, *_, **__: saved.append(figure)
    )
    return saved


def test_cells_lie_where_their_tokens_are(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig", lambda figure, *_, **__: figures.append(figure)
    )
    plot.save(masks.full()((300, 1000)), tmp_path / "x.png", "full")
    (axes,) = figures[0].axes
    assert (axes.get_xlim(), axes.get_ylim()) == ((0, 1000), (300, 0))
    assert tuple(axes.images[0].get_extent()) == (0, 1024, 384, 0)


def test_every_distinct_mask_is_drawn(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(
        "matplotlib.figure.Figure.savefig", lambda figure, *_, **__: figures.append(figure)
    )
    heads = masks.stack([masks.local(9), masks.causal(), masks.local(9)])
    plot.save(heads(100, 16), tmp_path / "x.png", "a long title " * 40)
    assert [axes.get_title() for axes in figures[0].axes] == ["head 0, 2", "head 1"]
    assert len(figures[0]._suptitle.get_text().splitlines()) == 4


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_command_draws_and_prints(tmp_path):
    path = tmp_path / "picture.png"
    result = invoke("local(64) & causal()", "--seq-len", 512, "--block-size", 64, "--output", path)
    assert result.exit_code == 0, result.output
    assert re.search(r"density +0\.2344", result.output)
    assert imread(path).std() > 0


@pytest.mark.parametrize(("suffix", "begin"), [(".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_the_command_draws_vector_formats(tmp_path, suffix, begin):
    path = (tmp_path / "picture").with_suffix(suffix)
    assert invoke("local(64)", "--seq-len", 512, "--output", path).exit_code == 0
    assert path.read_bytes().startswith(begin)


def test_the_picture_is_named_after_the_pattern(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert invoke("butterfly", "--seq-len", 256).exit_code == 0
    assert (tmp_path / "butterfly.png").exists()


def test_pictures_of_different_patterns_have_different_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = ("local(3)", "~local(3)", "local(3) & full", "local(3) | full")
    for text in texts:
        assert invoke(text, "--seq-len", 256).exit_code == 0
    assert len(list(tmp_path.iterdir())) == 4


def test_names_of_files_are_no_markup(tmp_path, monkeypatch):
    """Dollar signs are no formula in a picture, brackets no style in what is printed."""
    monkeypatch.chdir(tmp_path)
    name = r"[/a]$\frac$.py"
    folder = tmp_path / "[" / "a]$\\frac$.py"
    folder.parent.mkdir()
    folder.write_text("import masks\nx = masks.local(9)")
    size = ("--seq-len", 64, "--block-size", 16)
    for command in (("draw",), ("diff", "full")):
        result = invoke(*command, f"{name}:x", *size, "--output", "[/b].svg")
        assert result.exit_code == 0, result.output
        assert result.output.endswith("wrote [/b].svg\n")
        assert r"$\frac$.py:x" in (tmp_path / "[/b].svg").read_text()


def test_queries_and_keys_may_differ_in_length(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke(
        "causal(align='bottom-right')", "--seq-len", "100,300", "--block-size", "16,32"
    )
    assert result.exit_code == 0, result.output
    assert re.search(r"sequence length +100 x 300", result.output)
    assert re.search(r"block size +16 x 32", result.output)


def test_help_lists_the_patterns_with_their_arguments():
    text = " ".join(invoke("--help").output.split())
    calls = []
    for name, make in sorted(BUILTIN.items()):
        arguments = inspect.signature(make).parameters.values()
        bare = [argument.replace(annotation=argument.empty) for argument in arguments]
        calls.append(f"{name}{inspect.Signature(bare)}")
    assert text.endswith(" ".join(calls))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("buterfly",), "butterfly"),
        (("local(-1)",), "window"),
        (("full", "--block-size", 48), "block_size"),
        (("full", "--seq-len", 0), "seq_len"),
        (("full", "--seq-len", "1,2,3"), "--seq-len"),
        (("full", "--block-size", "x"), "--block-size"),
        (("strided(2.5)",), "stride"),
        (("full", "--output", "nowhere/x.png"), "--output"),
        (("full", "--output", "x.txt"), ".pdf"),
        (("\udcff.py:x",), r"\udcff"),
        (("full", "--output", "\udcff.png"), r"\udcff"),
    ],
)
def test_bad_input_is_named(arguments, named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert named in result.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: plot.text(masks.full()), r"mask must be a BlockMask, got Pattern; pass pattern"),
        (lambda: plot.text(masks.full()(64), 0), "most must be at least 1, got 0"),
        (lambda: plot.save(masks.full(), "x.png", ""), "mask must be a BlockMask, got Pattern"),
        (
            lambda: plot.save(masks.full()(64), "x.jpeg", ""),
            "path must end in .png, .* got x.jpeg",
        ),
        (lambda: plot.save(masks.full()(64), "no/x.png", ""), "path must be in a folder that"),
    ],
)
def test_bad_input_names_the_argument(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()
