"""Measures one case: checks implementations, times them alternately, and measures their memory."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from experiments import memory
from experiments.baselines import (
    NO_EXTRAS,
    NOT_CAPTURED,
    STANDARD_PARTS,
    BaselineError,
    attend_baseline,
    attend_sparseflash,
    standard_parts,
)
from experiments.check import Attend, Extras, SampledRows, check
from experiments.cli import Baseline, Clock, Load
from experiments.pattern_families import Problem
from experiments.record import Measurement, is_ours
from experiments.settings import Method
from experiments.timing import (
    Prepare,
    Run,
    Sample,
    WaitsForDevice,
    prepared,
    time_rested,
    time_sustained,
)

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
QKV = ("dq", "dk", "dv")


@dataclass(frozen=True)
class Case:
    """One mask with one problem size, and its implementations.

    Attributes:
        suite: Name of the suite.
        family: Family of the pattern.
        problem: The compiled mask.
        batch, heads, seq_len, head_dim, block_size: The sizes; lengths in tokens.
        implementations: Names of baselines, and ours as "sparseflash" or "sparseflash:backend".
        q_len, kv_heads: Sizes of a decoding step, which has no backward pass.
        dropout_p: Probability of dropout; None for that of the method.
        backward: Whether there is a backward pass.
    """

    suite: str
    family: str
    problem: Problem
    batch: int
    heads: int
    seq_len: int
    head_dim: int
    block_size: int
    implementations: tuple[str, ...]
    q_len: int | None = None
    kv_heads: int | None = None
    dropout_p: float | None = None
    backward: bool = True

    @property
    def group(self) -> tuple:
        """That of its rows, less the direction."""
        size = (self.batch, self.heads, self.seq_len, self.head_dim, self.block_size)
        return self.suite, *size, self.q_len, self.kv_heads

    @property
    def line(self) -> tuple[str, str]:
        """What it shares with the same problem at other lengths."""
        return self.suite, self.family

    def directions(self, method: Method) -> list[str]:
        """The passes to measure."""
        backward = self.backward and self.q_len is None
        return [d for d in method.directions if d == "forward" or backward]

    def key_value_bytes(self, itemsize: int) -> int | None:
        """Bytes of the keys and values in non-zero blocks; None if it is not a decoding step."""
        if self.kv_heads is None:
            return None
        numbers = 2 * self.batch * self.kv_heads * self.seq_len * self.head_dim
        return round(self.problem.density * numbers * itemsize)

    def lengths(self, method: Method) -> list[int] | None:
        """The number of keys of each batch element, with equal differences; None for all keys."""
        if method.padding == 0:
            return None
        steps = max(1, self.batch - 1)
        lacking = (method.padding * (b + (self.batch == 1)) / steps for b in range(self.batch))
        return [max(1, round(self.seq_len * (1 - share))) for share in lacking]

    def extras(self, method: Method) -> Extras:
        """The arguments of implementations besides the mask.

        Lengths are on the device: a graph capture cannot copy them, and a call would wait.
        """
        lengths = self.lengths(method)
        dropout_p = method.dropout_p if self.dropout_p is None else self.dropout_p
        if lengths is None:
            return Extras(dropout_p)
        device = method.device if method.clock == Clock.GRAPH else "cpu"
        return Extras(dropout_p, torch.tensor(lengths, device=device))

    def density(self, method: Method) -> float:
        """The density s, counting only blocks with keys inside the key length."""
        mask, lengths = self.problem.mask, self.lengths(method)
        if lengths is None:
            return self.problem.density
        blocks = [mask.crop(mask.seq_len[0], n).nnz_blocks for n in lengths]
        return sum(blocks) / len(blocks) * self.problem.density / max(mask.nnz_blocks, 1)

    def __str__(self) -> str:
        return f"{self.problem.label} at N = {self.seq_len}"


def measure(
    case: Case,
    implementations: Sequence[str],
    method: Method,
    log: Callable[[str], None] = lambda text: None,
) -> tuple[list[Measurement], dict[str, str]]:
    """Checks implementations on a case, then times each pass, then takes its peak memory.

    Args:
        case: The case.
        implementations: The implementations of the case that are measured.
        method: The method of measurement.
        log: Called with a description of each step.

    Returns:
        The measurements of one implementation after the other, and for each baseline that cannot
        run the reason; our implementations have to.

    Raises:
        CheckError: A result is wrong.
        RuntimeError: One of our implementations cannot run.
    """
    device, dtype = torch.device(method.device), DTYPES[method.dtype]
    inputs, grad_out = random_problem(case, dtype, device, method.seed)
    sample = SampledRows.of(case.problem.mask, device)
    skips = SkipReasons()
    passes: dict[str, dict[str, Prepare]] = {}
    for name in implementations:
        log(f"checking {name} on {case}")
        with skips.catch(name):
            passes[name] = checked(name, case, method, inputs, grad_out, sample, skips)
    times: dict[tuple[str, str], dict[str, Any]] = {}
    for direction in case.directions(method):
        log(f"timing {case}, {direction}")
        running = {
            c: p[direction] for c, p in passes.items() if direction in p and c not in skips.reasons
        }
        for name, figures in timed(running, method, skips).items():
            times[name, direction] = figures
    measurements = [
        measured(case, name, direction, times[name, direction], prepare, method)
        for name, own_passes in passes.items()
        for direction, prepare in own_passes.items()
        if name not in skips.reasons
    ]
    return measurements, skips.reasons


class SkipReasons:
    """The reasons for which baselines cannot run. Errors of our implementations are raised."""

    def __init__(self):
        self.reasons: dict[str, str] = {}

    @contextmanager
    def catch(self, implementation: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if is_ours(implementation):
                raise
            self.reasons[implementation] = str(error).strip().splitlines()[0]


def checked(
    name: str,
    case: Case,
    method: Method,
    inputs,
    grad_out,
    sample: SampledRows,
    skips: SkipReasons,
) -> dict[str, Prepare]:
    """The passes of an implementation, after its results were checked.

    If only the forward pass of a baseline supports the problem, only this pass is measured.
    """
    extras = case.extras(method)
    if part := not is_ours(name) and name.partition(":")[2]:
        return {"forward": part_of_standard(part, case, extras.dropout_p, inputs)}
    attend = checked_attend = make_attend(name, case.problem, extras)
    if not is_ours(name):  # its dropout uses another random generator
        extras = replace(extras, dropout_p=0.0)
        checked_attend = make_attend(name, case.problem, extras)
    directions = case.directions(method)
    facts = (checked_attend, inputs, sample, f"{name} on {case}")
    try:
        if not is_ours(name) and Baseline(name).approximate:
            check_finite(attend, inputs, grad_out)
        else:
            check(*facts, backward="backward" in directions, extras=extras)
    except NotImplementedError as error:
        if is_ours(name) or "forward" not in directions:
            raise
        check(*facts, backward=False, extras=extras)
        directions = ["forward"]
        skips.reasons[f"{name}, backward"] = str(error).strip().splitlines()[0]
    passes = {
        "forward": forward_pass(attend, inputs),
        "backward": BackwardPass(attend, inputs, grad_out),
    }
    return {direction: passes[direction] for direction in directions}


def timed(
    passes: dict[str, Prepare], method: Method, skips: SkipReasons
) -> dict[str, dict[str, Any]]:
    """The times of the same pass of each implementation that can run, as fields of a row.

    Implementations are timed alternately. Those that do not fit in memory with the others are
    timed after them.
    """
    found: dict[str, dict[str, Any]] = {}
    while passes:
        times, passes = timed_alternately(passes, method, skips)
        found |= times
    return found


def timed_alternately(
    passes: dict[str, Prepare], method: Method, skips: SkipReasons
) -> tuple[dict[str, dict[str, Any]], dict[str, Prepare]]:
    """The times of the implementations that fit in memory together, and the other passes.

    median_ms and its quartiles are rested times if these are measured, else sustained times.
    """
    samples: dict[str, Sample] = {}
    clocks: list[dict[str, str]] = []
    postponed: dict[str, Prepare] = {}
    loads = Load(method.timing).single
    with ExitStack() as stack:
        for name, prepare in passes.items():
            with skips.catch(name):
                try:
                    sample, clock = start_sampling(stack, name, prepare, Clock(method.clock))
                except torch.OutOfMemoryError:
                    if not samples:
                        raise
                    postponed[name] = prepare
                else:
                    samples[name] = sample
                    clocks.append({} if clock == method.clock else {"clock": clock.value})
        running = list(samples.values())
        rested = time_rested(running, method.budget_ms) if Load.RESTED in loads else None
        sustained = time_sustained(running) if Load.SUSTAINED in loads else None
    fields = [asdict(timing) for timing in rested or sustained or ()]
    for own, timing in zip(fields, sustained or (), strict=False):
        own |= {
            "sustained_ms": timing.median_ms,
            "sustained_low_ms": timing.low_ms,
            "sustained_high_ms": timing.high_ms,
        }
    named = zip(samples, fields, clocks, strict=True)
    return {name: own | clock for name, own, clock in named}, postponed


def start_sampling(
    stack: ExitStack, name: str, prepare: Prepare, clock: Clock
) -> tuple[Sample, Clock]:
    """A sample of a pass, held by `stack`, and its clock.

    It is `clock`, or EVENTS for an approximation that no CUDA graph can contain.
    """
    if clock is Clock.GRAPH and name in NOT_CAPTURED:
        clock = Clock.EVENTS
    try:
        return stack.enter_context(prepared(prepare, clock)), clock
    except WaitsForDevice:
        if is_ours(name) or not Baseline(name.partition(":")[0]).approximate:
            raise
    return stack.enter_context(prepared(prepare, Clock.EVENTS)), Clock.EVENTS


def measured(
    case: Case, name: str, direction: str, times: dict[str, Any], prepare: Prepare, method: Method
) -> Measurement:
    """The row of a pass in a record; measures its peak memory."""
    density = case.density(method)
    shared = Case.__dataclass_fields__.keys() & Measurement.__dataclass_fields__.keys()
    return Measurement(
        implementation=name,
        pattern=case.problem.label,
        density=density,
        blocks_per_row=density * -(-case.seq_len // case.block_size),
        direction=direction,
        peak_bytes=memory.peak_bytes(once(prepare), torch.device(method.device)),
        key_value_bytes=case.key_value_bytes(DTYPES[method.dtype].itemsize),
        **{field: getattr(case, field) for field in shared},
        **times,
    )


def make_attend(name: str, problem: Problem, extras: Extras = NO_EXTRAS) -> Attend:
    """The implementation with this name, for a mask."""
    if is_ours(name):
        return attend_sparseflash(problem, name.partition(":")[2] or "auto", extras)
    return attend_baseline(Baseline(name), problem, extras)


def random_problem(case: Case, dtype: torch.dtype, device: torch.device, seed: int):
    """(query, key, value), which require gradients, and a gradient of the output.

    They are standard normal, because a GPU computes faster on zeros.
    """
    generator = torch.Generator(device).manual_seed(seed)
    of_queries = (case.heads, case.q_len or case.seq_len)
    of_keys = (case.kv_heads or case.heads, case.seq_len)
    *inputs, grad_out = (
        torch.randn(
            (case.batch, *shape, case.head_dim), generator=generator, dtype=dtype, device=device
        )
        for shape in (of_queries, of_keys, of_keys, of_queries)
    )
    return [t.requires_grad_() for t in inputs], grad_out


def check_finite(attend: Attend, inputs, grad_out) -> None:
    """Checks that the output and gradients of an approximation are finite.

    Raises:
        BaselineError: They are not.
    """
    out = attend(*inputs)
    if out.shape != inputs[0].shape:
        raise BaselineError(f"its output is {tuple(out.shape)}, not {tuple(inputs[0].shape)}")
    results = {"out": out, **dict(zip(QKV, gradients(out, inputs, grad_out), strict=True))}
    for name, result in results.items():
        if not result.isfinite().all():
            raise BaselineError(f"{name} is not finite")


def part_of_standard(part: str, case: Case, dropout_p: float, inputs) -> Prepare:
    """One of STANDARD_PARTS, applied to the result of the previous parts, without gradients."""

    def prepare():
        query, key, value = inputs
        causal = case.problem.dense == "causal"
        steps, result = standard_parts(query, key, value, causal, dropout_p), query
        with torch.no_grad():
            for name in STANDARD_PARTS[: STANDARD_PARTS.index(part)]:
                result = steps[name](result)
        return torch.no_grad()(lambda: steps[part](result))

    return prepare


def gradients(out: Tensor, inputs, grad_out: Tensor):
    return torch.autograd.grad(out, inputs, grad_out, retain_graph=True)


def forward_pass(attend: Attend, inputs) -> Prepare:
    return lambda: lambda: attend(*inputs)


@dataclass(frozen=True)
class BackwardPass:
    """Prepares a backward pass that can be run many times, on the results of one forward pass."""

    attend: Attend
    inputs: Sequence[Tensor]
    grad_out: Tensor

    def __call__(self) -> Callable[[], tuple[Tensor, ...]]:
        return partial(gradients, self.attend(*self.inputs), self.inputs, self.grad_out)

    def once(self) -> object:
        """Both passes, of which the backward pass frees each saved tensor when it was read."""
        return torch.autograd.grad(self.attend(*self.inputs), self.inputs, self.grad_out)


def once(prepare: Prepare) -> Run:
    """A run of a pass, with the memory that it has in training.

    A backward pass that can be run again keeps all tensors that its forward pass saved, so that an
    implementation of many operations would need more memory than in training.
    """
    return prepare.once if isinstance(prepare, BackwardPass) else lambda: prepare()()
