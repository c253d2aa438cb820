"""Measures launch configurations of the backend triton: see `tune`."""

import contextlib
import itertools
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
from experiments.files import read_json, write_json
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

# Gradients that the kernels of each backward pass compute.
NEEDS = {"dq": (True, False, False, False, False), "dkdv": (False, True, True, False, False)}
# Values of each field of a configuration.
SIDES = (16, 32, 64, 128)
WARPS = (1, 2, 4, 8)
STAGES = (2, 3)
DECODE_STAGES = (2, 3, 4)  # tiles of few rows leave shared memory for more stages
REGISTERS = (None, 128, 168)
# Bounds of what is measured; configurations beyond them are known to be slow. With more
# accumulators, or a larger share of its registers in accumulators, a thread spills. With fewer or
# more pairs of a tile for each warp, tensor cores or registers are idle.
MAX_ACCUMULATORS = 224  # of a thread
MAX_SHARE_OF_REGISTERS = 0.75
PAIRS_OF_WARP = range(128, 4097)
WARPGROUP, WARPGROUP_ROWS = 4, 64  # warps of a wgmma, and rows of its tile
LIMITED_WARPS = (1, WARPGROUP)  # with a register limit, which raises the occupancy
MAX_TILES_OF_SIDE = 4  # tiles along a side of a block
PASSES = (*configs.PASSES, "decode")
CACHED = 65536  # keys of a decoding step
PACKED = (4, configs.MAX_PACKED_ROWS)  # query heads of a key head in a decoding step
BUDGET_MS = 25.0  # milliseconds of measurement for each configuration and mask
SHOWN = 5  # configurations in the table
FAILURES = (RuntimeError, configs.triton.TritonError)  # of a kernel that cannot be launched


@dataclass(frozen=True)
class Problem:
    """The sizes of a call.

    Attributes:
        dtype: Name of the dtype.
        head_dim, batch, heads, seq_len: Sizes of the keys; seq_len is in tokens.
        block_size: Side of a block in tokens.
        packed: 0 for as many queries as keys; for a decoding step, the number of query heads of
            each key head, with one query each.
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
        """Number of queries in tokens."""
        return 1 if self.packed else self.seq_len

    def tensors(self) -> list[Tensor]:
        """Query, key, value and the gradient of the output."""
        generator = torch.Generator("cuda").manual_seed(0)
        options = {"dtype": DTYPES[self.dtype], "device": "cuda", "generator": generator}
        queries = (self.batch, self.heads * max(1, self.packed), self.q_len, self.head_dim)
        keys = (self.batch, self.heads, self.seq_len, self.head_dim)
        return [torch.randn(shape, **options) for shape in (queries, keys, keys, queries)]

    def masks(self) -> dict[str, BlockMask]:
        """The masks that are measured, by density."""
        patterns = {"1": masks.full(), "1/16": masks.random(1 / 16, seed=0)}
        lengths = (self.q_len, self.seq_len)
        return {s: p(lengths, self.block_size, "cuda") for s, p in patterns.items()}


def problems(which: str, size: Problem) -> list[Problem]:
    """The problems on which a pass is measured."""
    if which != "decode":
        return [size]
    return [replace(size, seq_len=CACHED, packed=packed) for packed in PACKED]


def candidates(which: str, problem: Problem) -> Iterator[Config]:
    """The configurations of a pass that divide the block, fit the device and may be fast."""
    architecture, memory = configs.limits(torch.device("cuda"))
    dtype = DTYPES[problem.dtype]
    stages = DECODE_STAGES if which == "decode" else STAGES
    axes = itertools.product(SIDES, SIDES, WARPS, stages, (True, False), REGISTERS)
    for config in itertools.starmap(Config, axes):
        if (
            divides(config, problem)
            and configs.shared_memory(config, which, dtype, problem.head_dim) <= memory
            and may_be_fast(which, config, problem.head_dim)
            and (architecture >= 90 or not config.tma)
        ):
            yield config


def divides(config: Config, problem: Problem) -> bool:
    """Whether the tiles divide a block, at most MAX_TILES_OF_SIDE along a side.

    In a decoding step a tile has the fewest rows that hold all packed heads.
    """
    block = problem.block_size
    if problem.packed:
        height = min(side for side in SIDES if side >= problem.packed)
        return config.bm == height and config.bn <= block <= MAX_TILES_OF_SIDE * config.bn
    few_tiles = MAX_TILES_OF_SIDE * min(config.bm, config.bn) >= block
    return few_tiles and configs.divides(config, (block, block))


def may_be_fast(which: str, config: Config, head_dim: int) -> bool:
    """Whether a configuration is within the bounds beyond which kernels are known to be slow."""
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
    """Compiles kernels in parallel processes, into Triton's cache on disk."""
    context = multiprocessing.get_context("spawn")
    workers = max(1, len(os.sched_getaffinity(0)) - 2)
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        list(pool.map(_compile, *zip(*jobs, strict=True)))


