"""Measures launch configurations of the backend triton: see `tune`."""

import contextlib
import itertools
import json
import math
import multiprocessing
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from unittest import mock

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

import masks
from experiments.cli import Clock
from experiments.environment import environment
from experiments.files import write_json
from experiments.measure import DTYPES
from experiments.report import plain_table
from experiments.timing import time_call
from masks import BlockMask
from sparseflash.backends import triton as triton_backend
from sparseflash.backends.triton import configs, launch
from sparseflash.backends.triton.configs import Config
from sparseflash.dispatch.call import Call, Plan
from sparseflash.dispatch.spec import AttentionSpec
from sparseflash.options import AttentionOptions

NEEDS = {"dq": (True, False, False, False, False), "dkdv": (False, True, True, False, False)}
SIDES = (16, 32, 64, 128)
WARPS = (1, 2, 4, 8)
STAGES = (2, 3)
DECODE_STAGES = (2, 3, 4)  # tiles of few rows leave memory for more
REGISTERS = (None, 128, 168)
# Configurations that are slow are not measured: where a thread has more accumulators, it spills;
# where it has more of its registers for accumulators, too; where a warp has fewer or more pairs of
# a tile, tensor cores or registers are idle. On Hopper a wgmma takes 64 rows and four warps.
MAX_ACCUMULATORS = 224
MAX_SHARE_OF_REGISTERS = 0.75
PAIRS_OF_WARP = range(128, 4097)
WARPGROUP, WARPGROUP_ROWS = 4, 64
LIMITED_WARPS = (1, WARPGROUP)  # of programs of which more run at once with fewer registers
MAX_TILES_OF_SIDE = 4  # along a side of a block
PASSES = (*configs.PASSES, "decode")
CACHED = 65536  # keys that a step of decoding reads
# Heads that read the same keys: in a short tile, in a tall one.
PACKED = (4, configs.MAX_PACKED_ROWS)
BUDGET_MS = 25.0
SHOWN = 5
FAILURES = (RuntimeError, configs.triton.TritonError)


@dataclass(frozen=True)
class Problem:
    """One size: keys (batch, heads, seq_len, head_dim), and as many queries; or, for a step of
    decoding, one query of each of `packed` heads that read the same keys.
    """

    dtype: str
    head_dim: int
    block_size: int
    batch: int
    heads: int
    seq_len: int
    packed: int = 0

    @property
    def q_len(self) -> int:
        return 1 if self.packed else self.seq_len

    def tensors(self) -> list[Tensor]:
        """Query, key, value and the gradient of the output."""
        generator = torch.Generator("cuda").manual_seed(0)
        options = {"dtype": DTYPES[self.dtype], "device": "cuda", "generator": generator}
        queries = (self.batch, self.heads * max(1, self.packed), self.q_len, self.head_dim)
        keys = (self.batch, self.heads, self.seq_len, self.head_dim)
        return [torch.randn(shape, **options) for shape in (queries, keys, keys, queries)]

    def masks(self) -> dict[str, BlockMask]:
        patterns = {"1": masks.full(), "1/16": masks.random(1 / 16, seed=0)}
        lengths = (self.q_len, self.seq_len)
        return {s: p(lengths, self.block_size, "cuda") for s, p in patterns.items()}


def problems(which: str, size: Problem) -> list[Problem]:
    """What a pass is measured on."""
    if which != "decode":
        return [size]
    return [replace(size, seq_len=CACHED, packed=packed) for packed in PACKED]


def fitting(which: str, problem: Problem) -> Iterator[Config]:
    """Every configuration whose tiles divide the block and fit the device."""
    architecture, memory = configs.limits(torch.device("cuda"))
    dtype = DTYPES[problem.dtype]
    stages = DECODE_STAGES if which == "decode" else STAGES
    axes = itertools.product(SIDES, SIDES, WARPS, stages, (True, False), REGISTERS)
    for config in itertools.starmap(Config, axes):
        if (
            divides(config, problem)
            and configs.shared_memory(config, which, dtype, problem.head_dim) <= memory
            and sensible(which, config, problem.head_dim)
            and (architecture >= 90 or not config.tma)
        ):
            yield config


def divides(config: Config, problem: Problem) -> bool:
    """Whether tiles divide a block in few parts; those of packed rows are just tall enough."""
    block = problem.block_size
    if problem.packed:
        height = min(side for side in SIDES if side >= problem.packed)
        return config.bm == height and config.bn <= block <= MAX_TILES_OF_SIDE * config.bn
    few_parts = MAX_TILES_OF_SIDE * min(config.bm, config.bn) >= block
    return few_parts and configs.divides(config, (block, block))


