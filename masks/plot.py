"""Pictures and figures of a mask."""

import math
from pathlib import Path

import torch
from torch import Tensor

from masks._core.bit_tiles import unpack
from masks.block_mask import BlockMask

_SHADES = " ░▒▓█"


def figures(mask: BlockMask) -> dict[str, str]:
    """What the mask costs: density, blocks per row, partial blocks, distinct tiles, bytes of
    lookup table.
    """
    per_row = mask.blocks_per_row().flatten()
    low, middle, high = (int(f(per_row)) for f in (torch.min, torch.median, torch.max))
    return {
        "sequence length": " x ".join(f"{n:,}" for n in mask.seq_len),
        "block size": " x ".join(map(str, mask.block_size)),
        "density": f"{mask.density:.4g}",
        "non-zero blocks": f"{mask.nnz_blocks:,}",
        "blocks per row": f"{low} min, {middle} median, {high} max",
        "partial blocks": f"{mask.partial_blocks:,}",
        "distinct tiles": f"{mask.num_bit_tiles:,}",
        "lookup table": f"{mask.table().nbytes / 1024:.1f} KiB",
    }


def cell_density(mask: BlockMask, most: int) -> Tensor:
    """float32 (rows, columns), each at most `most`: the fraction of pairs set in each cell of the
    first head.
    """
    g = mask.grid
    blocks = mask.head(0).block_set
    set_pairs = unpack(blocks.coded_tiles(), g.bk).float().mean((1, 2))
    density = set_pairs[blocks.tile_code_grid()]
    step_q, step_k = (math.ceil(n / most) for n in density.shape)
    return torch.nn.functional.avg_pool2d(density[None], (step_q, step_k), ceil_mode=True)[0]


def text(mask: BlockMask, most: int = 48) -> str:
    """The mask in block characters, darker where more pairs are set; queries go down, keys to the
    right.
    """
    cells = (cell_density(mask, most) * (len(_SHADES) - 1)).ceil().int()
    return "\n".join("".join(_SHADES[c] * 2 for c in row) for row in cells.tolist())


def save(mask: BlockMask, path: Path, title: str) -> None:
    """Writes a PNG of the first head: one cell a block (fewer when there are more than 1024),
    darker when fuller.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 5), layout="constrained")
    axes = figure.subplots()
    extent = (0, mask.seq_len[1], mask.seq_len[0], 0)
    cells = cell_density(mask, 1024).numpy()
    axes.imshow(cells, cmap="Blues", vmin=0, vmax=1, extent=extent, interpolation="nearest")
    axes.set(
        title=f"{title}, density {mask.density:.3g}",
        xlabel="key (tokens)",
        ylabel="query (tokens)",
    )
    figure.savefig(path, dpi=150)
