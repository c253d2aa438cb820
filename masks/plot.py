"""Pictures and figures of a mask."""

import math
import textwrap
from pathlib import Path

import torch
from torch import Tensor

from masks._core.bit_tiles import unpack
from masks.arguments import check_integer
from masks.block_mask import BlockMask
from masks.mask_batch import check_block_mask

_SHADES = " ░▒▓█"
MAX_CELLS = 512  # fewer than the pixels of a picture, so that every cell is visible
MAX_PICTURES = 16
COLUMNS = 80  # of a terminal
FORMATS = (".png", ".svg", ".pdf")
FAINTEST = (
    0.3  # least shade of a non-empty cell: a row of global tokens among a million is visible
)


def check_picture(name: str, path: Path | None) -> None:
    """Raises ValueError if the suffix is not one of FORMATS or the folder does not exist."""
    if path is None:
        return
    if path.suffix not in FORMATS:
        raise ValueError(f"{name} must end in {', '.join(FORMATS)}, got {path}")
    if not path.parent.is_dir():
        raise ValueError(f"{name} must be in a folder that exists, got {path}")


def figures(mask: BlockMask) -> dict[str, str]:
    """Figures of a mask, by name: density, blocks per row, partial blocks, size of the table."""
    per_row = mask.blocks_per_row().flatten()
    low, middle, high = (int(f(per_row)) for f in (torch.min, torch.median, torch.max))
    return {
        "sequence length": " x ".join(f"{n:,}" for n in mask.seq_len),
        "block size": " x ".join(map(str, mask.block_size)),
        "density": f"{mask.density:.4g}",
        "non-zero blocks": f"{mask.nnz_blocks:,}",
        "blocks per row": f"{low} min, {middle} median, {high} max",
        "partial blocks": f"{mask.partial_blocks:,}",
        "bit tiles": f"{mask.num_bit_tiles:,}",
        "lookup table": f"{mask.table().nbytes / 1024:.1f} KiB",
    }


