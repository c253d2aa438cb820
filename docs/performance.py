"""Writes docs/performance.md, and the table of the README, from the records of measurements.

    python docs/performance.py

A section whose record is absent is left out. `--check` only says whether both files are current.
"""

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # as a script
sys.path.insert(0, str(Path(__file__).parent))  # where docs is no package

from io_complexity import THEORY, io_complexity
from records import (
    DIRECTIONS,
    NAMES,
    ROOT,
    by_size,
    find,
    load,
    measured,
    milliseconds,
    size_of,
    words,
)

from experiments.markdown import table, written

PAGE, README = ROOT / "docs/performance.md", ROOT / "README.md"
UNITS = {"matrix units": "tensor cores"}  # in older records
SHOWN = ("sparseflash", "flash4", "flex")  # in the table of the README


def tflops(row: dict) -> str:
    return f"{row['tflops']:.0f}"


def terabytes(row: dict) -> str:
    return f"{row['terabytes_per_second']:.2f}"


def mebibytes(row: dict) -> str:
    return f"{row['peak_bytes'] / 2**20:,.0f}"


def suite(cell: Callable[[dict], str]) -> Callable[[dict], str]:
    """A section of all sizes of a record."""
    return lambda record: by_size(record["rows"], cell)


def speedup(record: dict) -> str:
    """Times of every density at the longest sequences, with speed-up and its ideal."""
    rows = [r for r in record["rows"] if r.get("suite", r.get("sweep")) == "density"]
    longest = max(r["seq_len"] for r in rows)
    rows = [r for r in rows if r["seq_len"] == longest]
    ours = [r for r in rows if r["implementation"] == "sparseflash"]
    lines = []
    for pattern in dict.fromkeys(r["pattern"] for r in ours):
        line = [f"`{pattern}`"]
        for direction in DIRECTIONS:
            own = find(rows, pattern, direction, "sparseflash")
            flex = find(rows, pattern, direction, "flex")
            if own is None:
                break
            if direction == "forward":
                line += [f"{own['density']:.4g}", f"{1 / own['density']:.1f}x"]
            ratio = f"{flex['median_ms'] / own['median_ms']:.2f}x" if flex else ""
            line += [milliseconds(own), f"{own['speedup']:.2f}x", ratio]
        lines.append(line)
    head = ["mask", "density s", "ideal 1 / s"]
    for direction in DIRECTIONS:
        head += [f"{direction}, ms", "against full mask", "against FlexAttention"]
    return f"**{words(size_of(ours[0]))}**\n\n{table(head, lines)}"


def host_time(record: dict) -> str:
    """Host time of calls, and what of it is not ours, as far as the record says."""
    parts = {"total_us": "all of it", "kernels_us": "launches", "engine_us": "torch's autograd"}
    parts |= {"overhead_us": "ours"}
    known = [name for name in parts if name in record["rows"][0]]
    lines = [[r["call"], *(f"{r[name]:.0f}" for name in known)] for r in record["rows"]]
    head = ["call", *(f"{parts[name]}, us" for name in known)]
    shape = ", ".join(f"{name.replace('_', ' ')} {n}" for name, n in record["shape"].items())
    return f"**{shape}**\n\n{table(head, lines)}"


def counters(record: dict) -> str:
    """How busy the parts of the device are."""
    units = list(record["rows"][0]["percent"])
    lines = [
        [
            row["problem"],
            NAMES.get(row["implementation"], row["implementation"]),
            f"`{row['kernel']}`",
            f"{row['cycles']:,.0f}",
            *(f"{row['percent'][unit]:.0f}" for unit in units),
        ]
        for row in record["rows"]
    ]
    return table(
        ["mask", "implementation", "kernel", "cycles", *(f"{UNITS.get(u, u)}, %" for u in units)],
        lines,
    )


def power(record: dict) -> str:
    """Rates after a pause and under continuous load."""
    lines = [
        [
            row["problem"],
            row["direction"],
            NAMES.get(row["implementation"], row["implementation"]),
            f"{row['rested_tflops']:.0f}",
            f"{row['sustained_tflops']:.0f}",
            f"{row['clock'] / 1000:.2f}",
        ]
        for row in record["rows"]
    ]
    return table(["mask", "pass", "implementation", "rested", "sustained", "clock, GHz"], lines)