def sensible(which: str, config: Config, head_dim: int) -> bool:
    """Whether a configuration is not known to be slow."""
    pairs = config.bm * config.bn
    most = MAX_SHARE_OF_REGISTERS * config.registers if config.registers else MAX_ACCUMULATORS
    rows = config.bm if which == "decode" else max(config.bm, config.bn)
    few_rows = which == "decode" and rows < WARPGROUP_ROWS
    return (
        configs.accumulators(config, which, head_dim) <= most
        and pairs // config.warps in PAIRS_OF_WARP
        and (few_rows or (config.warps >= WARPGROUP) == (rows >= WARPGROUP_ROWS))
        and (config.registers is None or config.warps in LIMITED_WARPS)
    )


def compile_all(jobs: list[tuple[str, Problem, Config]]) -> None:
    """Compiles side by side, into Triton's cache on disk."""
    context = multiprocessing.get_context("spawn")
    workers = max(1, len(os.sched_getaffinity(0)) - 2)
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        list(pool.map(_compile, *zip(*jobs, strict=True)))


def _compile(which: str, problem: Problem, config: Config) -> None:
    small = replace(problem, batch=1, heads=1, seq_len=1024)
    mask = small.masks()["1"]
    # One that does not compile is left out, with its reason, where it would be measured.
    with contextlib.suppress(*FAILURES), configured(config, which):
        runner(which, small, mask)()


@contextlib.contextmanager
def configured(config: Config, *passes: str) -> Iterator[None]:
    """Calls that are planned meanwhile run some passes with `config`, whatever it needs."""
    choose = configs.choose

    def forget() -> None:
        configs.kernel_variant.cache_clear()
        launch._prepare.cache_clear()

    def chosen(pass_name: str, *facts, **options) -> Config | None:
        return config if pass_name in passes else choose(pass_name, *facts, **options)

    forget()
    try:
        with mock.patch.object(configs, "choose", chosen):
            yield
    finally:
        forget()


def measure(which: str, problem: Problem, config: Config, console: Console) -> Iterator[dict]:
    """One row for each mask; says why for a configuration that does not compile or launch."""
    for density, mask in problem.masks().items():
        expected = runner(which, problem, mask)()
        try:
            with configured(config, which):
                run = runner(which, problem, mask)
                agree(run(), expected, f"{which} with {config}")
                timing = time_call(lambda run=run: run, Clock.GRAPH, BUDGET_MS)
        except FAILURES as error:
            reason = escape(str(error).splitlines()[0][:80])
            console.print(f"[yellow]left out {config}: {reason}[/]")
            return
        yield asdict(config) | {"density": density, "median_ms": timing.median_ms}


def runner(which: str, problem: Problem, mask: BlockMask):
    """The pass alone, as a function of nothing."""
    query, key, value, grad_out = problem.tensors()
    # In its own blocks, small as they may be.
    spec = AttentionSpec.from_call(query, key, value, mask, AttentionOptions())
    call = Call(Plan(spec, triton_backend, mask.table(query.device)))
    if which in ("forward", "decode"):
        return lambda: call.forward(query, key, value)
    saved = (query, key, value, *call.forward(query, key, value))
    return lambda: call.backward(grad_out, None, saved, NEEDS[which])


def agree(result: Iterable, expected: Iterable, what: str) -> None:
    """Raises AssertionError if two configurations differ by more than roundings."""
    for ours, theirs in zip(result, expected, strict=True):
        if ours is not None:
            error = (ours.double() - theirs.double()).norm() / theirs.double().norm()
            assert error < 4 * torch.finfo(theirs.dtype).eps, f"{what}: differs by {error:.2g}"


def save(path: Path, which: str, problem: Problem, rows: list[dict]) -> None:
    """Adds a run to those of the file, in place of an older one of the same pass and problem."""
    known = json.loads(path.read_text()) if path.exists() else []
    others = [r for r in known if (r["pass"], Problem(**r["problem"])) != (which, problem)]
    fresh = {
        "pass": which,
        "problem": asdict(problem),
        "environment": environment(torch.device("cuda")),
        "rows": rows,
    }
    write_json(path, [*others, fresh])


def times_by_config(rows: list[dict]) -> dict[Config, dict[str, float]]:
    """Milliseconds at each density; rows older than a field of Config have its default."""
    times = {}
    for row in rows:
        config = Config(**{name: row[name] for name in Config.__dataclass_fields__ if name in row})
        times.setdefault(config, {})[row["density"]] = row["median_ms"]
    return times


def fastest(rows: list[dict], title: str) -> Table:
    """The SHOWN configurations of the least geometric mean of times."""
    times = times_by_config(rows)
    ranked = sorted(times, key=lambda config: math.prod(times[config].values()))
    figures = [f"s = {s}, ms" for s in times[ranked[0]]]
    table = plain_table(f"{title}: {len(ranked)} configurations", ["configuration"], figures)
    for config in ranked[:SHOWN]:
        table.add_row(str(config), *(f"{ms:.3f}" for ms in times[config].values()))
    return table
