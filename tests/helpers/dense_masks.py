"""Random masks for hypothesis, as dense tensors."""

import torch
from hypothesis import strategies as st

SIDES = (16, 32, 64, 128)


@st.composite
def dense_masks(draw, heads=False):
    """A bool tensor of any length, built of blocks so that full, partial and empty ones all
    occur.
    """
    q_len, k_len = draw(st.integers(1, 150)), draw(st.integers(1, 150))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    cell = draw(st.sampled_from([1, 16, 40]))
    shape = (draw(st.integers(1, 3)),) if heads else ()
    coarse = torch.rand(*shape, -(-q_len // cell), -(-k_len // cell), generator=generator)
    coarse = coarse < draw(st.sampled_from([0.0, 0.2, 0.6, 1.0]))
    return coarse.repeat_interleave(cell, -2).repeat_interleave(cell, -1)[..., :q_len, :k_len]


block_sizes = st.tuples(st.sampled_from(SIDES), st.sampled_from(SIDES))
