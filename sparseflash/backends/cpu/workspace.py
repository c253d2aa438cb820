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
        self._last: dict[tuple[str, torch.dtype], Tensor] = {}  # to make a view takes time

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor in the memory of the last one with this name and dtype, which it replaces."""
        last = self._last.get((name, dtype))
        if last is not None and last.shape == shape:
            return last
        size = math.prod(shape)
        memory = self._memory.get((name, dtype))
        if memory is None or memory.numel() < size:
            with torch.inference_mode(False):  # a tensor of inference mode cannot be written later
                memory = torch.empty(size, dtype=dtype, device="cpu")
            self._memory[name, dtype] = memory
        self._last[name, dtype] = memory[:size].view(shape)
        return self._last[name, dtype]

    def trim(self, elements: int):
        """Frees the memory of larger tensors."""
        large = [key for key, memory in self._memory.items() if memory.numel() > elements]
        for key in large:
            del self._memory[key], self._last[key]


workspace = Workspace()
