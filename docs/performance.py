"""Writes docs/performance.md, and the table of the README, from the records of measurements.

    python docs/performance.py

A section whose record is absent is left out. `--check` only says whether both files are current.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from textwrap import fill

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "experiments/results"
PAGE, README = ROOT / "docs/performance.md", ROOT / "README.md"
TABLE = re.compile(r"(?<=<!-- speed -->\n).*?(?=\n<!-- /speed -->)", re.DOTALL)
# Implementations as a reader knows them.
NAMES = {
    "sparseflash": "sparseflash",
    "sparseflash:auto": "sparseflash",
    "sparseflash:hopper": "sparseflash, `hopper`",
    "sparseflash:triton": "sparseflash, `triton`",
    "sparseflash:hopper/any-order": "sparseflash, `deterministic=False`",
    "sparseflash:auto/any-order": "sparseflash, `deterministic=False`",
    "flash4": "FlashAttention-4",
    "flash": "FlashAttention-2 (torch)",
    "cudnn": "cuDNN",
    "flex": "FlexAttention",
    "cudnn-bsa": "cuDNN block-sparse attention",
    "cudnn-flex": "cuDNN flex attention",
    "standard": "materialised",
    "sdpa": "torch's choice",
}
ANY_ORDER = "/any-order"  # of implementations whose forward pass is that of the one without it
RENAMED = {"contender": "implementation"}  # keys of older records
UNITS = {"matrix units": "tensor cores"}  # in older records
SHOWN = ("sparseflash", "flash4", "flex")  # in the table of the README
DIRECTIONS = ("forward", "backward")
Rows = list[dict]


def load(name: str) -> dict | None:
    """A record, its rows with the present names of their keys; None where there is none."""
    path = RESULTS / f"{name}-nvidia-h200.json"
    if not path.exists():
        return None
    record = json.loads(path.read_text())
    record["rows"] = [
        {RENAMED.get(key, key): value for key, value in row.items()} for row in record["rows"]
    ]
    return record


def table(head: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    """A table of Markdown."""
    head = list(head)
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def size_of(row: dict) -> tuple:
    """What rows of one table share."""
    names = ("batch", "heads", "kv_heads", "q_len", "seq_len", "head_dim", "block_size")
    return tuple((name, row.get(name)) for name in names)


def words(size: tuple) -> str:
    """The size of a problem in words."""
    of = dict(size)
    heads = f"{of['heads']} heads of {of['head_dim']}"
    if of["kv_heads"]:
        heads += f" on {of['kv_heads']} heads of keys and values"
    queries = f"{of['q_len']} queries, {of['seq_len']:,} keys" if of["q_len"] else ""
    tokens = queries or f"{of['seq_len']:,} tokens"
    return f"{tokens}, batch {of['batch']}, {heads}, blocks of {of['block_size']}"


def by_size(rows: Rows, cell: Callable[[dict], str]) -> str:
    """For every size a table: a line for each mask, a column for each pass and implementation."""
    parts = []
    for size in dict.fromkeys(map(size_of, rows)):
        of_size = [row for row in rows if size_of(row) == size]
        parts += [f"**{words(size)}**", columns_of(of_size, cell)]
    return "\n\n".join(parts)


def columns_of(rows: Rows, cell: Callable[[dict], str]) -> str:
    """One table of by_size."""
    columns = [
        (direction, name)
        for direction in DIRECTIONS
        for name in dict.fromkeys(r["implementation"] for r in rows if r["direction"] == direction)
        if direction == "backward" or not name.endswith(ANY_ORDER)
    ]
    lines = []
    for pattern in dict.fromkeys(row["pattern"] for row in rows):
        found = {(r["direction"], r["implementation"]): r for r in rows if r["pattern"] == pattern}
        density = next(iter(found.values()))["density"]
        cells = [cell(found[column]) if column in found else "" for column in columns]
        lines.append([pattern, f"{density:.3g}", *cells])
    head = [f"{direction}: {NAMES[name]}" for direction, name in columns]
    return table(["mask", "density s", *head], lines)


def tflops(row: dict) -> str:
    return f"{row['tflops']:.0f}"


def terabytes(row: dict) -> str:
    return f"{row['terabytes_per_second']:.2f}"


def milliseconds(row: dict) -> str:
    return f"{row['median_ms']:#.3g}".rstrip(".")


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


def find(rows: Rows, pattern: str, direction: str, name: str) -> dict | None:
    """The row of a mask, a pass and an implementation."""
    wanted = (pattern, direction, name)
    same = (r for r in rows if (r["pattern"], r["direction"], r["implementation"]) == wanted)
    return next(same, None)


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


def io_complexity(record: dict) -> str:
    """Predicted and measured bytes and times, exponents of growth, and pictures."""
    panels = {
        "left": "FlashAttention and standard attention",
        "middle": "Block size",
        "right": "Density",
        "scaling": "Growth with N",
    }
    since = "fitted_gb" in record["rows"][0]
    head = ["mask", "tokens", "blocks", "density s", "pass", "GB predicted", "measured", ""]
    head += [*["GB fitted", ""] * since, "ms predicted", "measured", "", "bound by"]
    parts = [misses(record)]
    for panel, title in panels.items():
        rows = [row for row in record["rows"] if row["panel"] == panel]
        name = "implementation" if panel == "left" else "name"
        lines = [
            [
                NAMES.get(row[name], row[name]),
                *(f"{row['seq_len']:,}", f"{row['block_size']}", f"{row['density']:.3g}"),
                row["direction"],
                *against(row["memory_gb"], row["measured_gb"]),
                *(against(row["fitted_gb"], row["measured_gb"])[::2] if since else ()),
                *against(row["predicted_ms"], row["measured_ms"]),
                row["bound_by"],
            ]
            for row in rows
        ]
        heads = f"batch {rows[0]['batch']}, {rows[0]['heads']} heads of {rows[0]['head_dim']}"
        parts += [f"**{title}** ({heads})", table(head, lines)]
        if panel in ("right", "scaling"):
            picture = "figure-2" if panel == "right" else "scaling"
            file = f"../experiments/results/io-complexity-nvidia-h200-{picture}.png"
            parts.append(f"![{title}, predicted and measured]({file})")
    lines = [
        [
            *(fit["name"], fit["direction"], FITTED[fit["figure"]]),
            *(f"{fit['exponent']:.2f}", f"{fit['theory']:.2f}"),
        ]
        for fit in record["exponents"]
    ]
    parts.append(table(["mask", "pass", "what grows", "exponent", "N sqrt N, N log N"], lines))
    return "\n\n".join(parts)


FITTED = {
    "l2_gb": "bytes through L2, predicted",
    "predicted_ms": "time, predicted",
    "measured_ms": "time, measured",
}


def against(predicted: float, found: float | None) -> tuple[str, str, str]:
    """A prediction, what was measured, and its deviation."""
    if found is None:
        return f"{predicted:.3g}", "", ""
    return f"{predicted:.3g}", f"{found:.3g}", f"{found / predicted - 1:+.0%}"


THEORY = """\
Figure 2 of the FlashAttention paper, and growth with N: bytes of device memory and the least
time by [`sparseflash.io_model`](api/io-model.md), with the rates of the device as measured
first, beside hardware counters (Nsight Compute) and times. [The theory,
executed](tutorials/theory.md) derives the model.

