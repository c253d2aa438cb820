"""The gallery: an HTML page with a picture, a histogram and the receptive field of each pattern.

It shows every built-in pattern and the patterns of a user's modules. The gallery of the
documentation has the same entries. `difference` compares two patterns.
"""

import html
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

from masks import plot
from masks._parse import UNREADABLE, as_pattern, run_file
from masks._pattern import Pattern
from masks.analysis import receptive_field
from masks.analysis.counts import attended_pairs
from masks.block_mask import BlockMask

TOKENS, BLOCK = 1024, 64
LAYERS = 12
SAMPLES = 256  # number of random keys if the receptive field is sampled
PAIRS = 1 << 22  # masks with more pairs are drawn in cells of several blocks
STEEP = 16  # the axis is logarithmic if most blocks in a row over the median are more
DPI = {"png": 150, "svg": 300}  # in SVG, of embedded pictures of masks
# Colours of empty blocks; masked pairs and attended pairs of partial blocks; full blocks.
KINDS = ["#ffffff", "#dde3ea", "#6d9bd1", "#1f4e8c"]
# Distinct for every kind of colour vision (Okabe and Ito 2008).
BLUE, VERMILION, GREY = "#0072b2", "#d55e00", "#7f7f7f"


@dataclass(frozen=True)
class Entry:
    """One pattern of the gallery.

    Attributes:
        title: The title of the entry.
        pattern: The pattern or its text.
        good_for: What the pattern is used for.
        seq_len: Length in tokens, one number or (q_len, k_len).
        block_size: Block size in tokens.
    """

    title: str
    pattern: Pattern | str
    good_for: str
    seq_len: int | tuple[int, int] = TOKENS
    block_size: int = BLOCK

    def build(self) -> BlockMask:
        """The mask of the pattern."""
        return as_pattern(self.pattern)(self.seq_len, self.block_size)

    @property
    def file_name(self) -> str:
        """The file name of the pictures, without a suffix."""
        return re.sub(r"\W+", "-", self.title.lower()).strip("-")


# One for every built-in pattern, by its name, and combinations.
ENTRIES = [
    Entry("full", "full()", "Dense attention, through the same kernels. The baseline."),
    Entry("causal", "causal()", "Language models: a token sees itself and the past."),
    Entry("local", "local(128)", "Sliding window: text, audio, time series."),
    Entry("dilated", "dilated(4, 16)", "A wider view with few keys; all blocks are partial."),
    Entry("strided", "strided(4, window=1)", "Sparse Transformer: periodic structure, images."),
    Entry(
        "global_tokens", "global_tokens(64) | local(64)", "A few tokens that all see: questions."
    ),
    Entry("longformer", "longformer(128, 64)", "Long documents: a window and global tokens."),
    Entry("bigbird", "bigbird(3, 1, 2)", "Long documents: window, global and random blocks."),
    Entry("butterfly", "butterfly()", "log N blocks a row; all connected in log N layers."),
    Entry("random", "random(0.125)", "Expander-like mixing, and the fair test of a kernel."),
    Entry("neighborhood2d", "neighborhood2d(4, 1)", "Images in patches: near in the plane."),
    Entry(
        "documents",
        "documents([300, 500, 224], pattern='causal')",
        "Packed sequences that must not mix.",
    ),
    Entry(
        "tree",
        "tree([-1, 0, 0, 1, 1, 2, 2, 3], prefix_len=56)",
        "Speculative decoding: a tree of 8 drafted tokens over a cached prefix.",
        seq_len=(8, 64),
        block_size=16,
    ),
    Entry(
        "Causal window with sinks",
        "(local(128) | global_tokens(16)) & causal()",
        "Streaming language models (StreamingLLM).",
    ),
    Entry("Dense near, sparse far", "(local(64) | butterfly()) & causal()", "Detail and reach."),
]


@dataclass(frozen=True)
class Section:
    """The section of a page about one entry.

    Attributes:
        entry: The entry.
        figures: Figures about cost and receptive field, by name.
        pictures: Contents of the pictures by suffix, "png" and "svg".
    """

    entry: Entry
    figures: dict[str, str]
    pictures: dict[str, bytes]


def sections(entries: Sequence[Entry]) -> Iterator[Section]:
    """Yields the sections of a page.

    Args:
        entries: What the page shows, in order.

    Returns:
        An iterator: a mask is built, and its pictures are drawn, when its section is taken.

    Raises:
        ValueError: The mask of an entry cannot be built.
    """
    for entry in entries:
        try:
            mask = entry.build()
        except UNREADABLE as error:
            raise ValueError(f"{entry.title} cannot be built: {error}") from error
        figures = plot.figures(mask)
        reach = None
        if mask.seq_len[0] == mask.seq_len[1]:
            samples = SAMPLES if mask.partial_blocks and mask.seq_len[0] > 1 << 15 else None
            reach = receptive_field(mask, LAYERS, samples=samples)
            figures["connected after 1, 2, 4 layers"] = ", ".join(
                f"{reach.share[min(layer, reach.layers) - 1]:.3g}" for layer in (1, 2, 4)
            )
            figures["layers to full connectivity"] = str(reach.full_after or f"over {LAYERS}")
        yield Section(entry, figures, _pictures(_overview(mask, reach)))


