"""The gallery: a page with a picture of every built-in pattern.

    python docs/gallery.py FOLDER

writes it to a folder; the site makes it anew at every build.
"""

import io
import sys
from pathlib import Path
from typing import NamedTuple

from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from torch.nn.functional import avg_pool2d

import masks
from masks import BlockMask

TOKENS, BLOCK = 1024, 64
# Colours of: empty blocks; masked pairs of partial blocks; attended pairs of those; full blocks.
COLOURS = ["#ffffff", "#dde3ea", "#6d9bd1", "#1f4e8c"]
INTRODUCTION = f"""# Patterns

Every built-in pattern, at {TOKENS:,} tokens in blocks of {BLOCK} where the axes do not say
otherwise. Queries go down, keys to the right. Full blocks are dark, attended pairs of partial
blocks lighter, masked pairs of partial blocks grey, empty blocks white: what is white costs
nothing. Density s is the share of blocks that are not white.

Patterns combine: `a & b`, `a | b`, `a - b`, `a ^ b`, `~a`; `masks.stack([...])` gives each head
its own. `python -m masks "local(256) | butterfly()"` draws any expression.
"""


class Entry(NamedTuple):
    """One picture: an expression that makes the pattern, and what it is good for."""

    expression: str
    good_for: str
    seq_len: int | tuple[int, int] = TOKENS
    block_size: int = BLOCK


# By the name of the built-in pattern.
ENTRIES = {
    "full": Entry("full()", "Dense attention, through the same kernels. The baseline."),
    "causal": Entry("causal()", "Language models: a token sees itself and the past."),
    "local": Entry(
        "local(128)", "Sliding window: text, audio, time series, where near is related."
    ),
    "dilated": Entry(
        "dilated(4, 16)", "A wider view with few keys; every block in reach is partial."
    ),
    "strided": Entry(
        "strided(4, window=1)", "Sparse Transformer: periodic structure, rows of images."
    ),
    "global_tokens": Entry(
        "global_tokens(64) | local(64)", "A few tokens that all see: classification, questions."
    ),
    "longformer": Entry("longformer(128, 64)", "Long documents: a window and global tokens."),
    "bigbird": Entry("bigbird(3, 1, 2)", "Long documents: window, global and random blocks."),
    "butterfly": Entry(
        "butterfly()", "log N blocks a row, and all tokens connected in log N layers."
    ),
    "random": Entry("random(0.125)", "Expander-like mixing, and the fair test of a kernel."),
    "neighborhood2d": Entry("neighborhood2d(4, 1)", "Images in patches: near in the plane."),
    "documents": Entry(
        "documents([300, 500, 224], pattern='causal')", "Packed sequences that must not mix."
    ),
    "tree": Entry(
        "tree([-1, 0, 0, 1, 1, 2, 2, 3], prefix_len=56)",
        "Speculative decoding: a tree of 8 drafted tokens over a cached prefix.",
        seq_len=(8, 64),
        block_size=16,
    ),
}
COMBINATIONS = {
    "Causal window with sinks": Entry(
        "(local(128) | global_tokens(16)) & causal()", "Streaming language models (StreamingLLM)."
    ),
    "Dense near, sparse far": Entry(
        "(local(64) | butterfly()) & causal()", "Detail near, reach far."
    ),
}


def pages() -> dict[str, str | bytes]:
    """The files of the gallery: gallery.md and its pictures, by their paths in the site."""
    files: dict[str, str | bytes] = {}
    sections = [INTRODUCTION]
    for title, entry in (ENTRIES | COMBINATIONS).items():
        path = f"gallery/{title.lower().replace(' ', '-').replace(',', '')}.png"
        mask = masks.parse(entry.expression)(entry.seq_len, entry.block_size)
        files[path] = picture(mask)
        sections.append(section(title, entry, mask, path))
    return files | {"gallery.md": "\n".join(sections)}


def section(title: str, entry: Entry, mask: BlockMask, path: str) -> str:
    """The Markdown of one picture."""
    heading, reference = title, ""
    if title in ENTRIES:
        heading = f"`{title}`"
        reference = f" Reference: [`masks.{title}`](api/patterns.md#masks.{title})."
    figures = f"density {mask.density:.3g}, {mask.partial_blocks} partial blocks"
    return (
        f"## {heading}\n\n`{entry.expression}`: {figures}. {entry.good_for}{reference}\n\n"
        f'![{entry.expression}]({path}){{ width="360" }}\n'
    )


def picture(mask: BlockMask) -> bytes:
    """A PNG of the pairs of a mask, coloured by the kind of their block."""
    pairs = mask.to_dense()
    bq, bk = mask.block_size
    share = avg_pool2d(pairs.float()[None], (bq, bk), ceil_mode=True)[0]
    share = share.repeat_interleave(bq, 0).repeat_interleave(bk, 1)
    share = share[: pairs.shape[0], : pairs.shape[1]]
    kind = (share > 0).int() + pairs.int() + (share == 1).int()
    figure = Figure(figsize=(3.6, 3.6), layout="constrained")
    axes = figure.subplots()
    colours = ListedColormap(COLOURS)
    axes.imshow(kind, cmap=colours, vmin=0, vmax=3, interpolation="nearest", aspect="auto")
    axes.set(xlabel="key (tokens)", ylabel="query (tokens)")
    file = io.BytesIO()
    figure.savefig(file, dpi=100, format="png")
    return file.getvalue()


def main(folder: Path) -> None:
    for path, content in pages().items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content.encode() if isinstance(content, str) else content)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