"Predicted" is what the model said before the measurement. "Fitted" are the bytes of the model
since: a simulation of L2 with CTAs that drift apart. How unequal their steps are is a number that
is fitted to these measurements, the share of L2 that holds operands to those before. It changes
nothing but bytes."""

OFF = {"bytes": 0.15, "time": 0.25}  # share of the prediction that is explained below
TILE = 128  # tokens of a row of a work tile, at 64 and 128 dims
FEW_WAVES = 8  # of work tiles
SHORT_ROW = 9.5  # blocks


def deviation(row: dict, figure: str) -> float:
    """Measured over modelled, less 1."""
    if figure == "time":
        return row["measured_ms"] / row["predicted_ms"] - 1
    return row["measured_gb"] / row.get("fitted_gb", row["memory_gb"]) - 1


def pairs(row: dict) -> float:
    """Of tokens that a pass computes, once for each kernel: two products forward, three and four
    backward."""
    products = 2 if row["direction"] == "forward" else 7
    return row["gflop"] * 1e9 / (2 * products * row["head_dim"])


def exponentials_ms(row: dict, model: dict) -> float:
    """Milliseconds of the exponentials alone, one for each pair and kernel, 16 a cycle."""
    kernels = 1 if row["direction"] == "forward" else 2
    return kernels * pairs(row) / (16 * model["multiprocessors"] * model["clock"]) * 1e3


def written_gb(row: dict) -> float:
    """Of outputs: O, or dQ, dK and dV."""
    tensors = 1 if row["direction"] == "forward" else 3
    numbers = row["batch"] * row["heads"] * row["seq_len"] * row["head_dim"]
    return 2 * tensors * numbers / 1e9


def waves(row: dict, model: dict) -> float:
    """Work tiles for each multiprocessor."""
    tiles = row["batch"] * row["heads"] * row["seq_len"] / TILE
    return tiles / model["multiprocessors"]


def row_blocks(row: dict) -> float:
    """Blocks a row, no smaller than tiles."""
    return row["density"] * row["seq_len"] / max(row["block_size"], TILE)


def rate(row: dict) -> float:
    """Terabytes of device memory a second, measured."""
    return row["measured_gb"] / row["measured_ms"]


def spread(values: Iterable[float], form: str) -> str:
    """The least and the largest, as one where they are the same."""
    low, high = (format(f(found), form) for found in [list(values)] for f in (min, max))
    return low if low == high else f"{low} to {high}"


def listed(values: Iterable[float]) -> str:
    """All of them."""
    return " and ".join(f"{value:.3g}" for value in values)


def extra_squares(row: dict) -> float:
    """Measured less predicted bytes, in N x N numbers of all heads."""
    square = 2 * row["batch"] * row["heads"] * row["seq_len"] ** 2
    return (row["measured_gb"] - row["memory_gb"]) * 1e9 / square


# What is off (bytes or time), in which calls, whether a row is one of them, and why. The first
# that holds for a row is its cause.
Cause = tuple[str, str, Callable[[dict, dict], bool], Callable[[Rows, dict], str]]
CAUSES: tuple[Cause, ...] = (
    (
        "bytes",
        "standard attention",
        lambda row, model: row["implementation"] == "standard",
        lambda rows, model: (
            f"torch moves {spread(map(extra_squares, rows), '.1f')} N² numbers more than "
            "Algorithm 3; in which of its kernels was not counted"
        ),
    ),
    (
        "bytes",
        "small calls",
        lambda row, model: (
            written_gb(row) * 1e9 <= model["l2_bytes"] and deviation(row, "bytes") < 0
        ),
        lambda rows, model: (
            f"outputs, {spread((written_gb(r) / r['memory_gb'] for r in rows), '.0%')} of the "
            "predicted bytes, fit into L2 and are not yet in device memory when the kernel ends"
        ),
    ),
    (
        "bytes",
        "heads whose keys and values exceed L2",
        lambda row, model: 4 * row["seq_len"] * row["head_dim"] > model["l2_bytes"],
        lambda rows, model: (
            "how far CTAs drift apart, and so how often they read a block again, is the same "
            "for all masks in the model"
        ),
    ),
    (
        "time",
        "standard attention",
        lambda row, model: row["implementation"] == "standard",
        lambda rows, model: (
            f"its kernels move {spread(map(rate, rows), '.1f')} TB/s, where a copy moves "
            f"{model['memory_bandwidth'] / 1e12:.1f}; backward they also move more"
        ),
    ),
    (
        "time",
        "heads of 64 dims",
        lambda row, model: row["head_dim"] < 128,
        lambda rows, model: (
            "a tile takes half the products and as many exponentials as at 128 dims, and both "
            f"overlap in part: products alone take {listed(r['predicted_ms'] for r in rows)} ms, "
            "products and exponentials one after the other "
            f"{listed(r['predicted_ms'] + exponentials_ms(r, model) for r in rows)}, measured are "
            f"{listed(r['measured_ms'] for r in rows)}"
        ),
    ),
    (
        "time",
        "few work tiles",
        lambda row, model: waves(row, model) < FEW_WAVES,
        lambda rows, model: (
            f"{spread((waves(r, model) for r in rows), '.1f')} for each multiprocessor do not "
            "fill the device to the end, and a launch takes time: "
            f"{spread((1e3 * (r['measured_ms'] - r['predicted_ms']) for r in rows), '.0f')} µs "
            "more than predicted"
        ),
    ),
    (
        "time",
        "short rows",
        lambda row, model: row_blocks(row) < SHORT_ROW,
        lambda rows, model: (
            f"of {spread(map(row_blocks, rows), '.0f')} blocks; the prologue and the epilogue of "
            "a row, which the model does not have, would take as long as "
            f"{spread((deviation(r, 'time') * row_blocks(r) for r in rows), '.1f')} blocks"
        ),
    ),
    (
        "time",
        "masks that stream from device memory",
        lambda row, model: rate(row) * 1e12 > model["memory_bandwidth"] / 3,
        lambda rows, model: (
            f"{spread(map(rate, rows), '.1f')} TB/s beside the products, where a copy without "
            f"any moves {model['memory_bandwidth'] / 1e12:.1f}: loads come late, and products wait"
        ),
    ),
)


def misses(record: dict) -> str:
    """How many predictions are off, and why, by the rows of the record."""
    rows = [row for row in record["rows"] if row["measured_gb"] and row["measured_ms"]]
    model = record["model"]
    first = sum(abs(r["measured_gb"] / r["memory_gb"] - 1) > OFF["bytes"] for r in rows)
    off = {f: [r for r in rows if abs(deviation(r, f)) > least] for f, least in OFF.items()}
    lines = [
        f"Of {len(rows)} passes, bytes were off by more than {OFF['bytes']:.0%} in {first}, and "
        f"are in {len(off['bytes'])} by the model since; the time is by more than "
        f"{OFF['time']:.0%} in {len(off['time'])}. Why:",
        "",
    ]
    for figure, calls, holds, why in CAUSES:
        own = [row for row in off[figure] if holds(row, model)]
        off[figure] = [row for row in off[figure] if row not in own]
        if own:
            lines.append(f"- {figure} of *{calls}* ({described(own, figure)}): {why(own, model)}.")
    lines += [
        f"- {figure} without a known cause: {row['name']}, {row['seq_len']:,} tokens, "
        f"{row['direction']}, {deviation(row, figure):+.0%}."
        for figure, left in off.items()
        for row in left
    ]
    return "\n".join(
        fill(line, 110, subsequent_indent="  " * line.startswith("- ")) for line in lines
    )


def described(rows: Rows, figure: str) -> str:
    """How many rows of a record, their lengths, and by how much they are off."""
    passes = f"{len(rows)} passes" if len(rows) > 1 else f"{rows[0]['direction']} pass"
    return (
        f"{passes}, {spread((r['seq_len'] for r in rows), ',')} tokens, "
        f"{spread((deviation(r, figure) for r in rows), '+.0%')}"
    )


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


def measured(record: dict) -> str:
    """Where and how a record was measured."""
    found = record["environment"]
    versions = found["versions"]
    commit = (found["git"]["commit"] or "unknown")[:7] + " with changes" * bool(
        found["git"]["dirty"]
    )
    return (
        f"*{found['device']}, torch {versions['torch']}, triton {versions['triton']}, commit "
        f"{commit}, {found['date'][:10]}: `{found['command'].split(' --output')[0]}`*"
    )


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
    wanted = {PAGE: page(), README: TABLE.sub(readme_table(), README.read_text())}
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
