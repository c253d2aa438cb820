"""explain: how a call would be computed, and how long it takes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from masks import BlockMask
from masks._core.grid import BLOCK_SIDES
from masks.mask_batch import CompiledMask
from masks.progress import Progress, late_bar
from sparseflash import backends, io_model
from sparseflash._attention import attention
from sparseflash.arguments import (
    FULL,
    AnyMask,
    check_sinks,
    checked_bias,
    checked_mask,
    checked_seed,
    checked_tensors,
    lengths_in_range,
)
from sparseflash.backends.base import Backend, BackendError
from sparseflash.backends.select import reasons_against, select_passes
from sparseflash.block_hint import better_blocks, cost_model
from sparseflash.dispatch.call import Call
from sparseflash.dispatch.plan import compiled_mask, fixed_block_sizes, make_plan
from sparseflash.dispatch.spec import AttentionSpec, CallFacts
from sparseflash.gap import ROUNDS, SECONDS, Gap, split, variants
from sparseflash.options import AttentionOptions, OptionKeywords
from sparseflash.score import checked_score_tensors
from sparseflash.timing import Turn, rested_turns, sustained_ms

TIMED = {"device": "measured", "full": "full", "dense": "dense"}  # fields of Explanation
MAX_SECONDS = 10.0  # of the rounds of a pass, unless two rounds take longer
Runner = Callable[..., Tensor]  # of query, key and value
Pass = dict[str, list[Turn]]  # the turns of each function, as many rounds


@dataclass(frozen=True)
class Times:
    """Milliseconds of both passes of a call, if calls follow one another."""

    forward: float
    backward: float

    def __str__(self) -> str:
        return f"forward {self.forward:.3f} ms, backward {self.backward:.3f} ms"


@dataclass(frozen=True)
class Explanation:
    """How a call would be computed, and how long it takes.

    Args:
        spec: Spec of the call.
        density: s, non-zero blocks over all blocks.
        backend: Backend that would compute the call; None if no backend can.
        configuration: How the backend would run each pass.
        why_not: Reasons of every backend that cannot compute the call or that "auto" skips.
        better_blocks: (side of a block, ratio of predicted times): with blocks of this side both
            passes have the least predicted time, and the ratio is this time over that of the
            mask's own blocks. Only on a GPU that sparseflash.io_model has; None if the ratio is
            above 0.9.
        measured: Rested time (see sparseflash.timing) of this mask on this backend; None if
            nothing was timed.
        full: Rested time of the full mask on this backend.
        dense: Rested time of torch's own attention with all pairs.
        sustained: Time of this mask under continuous load, under which a GPU may lower its clock;
            None on a CPU.
        forward_gap, backward_gap: Causes of the time beyond density times the full mask; None if
            nothing was timed, for mask batches and for dynamic masks.
    """

    spec: AttentionSpec
    density: float
    backend: str | None
    configuration: dict[str, str]
    why_not: dict[str, list[str]]
    better_blocks: tuple[int, float] | None = None
    measured: Times | None = None
    full: Times | None = None
    dense: Times | None = None
    sustained: Times | None = None
    forward_gap: Gap | None = None
    backward_gap: Gap | None = None

    @property
    def predicted(self) -> Times | None:
        """Density times the time of the full mask: the ideal time of the non-zero blocks."""
        if self.full is None:
            return None
        return Times(self.full.forward * self.density, self.full.backward * self.density)

    @property
    def dense_is_faster(self) -> bool | None:
        """Whether torch's dense attention takes less time, forward and backward."""
        if self.measured is None or self.dense is None:
            return None
        return self.dense.forward + self.dense.backward < (
            self.measured.forward + self.measured.backward
        )

    def __str__(self) -> str:
        lines = [f"{self.spec}, density {self.density:.4g}", f"backend: {self.backend}"]
        lines += [f"  {which}: {how}" for which, how in self.configuration.items()]
        lines += [f"not {name}: {'; '.join(why)}" for name, why in self.why_not.items()]
        if self.better_blocks is not None:
            side, share = self.better_blocks
            lines.append(
                f"blocks of {side} may be faster (see with_block_size): their predicted time is "
                f"{share:.0%} of that of blocks of {self.spec.block_size}"
            )
        times = {
            "measured (rested, in short turns with pauses)": self.measured,
            "predicted (density x full mask)": self.predicted,
            "full mask": self.full,
            "dense attention of torch": self.dense,
        }
        lines += [f"{name}: {time}" for name, time in times.items() if time is not None]
        if self.measured is not None and self.sustained is not None:
            forward = self.sustained.forward / self.measured.forward - 1
            backward = self.sustained.backward / self.measured.backward - 1
            lines.append(
                f"sustained (under continuous load): {self.sustained}; {forward:+.0%} and "
                f"{backward:+.0%}"
            )
        gaps = {"forward": self.forward_gap, "backward": self.backward_gap}
        lines += [f"{name}: {gap}" for name, gap in gaps.items() if gap is not None]
        if self.dense_is_faster:
            lines.append("dense attention is faster here")
        return "\n".join(lines)


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: AnyMask | None = None,
    *,
    key_lengths: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    seed: int | None = None,
    score_tensors: Sequence[Tensor] | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
    measure: bool = False,
    progress: Progress | None = None,
    **options: Unpack[OptionKeywords],
) -> Explanation:
    """Reports how `attention` would compute a call: backend, configuration, reasons and times.

    Args:
        query, key, value, mask, key_lengths, bias, sinks: As in sparseflash.attention.
        score_tensors, return_max_logits: As in sparseflash.attention.
        seed, return_lse: As in sparseflash.attention. They do not change the report.
        measure: Also time the call, the full mask and torch's dense attention, forward and
            backward. The options are those of the call, but without maximum logits; torch's
            dense attention is also without softcap, score, bias, sinks and key_lengths. The times
            are rested. On a GPU the call is also timed under continuous load. A mask of density s
            should take s times as long as the full mask; the additional time is split into causes
            by timing modified masks (see sparseflash.gap). There are at least six rounds of each
            pass, and fewer if they take more than 10 seconds, but not fewer than two. In a round
            each of up to seven functions has two turns, of one call if calls are long.
        progress: Called with (steps of the measurement that are done, least number of steps). By
            default there is a progress bar on the terminal's standard error after two seconds.
        **options: As in sparseflash.attention.

    Returns:
        An Explanation. Its `backend` is None if no backend can compute the call.

    Raises:
        TypeError, ValueError: As sparseflash.attention does.
    """
    query, key, value = (x.detach() for x in checked_tensors(query, key, value, key_lengths))
    bias = checked_bias(bias, query, query.shape[2], key.shape[2])
    check_sinks(sinks, query)
    mask = checked_mask(mask)
    compiled = compiled_mask(mask, query, key)
    facts = CallFacts.of(mask, key_lengths is not None, bias, return_max_logits, score_tensors)
    spec = AttentionSpec.from_call(query, key, value, compiled, AttentionOptions(**options), facts)
    lengths = spec.q_len, spec.k_len
    checked_score_tensors(spec.score, score_tensors, query, lengths, spec.has_key_lengths)
    checked_seed(seed, dropout_p=0.0)  # with dropout it would draw a seed; only a call may do that
    try:
        chosen, of_sums = select_passes(spec, compiled)
    except BackendError:
        return Explanation(spec, compiled.density, None, {}, _why_not(spec, compiled))
    call = Call(
        make_plan(spec, chosen, of_sums, compiled),
        lengths_in_range(key_lengths, key.shape[2], key.device),
        bias=bias,
    )
    configuration = chosen.describe(call, compiled, query, key, value)
    if spec.planned_order:
        configuration.setdefault("planned order", f"not used by the backend {chosen.name}")
    if of_sums is not None:
        configuration["gradients of bias and score tensors"] = f"by the backend {of_sums.name}"
    why_not = _why_not(call.spec, compiled)
    explanation = Explanation(spec, compiled.density, chosen.name, configuration, why_not)
    explanation = replace(explanation, better_blocks=better_blocks(spec, chosen, compiled))
    if not measure:
        return explanation

    # The gradients that are timed are those of query, key and value. Without the others the call
    # runs on the chosen backend alone.
    tensors: dict[str, Any] = {"key_lengths": key_lengths, "sinks": sinks}
    tensors["bias"] = None if bias is None else bias.detach()
    tensors["score_tensors"] = score_tensors and [x.detach() for x in score_tensors]
    attend = partial(attention, **tensors, **(options | {"backend": chosen.name}))
    return _with_times(explanation, chosen, compiled, attend, progress, query, key, value)


