"""Tokens that are pixels: the orders in which a sequence may take them."""

import torch
from torch import Tensor

from experiments.lra.tasks import Shape


def order_of(shape: Shape, order: str, tile: tuple[int, int]) -> Tensor | None:
    """Which pixel of the image, in raster order, each token is; None for raster order itself.

    "tiles" takes the image tile by tile, so that a block of tile rows x columns tokens is a patch
    and not a part of a row. That is knowledge of the plane which raster order does not give.
    Raises ValueError for text, and for tiles that do not fill the image.
    """
    if order == "raster":
        return None
    if shape.side is None:
        raise ValueError("order 'tiles' is for images, this task is text")
    return tile_order(shape.side, tile)


def tile_order(side: int, tile: tuple[int, int]) -> Tensor:
    rows, columns = tile
    if rows < 1 or columns < 1 or side % rows or side % columns:
        raise ValueError(f"tile must divide an image of {side} x {side} pixels, got {tile}")
    pixels = torch.arange(side * side).view(side // rows, rows, side // columns, columns)
    return pixels.transpose(1, 2).flatten()