TFLOPS = "Useful TFLOP/s: those of non-zero blocks only. More is better."
SECTIONS: tuple[tuple[str, str, str, Callable[[dict], str]], ...] = (
    (
        "speedup",
        "Speed-up against density",
        "The same kernels on a sparse and on the full mask. The ideal speed-up is 1 / s. "
        "FlexAttention computes the same masks in the same run.",
        speedup,
    ),
    (
        "bench-sparse",
        "Block-sparse masks",
        f"{TFLOPS} Masks of full blocks, which every implementation here can skip. "
        "`deterministic=False` (whose forward pass is the same) and FlashAttention-4 add to dQ in "
        "any order; the other columns give the same bits every time.",
        suite(tflops),
    ),
    ("bench-dense", "Full and causal masks", TFLOPS, suite(tflops)),
    (
        "bench-small-blocks",
        "Blocks below 128",
        f"{TFLOPS} The smaller the scattered block, the more L2 bandwidth binds.",
        suite(tflops),
    ),
    (
        "bench-decode",
        "Decoding",
        "TB/s of keys and values in non-zero blocks. More is better; a plain copy reaches 4.24.",
        suite(terabytes),
    ),
    (
        "bench-lra",
        "The sizes of Long Range Arena",
        "Milliseconds. Less is better. Training on these tasks: "
        "[Long Range Arena](../experiments/lra/README.md).",
        suite(milliseconds),
    ),
    (
        "bench-memory",
        "Memory",
        "Most MiB alive during a pass beyond its inputs; a backward pass with its forward. "
        "Growth is linear in the length; materialised attention is quadratic.",
        suite(mebibytes),
    ),
    *(
        (
            name,
            "Host time of a call",
            "Microseconds of a small call, so that the host is what takes time, forward and "
            f"backward.{remark}",
            host_time,
        )
        for name, remark in (
            ("host-time", ""),
            (
                "overhead",
                " Measured before dispatch was rewritten, and not since; ours includes torch's "
                "autograd engine.",
            ),
        )
    ),
    (
        "counters",
        "How busy the device is",
        "Percent of the cycles in which a unit is busy, from hardware counters. Cycles do not "
        "depend on the clock.",
        counters,
    ),
    ("io-complexity", "Theory and measurement", THEORY, io_complexity),
    (
        "power",
        "Rested and sustained",
        "Useful TFLOP/s after a pause and under continuous load, where the power limit lowers the "
        "clock.",
        power,
    ),
    (
        "triton/speedup",
        "The backend `triton` alone",
        "The portable kernels on the same device.",
        speedup,
    ),
)
INTRODUCTION = """# Performance

<!-- Generated by `python docs/performance.py`. Do not edit. -->

Every figure here comes from a record in `experiments/results/` that names its command, device,
versions and commit. A result is checked before it is timed. Implementations are timed in
alternation, each after each other one as often, with a flushed cache. Measure your own device with
`python -m experiments.speedup` (a minute with `--quick`) and `python -m experiments.bench`.

Times and rates are rested unless a table says otherwise:
[what the benchmark prints](benchmark-columns.md).

**Density s** is the share of blocks that are not empty. **Useful FLOPs** are those of non-zero
blocks: forward 4 · head dim · pairs, backward 2.5 times as many. What was tried and did not pay is
in the [notebook](notebook/2026-11.md).
"""


def page() -> str:
    """docs/performance.md."""
    parts = [INTRODUCTION]
    for name, title, text, show in SECTIONS:
        if (record := load(name)) is not None:
            parts.append(f"## {title}\n\n{text}\n\n{show(record)}\n\n{measured(record)}\n")
    return "\n".join(parts)


def readme_table() -> str:
    """Milliseconds of both passes on masks of full blocks, 16,384 tokens."""
    record = load("bench-sparse")
    assert record is not None, "the table of the README needs the record bench-sparse"
    size = size_of(record["rows"][0])
    rows = [r for r in record["rows"] if size_of(r) == size and r["implementation"] in SHOWN]
    lines = []
    for pattern in dict.fromkeys(r["pattern"] for r in rows):
        cells = [
            milliseconds(row)
            for direction in DIRECTIONS
            for name in SHOWN
            if (row := find(rows, pattern, direction, name))
        ]
        density = next(r["density"] for r in rows if r["pattern"] == pattern)
        lines.append([pattern, f"{density:.1%}", *cells])
    head = ["mask", "blocks computed"]
    head += [f"{direction}: {NAMES[name]}" for direction in DIRECTIONS for name in SHOWN]
    return table(head, lines)


def main() -> int:
    wanted = {PAGE: page(), README: written(README.read_text(), {"speed": readme_table})}
    if "--check" in sys.argv:
        old = [path.name for path, text in wanted.items() if path.read_text() != text]
        print(f"not current: {', '.join(old)}" if old else "current")
        return len(old)
    for path, text in wanted.items():
        path.write_text(text)
        print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
