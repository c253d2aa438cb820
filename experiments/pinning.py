"""Copies in pinned memory, from which a GPU copies while the host continues."""

import numpy as np
import torch
from torch import Tensor


def pinned(tensor: Tensor) -> Tensor:
    """A copy in pinned memory, made by the calling thread alone.

    `Tensor.pin_memory` copies more than 32,767 elements with all threads of torch, one for each
    core. After a copy they wait for the next one in a loop, so that trainings that share a machine
    take one another's cores in every step.

    Args:
        tensor: A tensor on the CPU, of a dtype that numpy has.

    Raises:
        RuntimeError: There is no accelerator.
    """
    copy = torch.empty_like(tensor, pin_memory=True)
    np.copyto(copy.numpy(), tensor.numpy())
    return copy