def cell_density(mask: BlockMask, most: int, head: int = 0) -> Tensor:
    """The share of attending pairs in each cell of whole blocks.

    Returns:
        float32 (rows, columns), at most `most` of each.
    """
    g, blocks = mask.grid, mask.head(head).block_set
    step_q, step_k = _blocks_per_cell(mask, most)
    first_query = _first_tokens(g.q_len, step_q * g.bq, g.device)
    first_key = _first_tokens(g.k_len, step_k * g.bk, g.device)
    queries, keys = first_query.diff(), first_key.diff()
    # `opened` has the queries that attend from a cell on: a cumulative sum, to which a run of full
    # blocks adds in the cell where it begins and from which it subtracts in the cell where it
    # ends. `before` has the pairs of such a cell before this begin or end. No array has an entry
    # for each block column.
    shape = (2, len(queries), len(first_key))
    opened, before = torch.zeros(shape, dtype=torch.int64, device=g.device)
    _, row, begin, end = g.locate_runs(blocks.full)
    in_row = (g.q_len - row * g.bq).clamp(max=g.bq)
    for column, change in ((begin, in_row), (end, -in_row)):
        cell = (row // step_q, column // step_k)
        skipped = (column * g.bk).clamp(max=g.k_len) - first_key[cell[1]]
        opened.index_put_(cell, change, accumulate=True)
        before.index_put_(cell, change * skipped, accumulate=True)
    pairs = opened.cumsum(1)[:, :-1] * keys - before[:, :-1]
    _, row, column = g.locate(blocks.partial)
    in_tile = unpack(blocks.bit_tiles, g.bk).sum((1, 2))[blocks.partial_bit_tile]
    pairs.index_put_((row // step_q, column // step_k), in_tile, accumulate=True)
    return pairs / (queries[:, None] * keys)


def _first_tokens(length: int, step: int, device: torch.device) -> Tensor:
    """The first token of each cell of `step` tokens, and `length` at the end."""
    return torch.arange(0, length + step, step, device=device).clamp(max=length)


def _blocks_per_cell(mask: BlockMask, most: int) -> tuple[int, int]:
    return math.ceil(mask.grid.nq / most), math.ceil(mask.grid.nk / most)


def text(mask: BlockMask, most: int = COLUMNS // 2) -> str:
    """The mask of the first head as text; rows are queries, columns are keys.

    A character is darker if more pairs attend, and blank only if none does.

    Args:
        mask: The mask.
        most: Largest number of rows and of columns, each column of two characters.

    Returns:
        A line for each row, without a line break at the end.

    Raises:
        TypeError: `mask` is not a BlockMask, or `most` is not an integer.
        ValueError: `most` is below 1.
    """
    check_block_mask(mask)
    most = check_integer("most", most, least=1)
    cells = (cell_density(mask, most) * (len(_SHADES) - 1)).ceil().int()
    return "\n".join("".join(_SHADES[c] * 2 for c in row) for row in cells.tolist())


def save(mask: BlockMask, path: Path | str, title: str) -> None:
    """Writes a picture with one cell for each block, or at most 512 cells in a row.

    A cell is darker if more of its pairs attend. Each distinct mask of a head gets a picture, up
    to MAX_PICTURES.

    Args:
        mask: The mask.
        path: The file, whose suffix is one of FORMATS.
        title: Title of the picture.

    Raises:
        TypeError: `mask` is not a BlockMask.
        ValueError: The suffix of `path` is another one, or its folder does not exist.
        OSError: The file cannot be written.
    """
    check_block_mask(mask)
    check_picture("path", Path(path))
    from matplotlib.figure import Figure  # it takes longer to import than masks itself

    masks = range(min(mask.num_masks, MAX_PICTURES))
    width = math.ceil(math.sqrt(len(masks)))
    height = math.ceil(len(masks) / width)
    figure = Figure(figsize=(5 * width, 5 * height), layout="constrained")
    for m in masks:
        heads = [h for h, own in enumerate(mask.head_to_mask) if own == m]
        axes = figure.add_subplot(height, width, m + 1)
        _draw(axes, mask, heads[0])
        if mask.num_heads > 1:
            axes.set_title(textwrap.shorten(f"head {', '.join(map(str, heads))}", 40))
    lines = textwrap.wrap(title, 48 * width, max_lines=3, placeholder=" ...")
    lines.append(f"density {mask.density:.3g}")
    if mask.num_masks > len(masks):
        lines.append(f"the first {len(masks)} of {mask.num_masks} masks")
    figure.suptitle("\n".join(lines), fontsize="medium", parse_math=False)
    figure.savefig(path, dpi=150)


def _draw(axes, mask: BlockMask, head: int) -> None:
    cells = cell_density(mask, MAX_CELLS, head)
    look = {"cmap": "Blues", "vmin": 0, "vmax": 1, "interpolation": "nearest"}
    axes.imshow(shades(cells).numpy(), extent=extent(mask, cells), **look)
    axes.spines[:].set(zorder=-1, color="lightgrey")  # it hides no cell of the first tokens
    label(axes, mask)


def shades(shares: Tensor) -> Tensor:
    """Shades of cells, 0 to 1, from the shares that attend; 0 only if no pair attends."""
    return torch.where(shares > 0, FAINTEST + (1 - FAINTEST) * shares, 0).cpu()


def extent(mask: BlockMask, cells: Tensor) -> tuple[int, int, int, int]:
    """The extent of all cells in tokens; the last cells may extend past the sequence."""
    step_q, step_k = _blocks_per_cell(mask, MAX_CELLS)
    return 0, cells.shape[1] * step_k * mask.grid.bk, cells.shape[0] * step_q * mask.grid.bq, 0


def label(axes, mask: BlockMask) -> None:
    """Labels the axes, with queries as rows and keys as columns, up to the end of the sequence."""
    q_len, k_len = mask.seq_len
    axes.set(xlabel="key (tokens)", ylabel="query (tokens)", xlim=(0, k_len), ylim=(q_len, 0))
    for axis in (axes.xaxis, axes.yaxis):
        in_thousands(axis)


def in_thousands(axis) -> None:
    """Formats the tokens of an axis as 512, 1k, 2k."""
    from matplotlib.ticker import EngFormatter

    axis.set_major_formatter(EngFormatter(sep=""))
    axis.get_major_locator().set_params(integer=True)
