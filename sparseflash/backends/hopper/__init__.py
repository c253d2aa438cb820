"""The backend "hopper": Gluon kernels for GPUs of compute capability 9.0.

`why_not`, `forward` and `backward` make a sparseflash.backends.Backend. Triton is imported by the
first call that needs it, so this package can be imported where Triton is not installed.
"""

from functools import lru_cache
from importlib.util import find_spec

import torch
from torch import Tensor

from masks.lookup_table import LookupTable
from sparseflash.spec import AttentionSpec

DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128)
FAST_HEAD_DIMS = (128,)
BLOCK_SIZE = (128, 128)
CAPABILITY = (9, 0)


def why_not(spec: AttentionSpec) -> list[str]:
    """The reasons for which the kernels cannot serve a call; empty when they can."""
    if find_spec("triton") is None:
        return ["triton is not installed"]
    reasons = []
    if spec.device.type != "cuda":
        reasons.append(f"device is {spec.device}, needs cuda")
    elif (found := _capability(spec.device)) != CAPABILITY:
        found, needed = ("{}.{}".format(*version) for version in (found, CAPABILITY))
        reasons.append(f"compute capability is {found}, needs {needed}")
    if spec.dtype not in DTYPES:
        reasons.append(f"dtype is {spec.dtype}, needs one of {DTYPES}")
    if spec.head_dim not in HEAD_DIMS:
        reasons.append(f"head_dim is {spec.head_dim}, needs one of {HEAD_DIMS}")
    if spec.block_size != BLOCK_SIZE:
        reasons.append(f"block_size is {spec.block_size}, needs {BLOCK_SIZE}")
    if spec.dropout_p:
        reasons.append(f"dropout_p is {spec.dropout_p}, needs 0: the kernels have no dropout")
    return reasons


def pass_over(spec: AttentionSpec) -> list[str]:
    """The reasons for which "auto" should look for another backend; empty when this is faster."""
    reasons = []
    if spec.head_dim not in FAST_HEAD_DIMS:
        reasons.append(f"head_dim is {spec.head_dim}, at which others are as fast")
    if spec.few_queries:
        reasons.append(f"q_len is {spec.q_len}, which leaves most of a tile empty")
    return reasons


@lru_cache(maxsize=64)
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    table: LookupTable,
    key_lengths: Tensor | None,
    seed: int,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor]:
    """(out, lse); see sparseflash.backends.Backend."""
    from sparseflash.backends.hopper import forward_pass

    return forward_pass.forward(query, key, value, table, key_lengths, spec)


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    table: LookupTable,
    key_lengths: Tensor | None,
    seed: int,
    spec: AttentionSpec,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(grad_query, grad_key, grad_value); see sparseflash.backends.Backend."""
    from sparseflash.backends.hopper import backward_pass

    saved = (query, key, value, out, lse)
    return backward_pass.backward(grad_out, grad_lse, *saved, table, key_lengths, spec, needs)