def _why_not(spec: AttentionSpec, mask: CompiledMask) -> dict[str, list[str]]:
    """The reasons against each backend that is not selected for a call."""
    reasons = {each.name: reasons_against(each, spec, mask) for each in backends.BACKENDS}
    return {name: why for name, why in reasons.items() if why}


def _with_times(
    explanation: Explanation,
    backend: Backend,
    mask: CompiledMask,
    attend: Runner,
    progress: Progress | None,
    *tensors: Tensor,
) -> Explanation:
    """The explanation with the times of the call, the full mask and dense attention, and the gaps.

    Args:
        explanation: The explanation of the call.
        backend: The backend that computes it.
        mask: Its mask.
        attend: `attention` with all arguments of the call but query, key, value and mask.
        progress: As in explain.
        tensors: query, key and value.
    """
    spec = explanation.spec
    full = FULL(mask.seq_len, mask.block_size, spec.device)
    dense = partial(
        scaled_dot_product_attention,
        scale=spec.scale,
        dropout_p=spec.dropout_p,
        enable_gqa=spec.heads != spec.kv_heads,
    )
    runs = {
        "device": partial(attend, mask=mask),
        "full": partial(attend, mask=full),
        "dense": dense,
    }
    if not isinstance(mask, BlockMask):
        same: dict[str, Mapping[str, Runner]] = dict.fromkeys(io_model.DIRECTIONS, runs)
        return replace(explanation, **_times(*_measured(same, progress, {}, *tensors)))
    sizes = backend.forward_block_size_for(spec, mask), backend.block_size_for(spec, mask)
    of_size = {size: _variants(mask, size) for size in dict.fromkeys(sizes)}
    without = {d: of_size[size] for d, size in zip(io_model.DIRECTIONS, sizes, strict=True)}

    def in_tiles_of_the_call(mask: BlockMask, *tensors: Tensor) -> Tensor:
        with fixed_block_sizes(*sizes):
            return attend(*tensors, mask=mask)

    runs_of = {
        d: runs | {name: partial(in_tiles_of_the_call, each) for name, each in masks_of.items()}
        for d, masks_of in without.items()
    }

    def gap(direction: str, filled: float, filled_by_full: float, timed: Pass) -> Gap:
        turns = {name: of for name, of in timed.items() if name != "dense"}
        masks_of = without[direction]
        densities = masks_of["whole"].density, mask.density
        return split(turns, masks_of, *densities, filled, filled_by_full)

    gap_of = {
        d: partial(gap, d, *(_filled(spec, backend, each, d) for each in (mask, full)))
        for d in io_model.DIRECTIONS
    }
    passes, sustained = _measured(runs_of, progress, gap_of, *tensors)
    gaps = [gap_of[d](timed) for d, timed in zip(io_model.DIRECTIONS, passes, strict=True)]
    times = _times(passes, sustained)
    return replace(explanation, **times, forward_gap=gaps[0], backward_gap=gaps[1])


