"""The arguments of the public functions, checked before anything is computed."""

import math
from numbers import Integral, Real

import torch
from torch import Tensor

from masks import BlockMask, DynamicMask, Pattern, full
from masks.arguments import check_floating
from sparseflash.score import ScoreFunction, named

AnyMask = Pattern | BlockMask | DynamicMask
FULL = full()
PRECISIONS = ("ieee", "tf32")
MADE_BY = {Tensor: "masks.BlockMask.from_dense", str: "masks.parse"}


def checked_tensors(
    query: Tensor, key: Tensor, value: Tensor, key_lengths: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(query, key, value), cast if autocast says so."""
    query, key, value = autocast(query, key, value)
    check_tensors(query, key, value)
    if key_lengths is not None:
        check_key_lengths(key_lengths, query)
    return query, key, value


def checked_options(
    scale: float | None,
    softcap: float | None,
    score: ScoreFunction | str | None,
    dropout_p: float,
    precision: str,
    deterministic: bool,
) -> tuple[float | None, float, str | None, float, str, bool]:
    """The options as operators take them: the name of a score function stands for it."""
    return (
        _checked_positive("scale", scale),
        _checked_positive("softcap", softcap) or 0.0,
        _checked_score(score),
        _checked_dropout(dropout_p),
        _checked_precision(precision),
        _checked_deterministic(deterministic),
    )


def checked_bias(bias: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The bias as backends read it: float32 (float64 for float64 inputs), contiguous."""
    _check_of_heads("bias", bias, query, (query.shape[2] + key.shape[2] - 1,))
    return bias.to(torch.promote_types(query.dtype, torch.float32)).contiguous()


def check_sinks(sinks: Tensor, query: Tensor) -> None:
    _check_of_heads("sinks", sinks, query, ())


def _check_of_heads(name: str, tensor: Tensor, query: Tensor, rest: tuple[int, ...]) -> None:
    """Raises where the tensor is not floating-point (1 or heads, *rest) on the query's device."""
    check_floating(name, tensor)
    shapes = [(heads, *rest) for heads in (1, query.shape[1])]
    if tuple(tensor.shape) not in shapes or tensor.device != query.device:
        raise ValueError(
            f"{name} must be of shape {shapes[0]} or {shapes[1]} on {query.device}, got "
            f"{tuple(tensor.shape)} on {tensor.device}"
        )


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the dtype of autocast, as torch's own attention takes them."""
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"query, key and value must be tensors, got {type(tensor).__name__}")
    device_type = tensors[0].device.type
    if device_type == "meta":
        raise ValueError("query, key and value must have data, got tensors on meta")
    if not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(
        x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors
    )


def check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4 or 0 in tensor.shape:
            raise ValueError(
                f"{name} must be (batch, heads, seq, head_dim) with nothing empty, got "
                f"{tuple(tensor.shape)}"
            )
        if tensor.dtype != query.dtype or tensor.device != query.device:
            raise ValueError(
                f"{name} must be {query.dtype} on {query.device} like query, got {tensor.dtype} "
                f"on {tensor.device}"
            )
    if not query.dtype.is_floating_point:
        raise TypeError(f"query must be of a floating-point dtype, got {query.dtype}")
    if key.shape != value.shape:
        raise ValueError(
            f"value must have the shape of key, {tuple(key.shape)}, got {tuple(value.shape)}"
        )
    if key.shape[0] != query.shape[0] or key.shape[3] != query.shape[3]:
        raise ValueError(
            f"key must share batch and head_dim with query {tuple(query.shape)}, got "
            f"{tuple(key.shape)}"
        )
    if query.shape[1] % key.shape[1]:
        raise ValueError(
            f"key heads must divide the {query.shape[1]} query heads, got {key.shape[1]}"
        )


def check_key_lengths(lengths: Tensor, query: Tensor) -> None:
    if not isinstance(lengths, Tensor) or lengths.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            f"key_lengths must be an int32 or int64 tensor, got "
            f"{getattr(lengths, 'dtype', lengths)!r}"
        )
    devices = (query.device, torch.device("cpu"))
    if lengths.shape != query.shape[:1] or lengths.device not in devices:
        raise ValueError(
            f"key_lengths must be ({query.shape[0]},) on {query.device} or the CPU, got "
            f"{tuple(lengths.shape)} on {lengths.device}"
        )


def checked_mask(mask: AnyMask | None) -> AnyMask:
    if mask is None:
        return FULL
    if not isinstance(mask, AnyMask):
        maker = MADE_BY.get(type(mask))
        raise TypeError(
            "mask must be a Pattern, a BlockMask, a DynamicMask or None, got "
            f"{type(mask).__name__}" + (f", of which {maker} makes one" if maker else "")
        )
    return mask


def checked_block_scores(mask: AnyMask) -> Tensor | None:
    """The scores of a DynamicMask that want a gradient."""
    if not isinstance(mask, DynamicMask):
        return None
    if mask.scores is None or not mask.scores.requires_grad:
        return None
    return mask.scores


def _checked_positive(name: str, value: float | None) -> float | None:
    if value is None:
        return None
    _check_number(name, value)
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} must be positive and finite, got {value}")
    return float(value)


def _checked_score(score: ScoreFunction | str | None) -> str | None:
    if score is None or isinstance(score, ScoreFunction):
        return None if score is None else score.name
    if not isinstance(score, str):
        raise TypeError(
            f"score must be a ScoreFunction or the name of one, got {type(score).__name__}"
        )
    return named(score).name


def _check_number(name: str, value: float) -> None:
    if not isinstance(value, Real):  # nor a tensor, whose gradient would be lost
        raise TypeError(f"{name} must be a number, got {type(value).__name__} {value!r}")


def _checked_dropout(dropout_p: float) -> float:
    _check_number("dropout_p", dropout_p)
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p must be in [0, 1), got {dropout_p}")
    return float(dropout_p)


def _checked_precision(precision: str) -> str:
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {PRECISIONS}, got {precision!r}")
    return precision


def _checked_deterministic(deterministic: bool) -> bool:
    if not isinstance(deterministic, bool):
        raise TypeError(f"deterministic must be a bool, got {deterministic!r}")
    return deterministic or torch.are_deterministic_algorithms_enabled()


def checked_seed(seed: int | None, dropout_p: float) -> Tensor | None:
    """The seed of a call, None without dropout; drawn if there is none."""
    if seed is not None and not (isinstance(seed, Integral) and -(2**63) <= seed < 2**63):
        raise ValueError(f"seed must be an int of 64 bits, got {seed!r}")
    if dropout_p == 0:
        return None
    if seed is None:
        return torch.randint(2**63 - 1, (), device="cpu")
    return torch.tensor(int(seed), device="cpu")
