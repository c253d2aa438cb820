"""The embedded default: vectorised PyTorch that really skips the empty blocks, both ways."""

import torch

from sparseflash.backends.cpu.passes import backward, forward
from sparseflash.dispatch.spec import AttentionSpec

__all__ = ["backward", "forward", "why_not"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def why_not(spec: AttentionSpec) -> list[str]:
    """The reasons for which the cpu backend cannot serve a call; empty when it can."""
    reasons = []
    if spec.device.type != "cpu":
        reasons.append(f"needs CPU tensors, got {spec.device}")
    if spec.dtype not in _DTYPES:
        reasons.append(f"needs one of {', '.join(map(str, _DTYPES))}, got {spec.dtype}")
    return reasons
