"""Writes docs/performance.md, and the table of the README, from the records of measurements.

    python docs/performance.py

A section whose record is absent is left out. `--check` only says whether both files are current.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

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
    before = "first_memory_gb" in record["rows"][0]
    head = ["mask", "tokens", "blocks", "density s", "pass", *["GB predicted first"] * before]
    head += ["GB predicted", "measured", "", "ms predicted", "measured", "", "bound by"]
    parts = []
    for panel, title in panels.items():
        rows = [row for row in record["rows"] if row["panel"] == panel]
        name = "implementation" if panel == "left" else "name"
        lines = [
            [
                NAMES.get(row[name], row[name]),
                *(f"{row['seq_len']:,}", f"{row['block_size']}", f"{row['density']:.3g}"),
                row["direction"],
                *([f"{row['first_memory_gb']:.3g}"] if before else ()),
                *against(row["memory_gb"], row["measured_gb"]),
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

Times, and bytes of standard attention, were predicted before they were measured. So were those
in the column "GB predicted first": a streamed tile is read once, or once in every wave where L2
does not hold all tiles. That held where L2 holds what is streamed, and was up to 58 % too low
where heads are scheduled together or a tile comes back late. Then L2 was simulated, with a
capacity fitted to these measurements (80 % of its size): "GB predicted".

Where the prediction is off by more than 15 % of the bytes or 25 % of the time:

- *Bytes below 8,192 tokens* (14 to 26 % fewer): one of four tensors is an output, which is in L2
  and not yet in device memory when the kernel ends.
- *Bytes of strided masks from 131,072 tokens on* (78 to 164 % more; 17 % backward at 32,768):
  three or four of 132 CTAs share a block. The model loads it for all of them in one step; CTAs
  that drift apart load it again.
- *Standard attention*: backward, torch moves 3 N² numbers more than Algorithm 3, which was not
  examined. Products and softmax read at 3.2 to 3.8 TB/s, a copy at 4.2.
- *Time at 64 dims* (39 to 60 % more): a tile takes half the products and as many exponentials.
  Both overlap in part: the time lies between that of the products (0.358 and 1.25 ms) and that
  of products and exponentials one after the other (0.64 and 1.81).
- *Time of short rows* (random 1/32, four blocks a row): prologue and epilogue of each row.
- *Time below 16,384 tokens of one sequence*: too few work tiles to fill the device, and a few
  microseconds for each launch.
- *Time of blocks of 64, and forward at 262,144 tokens* (27 to 30 %): L2 and device memory
  deliver more than half of what they can, and products wait."""

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