def _variants(mask: BlockMask, block_size: tuple[int, int]) -> dict[str, BlockMask]:
    """The variants of a mask in the blocks of a table.

    Masks cannot have blocks of every size that tables have. So a block of the table may be several
    blocks of the variants, one below the other.
    """
    rows, columns = block_size
    side = max(side for side in BLOCK_SIDES if rows % side == 0)
    return variants(mask.reblock((side, columns)), rows // side)


def _measured(
    runs_of: Mapping[str, Mapping[str, Runner]],
    progress: Progress | None,
    gap_of: Mapping[str, Callable[[Pass], Gap]],
    *tensors: Tensor,
) -> tuple[list[Pass], list[float | None]]:
    """The turns of both passes of functions of query, key and value, by direction; and the
    sustained milliseconds of "device". A pass is measured for longer if its gap is noisy.
    """
    if progress is None:
        with late_bar("measuring") as bar:
            return _measured(runs_of, bar, gap_of, *tensors)

    def turns_of(number: int, runs: Mapping[str, Callable[[], object]]) -> Pass:
        def report(done: int, total: int) -> None:
            progress(number * total + done, 2 * total)

        def enough(turns: Pass) -> bool:
            gap = gap_of.get(io_model.DIRECTIONS[number])
            return gap is None or gap(turns).quiet

        return rested_turns(runs, device, SECONDS, ROUNDS, report, enough, MAX_SECONDS)

    inputs = [x.clone().requires_grad_() for x in tensors]
    device = inputs[0].device
    forward, differentiated = (
        {name: partial(run, *inputs) for name, run in runs_of[direction].items()}
        for direction in io_model.DIRECTIONS
    )
    with torch.no_grad():
        passes = [turns_of(0, forward)]
        sustained = [sustained_ms(forward["device"], device)]
    outs = {name: run() for name, run in differentiated.items()}
    grad = torch.randn_like(outs["device"])
    backward = {
        name: partial(torch.autograd.grad, out, inputs, grad, retain_graph=True)
        for name, out in outs.items()
    }
    passes.append(turns_of(1, backward))
    sustained.append(sustained_ms(backward["device"], device))
    return passes, sustained


def _times(passes: Sequence[Pass], sustained: Sequence[float | None]) -> dict[str, Times | None]:
    """The fields of an Explanation."""
    forward, backward = sustained
    loaded = None if forward is None or backward is None else Times(forward, backward)
    return {"sustained": loaded} | {
        field: Times(*(median(turn.called for turn in timed[name]) for timed in passes))
        for name, field in TIMED.items()
    }


def _filled(spec: AttentionSpec, backend: Backend, mask: BlockMask, direction: str) -> float:
    """Share of the waves of work tiles that is filled; 1 if the call is not modelled."""
    cost = cost_model(spec, backend)
    return (
        1.0 if cost is None else cost(mask, direction=direction, backend=backend.name).filled_waves
    )
