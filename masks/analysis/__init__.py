"""Receptive fields, path lengths and spectral gaps of a stack of masks, without N x N matrices.

Each layer attends by one mask. Heads of a layer are united, since the next layer reads all of
them. A token is always connected with itself, since the residual stream carries what it has. All
results are exact to the pair: partial blocks count by their element masks.

Tokens of one block form a class if they attend the same keys and are attended by the same queries
in every layer. A mask of full blocks has one class for each block, a causal mask one for each
token. Work and memory grow with the number of classes, of runs of classes and of followed tokens.
"""

from masks.analysis.reach import PixelReach, ReceptiveField, hops, pixel_reach, receptive_field
from masks.analysis.spectrum import spectral_gap

__all__ = [
    "PixelReach",
    "ReceptiveField",
    "hops",
    "pixel_reach",
    "receptive_field",
    "spectral_gap",
]