def _compile(which: str, problem: Problem, config: Config) -> None:
    small = replace(problem, batch=1, heads=1, seq_len=1024)
    mask = small.masks()["1"]
    # A kernel that does not compile is reported by `measure`.
    with contextlib.suppress(*FAILURES), configured(config, which):
        build_run(which, small, mask)()


@contextlib.contextmanager
def configured(config: Config, *passes: str) -> Iterator[None]:
    """A context in which calls are planned with one configuration, without a check that it fits.

    Args:
        config: The configuration.
        passes: The passes that use it.
    """
    choose = configs.choose

    def clear_caches() -> None:
        configs.kernel_variant.cache_clear()
        launch._prepare.cache_clear()

    def chosen(pass_name: str, *facts, **options) -> Config | None:
        return config if pass_name in passes else choose(pass_name, *facts, **options)

    clear_caches()
    try:
        with mock.patch.object(configs, "choose", chosen):
            yield
    finally:
        clear_caches()


def measure(which: str, problem: Problem, config: Config, console: Console) -> Iterator[dict]:
    """The row of a configuration for each mask.

    Prints the reason if the configuration does not compile or cannot be launched.
    """
    for density, mask in problem.masks().items():
        expected = build_run(which, problem, mask)()
        try:
            with configured(config, which):
                run = build_run(which, problem, mask)
                check_close(run(), expected, f"{which} with {config}")
                timing = time_call(lambda run=run: run, Clock.GRAPH, BUDGET_MS)
        except FAILURES as error:
            reason = escape(str(error).splitlines()[0][:80])
            console.print(f"[yellow]left out {config}: {reason}[/]")
            return
        yield asdict(config) | {"density": density, "median_ms": timing.median_ms}


def build_run(which: str, problem: Problem, mask: BlockMask):
    """A function without arguments that computes one pass, in the blocks of the mask."""
    query, key, value, grad_out = problem.tensors()
    spec = AttentionSpec.from_call(query, key, value, mask, AttentionOptions())
    call = Call(Plan(spec, triton_backend, mask.table(query.device)))
    if which in ("forward", "decode"):
        return lambda: call.forward(query, key, value)
    saved = (query, key, value, *call.forward(query, key, value))
    return lambda: call.backward(grad_out, None, saved, NEEDS[which])


def check_close(result: Iterable, expected: Iterable, what: str) -> None:
    """Raises AssertionError if the results of two configurations differ by more than rounding."""
    for ours, theirs in zip(result, expected, strict=True):
        if ours is not None:
            error = (ours.double() - theirs.double()).norm() / theirs.double().norm()
            assert error < 4 * torch.finfo(theirs.dtype).eps, f"{what}: differs by {error:.2g}"


def save(path: Path, which: str, problem: Problem, rows: list[dict]) -> None:
    """Adds a run to the file, in place of an earlier one of the same pass and problem."""
    runs = read_json(path, [])
    others = [r for r in runs if (r["pass"], Problem(**r["problem"])) != (which, problem)]
    run = {
        "pass": which,
        "problem": asdict(problem),
        "environment": environment(torch.device("cuda")),
        "rows": rows,
    }
    write_json(path, [*others, run])


def times_by_config(rows: list[dict]) -> dict[Config, dict[str, float]]:
    """The milliseconds of each configuration by density.

    Rows that were written before a field of Config existed have its default.
    """
    times = {}
    for row in rows:
        config = Config(**{name: row[name] for name in Config.__dataclass_fields__ if name in row})
        times.setdefault(config, {})[row["density"]] = row["median_ms"]
    return times


def fastest(rows: list[dict], title: str) -> Table:
    """A table of the SHOWN configurations with the least geometric mean of times."""
    times = times_by_config(rows)
    ranked = sorted(times, key=lambda config: math.prod(times[config].values()))
    figures = [f"s = {s}, ms" for s in times[ranked[0]]]
    table = plain_table(f"{title}: {len(ranked)} configurations", ["configuration"], figures)
    for config in ranked[:SHOWN]:
        table.add_row(str(config), *(f"{ms:.3f}" for ms in times[config].values()))
    return table
