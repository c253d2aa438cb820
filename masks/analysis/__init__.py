"""What a stack of masks can see: receptive fields, path lengths, spectral gaps, never N x N.

A layer attends by one mask. Its heads are united, since the next layer reads all of them, and the
residual stream keeps what a token already has. All is exact to the pair: partial blocks count by
their element masks. Tokens of one block that attend the same keys and are attended by the same
queries in every layer form one class. A mask of full blocks has one class a block, a causal one
a class a token. Work and memory grow with classes, runs of classes and followed tokens.
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
