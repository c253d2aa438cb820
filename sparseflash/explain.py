"""What a call would do, and whether it pays."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.benchmark import Timer

from sparseflash.arguments import (
    FULL,
    AnyMask,
    check_sinks,
    checked_bias,
    checked_mask,
    checked_options,
    checked_tensors,
)
from sparseflash.attention import attention
from sparseflash.backends import BACKENDS, BackendError, select
from sparseflash.dispatch.call import block_mask, spec_of
from sparseflash.dispatch.spec import AttentionSpec
from sparseflash.score import ScoreFunction

SECONDS = 0.2  # of measurement for each time


@dataclass(frozen=True)
class Times:
    """Median milliseconds."""

    forward: float
    backward: float

    def __str__(self) -> str:
        return f"forward {self.forward:.3f} ms, backward {self.backward:.3f} ms"


@dataclass(frozen=True)
class Explanation:
    """What a call would do.

    density:       s, non-zero blocks over all blocks
    backend:       the one that would run it, None when none can
    configuration: of its passes
    why_not:       the reasons of every backend that cannot, or that "auto" passes over
    measured:      this mask on that backend; full: the mask of all pairs there; dense: torch's own
        attention of all pairs, None where torch has none for these tensors
    """

    spec: AttentionSpec
    density: float
    backend: str | None
    configuration: dict[str, str]
    why_not: dict[str, list[str]]
    measured: Times | None = None
    full: Times | None = None
    dense: Times | None = None

    @property
    def predicted(self) -> Times | None:
        """The full mask's times in proportion to the density: what the blocks alone would take."""
        if self.full is None:
            return None
        return Times(self.full.forward * self.density, self.full.backward * self.density)

    @property
    def dense_is_faster(self) -> bool | None:
        """Whether torch's dense attention takes less time, forward and backward together."""
        if self.measured is None or self.dense is None:
            return None
        return self.dense.forward + self.dense.backward < (
            self.measured.forward + self.measured.backward
        )

    def __str__(self) -> str:
        lines = [f"{self.spec}, density {self.density:.4g}", f"backend: {self.backend}"]
        lines += [f"  {which}: {how}" for which, how in self.configuration.items()]
        lines += [f"not {name}: {'; '.join(why)}" for name, why in self.why_not.items()]
        times = {
            "measured": self.measured,
            "predicted (density x full mask)": self.predicted,
            "full mask": self.full,
            "torch's dense attention": self.dense,
        }
        lines += [f"{name}: {time}" for name, time in times.items() if time is not None]
        if self.dense_is_faster:
            lines.append("dense attention is faster here")
        return "\n".join(lines)


def explain(
    mask: AnyMask | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    score: ScoreFunction | str | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    key_lengths: Tensor | None = None,
    precision: str = "ieee",
    deterministic: bool = True,
    backend: str = "auto",
    measure: bool = True,
) -> Explanation:
    """What `attention` would do with these arguments: backend, configuration, reasons, times.

    measure: also time the call, the full mask and torch's dense attention, each forward and
        backward, with the options of the call (torch's without softcap, score, bias,
        sinks and key_lengths).
    Raises what attention raises, but no BackendError: `backend` is None in what it returns.
    """
    query, key, value = (x.detach() for x in checked_tensors(query, key, value, key_lengths))
    options = checked_options(scale, softcap, score, dropout_p, precision, deterministic)
    if bias is not None:
        checked_bias(bias, query, key)
    if sinks is not None:
        check_sinks(sinks, query)
    found = block_mask(checked_mask(mask), query, key)
    spec = spec_of(query, key, found, key_lengths is not None, *options, bias is not None)
    why_not = {b.name: reasons for b in BACKENDS if (reasons := b.reasons(backend, spec))}
    try:
        chosen = select(backend, spec)
    except BackendError:
        return Explanation(spec, found.density, None, {}, why_not)
    table = found.table(query.device, chosen.tiling(spec))
    explanation = partial(
        Explanation,
        spec,
        found.density,
        chosen.name,
        chosen.describe(query, key, value, table, spec),
        why_not,
    )
    if not measure:
        return explanation()

    def attend(mask: AnyMask) -> Times:
        call = partial(
            attention,
            mask=mask,
            scale=scale,
            softcap=softcap,
            score=score,
            bias=bias,
            sinks=sinks,
            dropout_p=dropout_p,
            key_lengths=key_lengths,
            precision=precision,
            deterministic=deterministic,
            backend=chosen.name,
        )
        return _times(call, query, key, value)

    full = FULL(found.seq_len, found.block_size, query.device)
    dense = partial(
        scaled_dot_product_attention,
        scale=scale,
        dropout_p=dropout_p,
        enable_gqa=spec.heads != spec.kv_heads,
    )
    return explanation(attend(found), attend(full), _times(dense, query, key, value))


def _times(attend: Callable[..., Tensor], *tensors: Tensor) -> Times:
    inputs = [x.clone().requires_grad_() for x in tensors]
    out = attend(*inputs)
    grad = torch.randn_like(out)

    def backward():
        torch.autograd.grad(out, inputs, grad, retain_graph=True)

    with torch.no_grad():
        forward = _median(lambda: attend(*inputs))
    return Times(forward, _median(backward))


def _median(run: Callable[[], object]) -> float:
    timer = Timer("run()", globals={"run": run}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=SECONDS).median * 1e3
