"""Writes docs/performance.md, and the table of the README, from the records of measurements.

    python docs/performance.py

A section whose record is absent is left out. `--check` only says whether both files are current.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

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
SHOWN = (2, 16, 16384, 128)  # batch, heads, tokens and head dim of the README's table
OURS, ANY_ORDER = "sparseflash", "sparseflash:auto/any-order"
PEERS = ("flash4", "flex", "cudnn-bsa", "cudnn-flex")


def tflops(row: dict) -> str:
    return f"{row['tflops']:.0f}"


def rested_and_sustained(row: dict) -> str:
    return f"{row['tflops']:.0f} / {row['sustained_tflops']:.0f}"


def terabytes(row: dict) -> str:
    return f"{row['terabytes_per_second']:.2f}"


def sparse(record: dict) -> str:
    """How far each pass is from the fastest peer of its row; then all sizes."""
    return f"{against_peers(record['rows'])}\n\n{by_size(record['rows'], rested_and_sustained)}"


def against_peers(rows: list[dict]) -> str:
    """By head dim and pass: our rate over that of the fastest peer, least, median and most."""
    lines = []
    for head_dim in sorted({row["head_dim"] for row in rows}, reverse=True):
        same = [row for row in rows if row["head_dim"] == head_dim]
        for direction, ours in ("forward", OURS), ("backward", ANY_ORDER), ("backward", OURS):
            cells = [
                ratios(same, direction, ours, clock) for clock in ("tflops", "sustained_tflops")
            ]
            lines.append([f"{head_dim}", f"{direction}: {NAMES[ours]}", *cells])
    heads = (f"{c}: least, median, most; rows below 1" for c in ("rested", "sustained"))
    return table(["head dim", "pass", *heads], lines)


def ratios(rows: list[dict], direction: str, ours: str, clock: str) -> str:
    """Of all masks and sizes that ours and a peer measured."""
    found = []
    for size in dict.fromkeys(map(size_of, rows)):
        of_size = [row for row in rows if size_of(row) == size]
        for pattern in dict.fromkeys(row["pattern"] for row in of_size):
            own = find(of_size, pattern, direction, ours)
            peers = [row[clock] for row in of_peers(of_size, pattern, direction)]
            if own and peers:
                found.append(own[clock] / max(peers))
    below = sum(value < 1 for value in found)
    return f"{min(found):.2f}, {median(found):.2f}, {max(found):.2f}; {below} of {len(found)}"


def of_peers(rows: list[dict], pattern: str, direction: str) -> list[dict]:
    """What peers measured of a mask and a pass."""
    return [row for name in PEERS if (row := find(rows, pattern, direction, name))]


def mebibytes(row: dict) -> str:
    return f"{row['peak_bytes'] / 2**20:,.0f}"


def suite(cell: Callable[[dict], str]) -> Callable[[dict], str]:
    """A section of all sizes of a record."""
    return lambda record: by_size(record["rows"], cell)


def speedup(record: dict) -> str:
    """Times of every density at the longest sequences, with speed-up and its ideal."""
    rows = [r for r in record["rows"] if r["suite"] == "density"]
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
        ["mask", "implementation", "kernel", "cycles", *(f"{unit}, %" for unit in units)],
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
        "Each cell is rested / sustained. The backward passes of `deterministic=False`, "
        "FlashAttention-4 and cuDNN add to dQ in any order; those of sparseflash and "
        "FlexAttention give the same bits every time. The first table divides our rate by that of "
        "the fastest other implementation of each row.",
        sparse,
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
    """Milliseconds of both passes on masks of full blocks, beside the fastest peer of each row."""
    record = load("bench-sparse")
    assert record is not None, "the table of the README needs the record bench-sparse"
    names = ("batch", "heads", "seq_len", "head_dim")
    rows = [row for row in record["rows"] if tuple(row[name] for name in names) == SHOWN]
    own = [("forward", OURS), ("backward", OURS), ("backward", ANY_ORDER)]
    lines = []
    for pattern in dict.fromkeys(row["pattern"] for row in rows):
        forward, backward, any_order = (find(rows, pattern, *which) for which in own)
        peers = (fastest(of_peers(rows, pattern, direction)) for direction in DIRECTIONS)
        ahead, behind = (f"{milliseconds(row)} ({NAMES[row['implementation']]})" for row in peers)
        ours = map(milliseconds, (forward, backward, any_order))
        lines.append([pattern, f"{forward['density']:.1%}", next(ours), ahead, *ours, behind])
    head = ["mask", "blocks computed", "forward: sparseflash", "fastest other"]
    head += ["backward: sparseflash", "`deterministic=False`", "fastest other"]
    return table(head, lines)


def fastest(rows: list[dict]) -> dict:
    return min(rows, key=lambda row: row["median_ms"])


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