def of_module(path: Path, seq_len: Any = 4096, block_size: Any = 128) -> list[Entry]:
    """Runs a Python file, and makes an entry of every Pattern that it defines.

    Args:
        path: The file.
        seq_len: Length in tokens, one number or (q_len, k_len).
        block_size: Block size in tokens, one number or (bq, bk).

    Returns:
        The entries, in the order of the file.

    Raises:
        ValueError: The file does not exist or defines no Pattern.
    """
    patterns = {name: v for name, v in run_file(path).items() if isinstance(v, Pattern)}
    if not patterns:
        raise ValueError(f"module {path} defines no Pattern")
    return [
        Entry(name, pattern, f"{path}:{name}", seq_len, block_size)
        for name, pattern in patterns.items()
    ]


def page(shown: Sequence[Section]) -> str:
    """The page as HTML, which refers to the pictures in its folder."""
    parts = []
    for section in shown:
        entry, name = section.entry, section.entry.file_name
        rows = "".join(
            f"<tr><th>{html.escape(key)}</th><td>{html.escape(value)}</td></tr>"
            for key, value in section.figures.items()
        )
        expression = html.escape(str(entry.pattern))
        parts.append(
            f'<section id="{name}"><h2>{html.escape(entry.title)}</h2>'
            f"<p><code>{expression}</code></p><p>{html.escape(entry.good_for)}</p>"
            f'<a href="{name}.svg"><img src="{name}.png" alt="{expression}"></a>'
            f"<table>{rows}</table></section>"
        )
    links = " · ".join(
        f'<a href="#{s.entry.file_name}">{html.escape(s.entry.title)}</a>' for s in shown
    )
    return _PAGE.format(links=links, sections="\n".join(parts), legend=LEGEND)


LEGEND = (
    "Rows are queries, columns are keys. Full blocks are dark, attended pairs of partial blocks "
    "lighter, masked pairs of partial blocks grey, and empty blocks, which are not computed, "
    "white. With more than four million pairs or several heads, the shade of a cell is the share "
    "of its pairs that attend. The second picture shows the number of non-zero blocks in each "
    "block row, the third the share of connected pairs over the layers, with its 95 % interval if "
    "keys are sampled."
)
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Patterns</title>
<meta name="viewport" content="width=device-width">
<style>
body {{ font-family: sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem }}
img {{ width: 100% }}
th {{ text-align: left; font-weight: normal; padding-right: 2rem }}
</style></head><body>
<h1>Patterns</h1>
<p>{legend}</p>
<nav>{links}</nav>
{sections}
</body></html>
"""


def write(folder: Path, shown: Sequence[Section]) -> Path:
    """Writes index.html and the pictures to a folder.

    Args:
        folder: The folder, which is created if it does not exist.
        shown: The sections of the page.

    Returns:
        The path of the page.

    Raises:
        OSError: A file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for section in shown:
        for suffix, content in section.pictures.items():
            (folder / f"{section.entry.file_name}.{suffix}").write_bytes(content)
    (folder / "index.html").write_text(page(shown))
    return folder / "index.html"


@dataclass(frozen=True)
class Difference:
    """How two masks of one grid differ.

    Attributes:
        both, only_a, only_b: Pairs that attend in both, and in one of them alone.
        figures: plot.figures of both masks, by name.
        pictures: A picture, by suffix: "png" and "svg".
    """

    both: int
    only_a: int
    only_b: int
    figures: dict[str, tuple[str, str]]
    pictures: dict[str, bytes]


def difference(a: BlockMask, b: BlockMask, names: tuple[str, str] = ("A", "B")) -> Difference:
    """Compares two masks.

    Args:
        a, b: The masks, with equal lengths, block size and number of heads.
        names: Their names in the picture.

    Returns:
        The difference, with a picture.

    Raises:
        ValueError: Lengths, block sizes or numbers of heads differ.
    """
    parts = a & b, a - b, b - a
    labels = "both", f"only {names[0]}", f"only {names[1]}"
    figures = zip(plot.figures(a).items(), plot.figures(b).values(), strict=True)
    return Difference(
        *map(attended_pairs, parts),
        figures={name: (of_a, of_b) for (name, of_a), of_b in figures},
        pictures=_pictures(_difference_picture(parts, labels)),
    )


