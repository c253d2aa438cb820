"""What a call does not do while a CUDA graph is captured."""

import torch

from masks._core.grid import is_captured


def check_not_captured(device: torch.device) -> None:
    """Raises RuntimeError while a CUDA graph is captured, for what first calls alone do."""
    if is_captured(device):
        raise RuntimeError(
            "the first call with a plan and its options, and one with check=True, cannot be "
            "captured in a CUDA graph, as it copies tables to the GPU and compares the arguments "
            "of ranks: call once before, and then without check=True"
        )
