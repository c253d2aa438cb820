"""The scalar arguments of attention: listed, documented and checked here alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from numbers import Real
from typing import Any, TypedDict

import torch
from torch import Tensor

from masks.arguments import check_bool
from sparseflash.dropout import threshold
from sparseflash.score import ScoreFunction, find_score_function

PRECISIONS = ("ieee", "tf32")
_AS_MASK = "give the mask as mask, such as masks.causal()"
# Arguments of attention in torch, FlexAttention and FlashAttention: what replaces them here.
_OF_OTHERS = {
    **dict.fromkeys(("attn_mask", "block_mask", "causal", "is_causal"), _AS_MASK),
    **dict.fromkeys(("window", "window_size"), "give the window as mask: see masks.local"),
    **dict.fromkeys(("dropout", "p_dropout"), "it is dropout_p here"),
    **dict.fromkeys(("sm_scale", "softmax_scale"), "it is scale here"),
    "alibi_slopes": "give them as bias: see sparseflash.alibi",
    "attn_bias": "it is bias here, a number for each distance",
    "enable_gqa": "leave it out: query heads may be a multiple of key heads",
    "score_mod": "give it as score: see sparseflash.ScoreFunction.from_torch",
}


class OptionKeywords(TypedDict, total=False):
    """The fields of AttentionOptions, as the keywords of functions that take them."""

    scale: float | None
    softcap: float | None
    score: ScoreFunction | str | None
    dropout_p: float
    precision: str
    deterministic: bool
    planned_order: bool
    backend: str


class CallKeywords(OptionKeywords, total=False):
    """Further keywords of every attention function, for the overloads."""

    bias: Tensor | None
    sinks: Tensor | None
    seed: int | None


class AttentionKeywords(CallKeywords, total=False):
    """The keywords of attention except return_lse and return_max_logits."""

    key_lengths: Tensor | None
    score_tensors: Sequence[Tensor] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """The options of a call, checked when they are made. Equal options have equal hashes.

    Args:
        scale: Factor of the scores, positive; 1 / sqrt(head_dim) if None.
        softcap: c > 0 limits scores to (-c, c): softcap(s) = c tanh(s / c); None for none.
        score: A ScoreFunction or the name of one; the attribute is the name.
        dropout_p: Probability in [0, 1) with which dropout zeroes an entry of P, rounded to a
            multiple of 2^-16.
        precision: Precision of float32 products: "ieee", or "tf32". With "tf32" a backend may
            round operands to 10 bits if the device multiplies these faster.
        deterministic: With False a backend may choose a faster backward pass, which adds to the
            gradients of query and score tensors in varying order. Their last bits then differ
            from run to run. It needs a float32 accumulator for the gradient of query. Always True
            under torch.use_deterministic_algorithms.
        planned_order: With True a deterministic backward pass may add to the gradient of query in
            an order that is planned once for each mask, in one kernel instead of two. The first
            backward pass with a mask and size plans it on the CPU, which takes in the order of
            seconds for a million blocks of all heads, so not for masks that change in every step.
            A CUDA graph cannot capture that pass. The bits depend on the number of multiprocessors
            of the GPU. The backend "hopper" uses it for head and value dims up to 64 and static
            masks with at least 12 blocks in a row of keys on average (rows of 128 keys), if
            gradients of query, key and value are all needed; not on an H100, with key lengths, a
            soft cap, a score function or a bias, nor inside a plan of context parallelism.
            Elsewhere it changes nothing: `explain` reports whether it is used, and why not.
        backend: "auto", or the name of a backend; a named backend never falls back to another.

    Raises:
        TypeError: An option is unknown or of another type; the message names it.
        ValueError: An option is out of range; the message names it and the allowed values.

    Reference:
        Gemma Team, "Gemma 2", 2024 (soft cap).
    """

    scale: float | None = None
    softcap: float | None = None
    score: ScoreFunction | str | None = None
    dropout_p: float = 0.0
    precision: str = "ieee"
    deterministic: bool = True
    planned_order: bool = False
    backend: str = "auto"

    def __new__(cls, **options: Any) -> "AttentionOptions":
        if unknown := options.keys() - cls.__dataclass_fields__.keys():
            known, found = ", ".join(cls.__dataclass_fields__), ", ".join(sorted(unknown))
            hints = dict.fromkeys(filter(None, map(_hint, sorted(unknown))))
            raise TypeError(f"options must be some of {known}, got {'; '.join([found, *hints])}")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))

    def as_dict(self) -> dict[str, Any]:
        """The options by name."""
        return {name: getattr(self, name) for name in OPTION_NAMES}


def _hint(unknown: str) -> str:
    """What may be meant by an option that does not exist; empty if nothing is similar."""
    if unknown in _OF_OTHERS:
        return _OF_OTHERS[unknown]
    keywords = (*AttentionKeywords.__annotations__, "return_lse", "return_max_logits")
    if unknown in keywords:
        return "it is an argument of sparseflash.attention, which this call does not take"
    similar = get_close_matches(unknown, keywords, 1)
    return f"did you mean {similar[0]}?" if similar else ""


def _positive(name: str, value: float | None) -> float | None:
    if value is None:
        return None
    _check_number(name, value)
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} must be positive and finite, got {value}")
    return float(value)


def _score_name(name: str, score: ScoreFunction | str | None) -> str | None:
    if score is None or isinstance(score, ScoreFunction):
        return None if score is None else score.name
    if not isinstance(score, str):
        made = ", of which ScoreFunction.from_torch makes one" if callable(score) else ""
        raise TypeError(
            f"{name} must be a ScoreFunction or the name of one, got {type(score).__name__}{made}"
        )
    return find_score_function(score).name


def _probability(name: str, value: float) -> float:
    _check_number(name, value)
    if not 0 <= value < 1:
        raise ValueError(f"{name} must be in [0, 1), got {value}")
    threshold(value)
    return float(value)


def _precision(name: str, precision: str) -> str:
    if precision not in PRECISIONS:
        raise ValueError(f"{name} must be one of {PRECISIONS}, got {precision!r}")
    return precision


def _deterministic(name: str, deterministic: bool) -> bool:
    return check_bool(name, deterministic) or torch.are_deterministic_algorithms_enabled()


def _backend(name: str, backend: str) -> str:
    if not isinstance(backend, str):
        raise TypeError(f"{name} must be 'auto' or the name of a backend, got {backend!r}")
    return backend  # `select` checks the name


def _check_number(name: str, value: float) -> None:
    if not isinstance(value, Real):  # nor a tensor, whose gradient would be lost
        raise TypeError(f"{name} must be a number, got {type(value).__name__} {value!r}")


_CHECKS = {
    "scale": _positive,
    "softcap": _positive,
    "score": _score_name,
    "dropout_p": _probability,
    "precision": _precision,
    "deterministic": _deterministic,
    "planned_order": check_bool,
    "backend": _backend,
}
BOOLEANS = ("deterministic", "planned_order")
OPTION_NAMES = tuple(field.name for field in fields(AttentionOptions))