def _overview(mask: BlockMask, reach):
    from matplotlib.figure import Figure  # it takes longer to import than masks itself

    figure = Figure(figsize=(10.8, 3.6), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    if mask.num_heads == 1 and mask.seq_len[0] * mask.seq_len[1] <= PAIRS:
        _draw_pairs(left, mask)
    else:
        _draw_cells(left, mask, {BLUE: _shares(mask)})
    _draw_rows(middle, mask)
    if reach is None:
        right.text(0.5, 0.5, "queries and keys differ in number", ha="center", va="center")
        right.set_axis_off()
        return figure
    share = [*reach.share, *[reach.share[-1]] * (LAYERS - reach.layers)]
    interval = [*reach.interval, *[reach.interval[-1]] * (LAYERS - reach.layers)]
    errors = [[s - low, high - s] for s, (low, high) in zip(share, interval, strict=True)]
    layers = range(1, LAYERS + 1)
    right.errorbar(layers, share, [*zip(*errors, strict=True)], marker="o", color=BLUE, capsize=2)
    pairs = "causal pairs" if reach.causal else "pairs"
    right.set(xlabel="layers", ylabel=f"share of {pairs} connected", ylim=(0, 1.05))
    right.xaxis.get_major_locator().set_params(integer=True)
    return figure


def _draw_rows(axes, mask: BlockMask) -> None:
    per_row = mask.blocks_per_row().double().mean(0).cpu()
    edges = torch.arange(len(per_row) + 1) * mask.block_size[0]
    # An edge line keeps a bar visible that is thinner than a pixel.
    steps = per_row.numpy(), edges.clamp(max=mask.seq_len[0]).numpy()
    axes.stairs(*steps, fill=True, facecolor=BLUE, edgecolor=BLUE, linewidth=1)
    label = "non-zero blocks of the row"
    if mask.num_heads > 1:
        label += f", mean of {mask.num_heads} heads"
    axes.set(xlabel="query (tokens)", ylabel=label, ylim=(0, None))
    if per_row.max() > STEEP * per_row.median():
        axes.set(yscale="log", ylim=(0.5, None))
    else:
        axes.yaxis.get_major_locator().set_params(integer=True)
    plot.in_thousands(axes.xaxis)


def _draw_pairs(axes, mask: BlockMask) -> None:
    from matplotlib.colors import to_rgb

    pairs = mask.to_dense().cpu()
    bq, bk = mask.block_size
    share = avg_pool2d(pairs.float()[None], (bq, bk), ceil_mode=True)[0]
    share = share.repeat_interleave(bq, 0).repeat_interleave(bk, 1)
    share = share[: pairs.shape[0], : pairs.shape[1]]
    kind = (share > 0).int() + pairs.int() + (share == 1).int()
    _show(axes, torch.tensor([to_rgb(kind) for kind in KINDS])[kind], mask)


def _shares(mask: BlockMask) -> Tensor:
    """The share of heads that attend each pair; of many pairs, of the pairs of each cell."""
    few = mask.seq_len[0] * mask.seq_len[1] <= PAIRS
    total = sum(
        mask.head(h).to_dense().float() if few else plot.cell_density(mask, plot.MAX_CELLS, h)
        for h in range(mask.num_heads)
    )
    return torch.as_tensor(total) / mask.num_heads


def _draw_cells(axes, mask: BlockMask, shares: dict[str, Tensor]) -> None:
    """Cells of many blocks, white and the more of each colour the larger its share."""
    from matplotlib.colors import to_rgb

    picture = torch.ones(*next(iter(shares.values())).shape, 3)
    for colour, share in shares.items():
        picture -= plot.shades(share)[..., None] * (1 - torch.tensor(to_rgb(colour)))
    _show(axes, picture.clamp(0, 1), mask)


def _show(axes, picture: Tensor, mask: BlockMask) -> None:
    """Red, green and blue of pairs or cells: those below a pixel are averaged, none is lost."""
    q_len, k_len = mask.seq_len
    pairs = picture.shape[:2] == mask.seq_len
    extent = (0, k_len, q_len, 0) if pairs else plot.extent(mask, picture)
    axes.imshow(picture.numpy(), extent=extent, interpolation="antialiased", aspect="auto")
    plot.label(axes, mask)


def _difference_picture(parts: Sequence[BlockMask], labels: Sequence[str]):
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(5, 5.4), layout="constrained")
    axes = figure.subplots()
    colours = (GREY, BLUE, VERMILION)
    _draw_cells(axes, parts[0], dict(zip(colours, map(_shares, parts), strict=True)))
    patches = [Patch(color=c, label=name) for c, name in zip(colours, labels, strict=True)]
    patches.append(Patch(color="none", label="a cell of many pairs mixes these colours"))
    legend = figure.legend(
        handles=patches, loc="outside upper left", fontsize="small", frameon=False
    )
    for text in legend.get_texts():
        text.set_parse_math(False)  # names may have dollar signs
    return figure


def _pictures(figure) -> dict[str, bytes]:
    """The figure as PNG and as SVG; the same figure gives the same bytes."""
    from matplotlib import rc_context

    pictures = {}
    with rc_context({"svg.hashsalt": "masks"}):
        for suffix, metadata in (("png", {"Software": None}), ("svg", {"Date": None})):
            file = io.BytesIO()
            figure.savefig(file, format=suffix, dpi=DPI[suffix], metadata=metadata)
            pictures[suffix] = file.getvalue()
    return pictures
