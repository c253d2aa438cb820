"""Scratch memory that calls of one thread reuse.

New memory causes a page fault every 4 KB, which takes as much time as the product that fills it.
"""

import math
import threading

import torch
from torch import Tensor


class Workspace(threading.local):
    """Named scratch tensors with undefined contents, separate for each thread."""

    def __init__(self):
        self._memory: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor in the memory of the last one with this name and dtype, which it replaces."""
        size = math.prod(shape)
        memory = self._memory.get((name, dtype))
        if memory is None or memory.numel() < size:
            with torch.inference_mode(False):  # a tensor of inference mode cannot be written later
                memory = torch.empty(size, dtype=dtype, device="cpu")
            self._memory[name, dtype] = memory
        return memory[:size].view(shape)

    def trim(self, elements: int):
        """Frees the memory of larger tensors."""
        self._memory = {key: m for key, m in self._memory.items() if m.numel() <= elements}


workspace = Workspace()
