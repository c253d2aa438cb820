"""Writes docs/performance.md and the speed table of the README from the records of measurements.

    python docs/performance.py

A section shows the records of all GPUs, one after another; one without a record is left out. With
`--check` nothing is written: the command prints whether both files agree with the records.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # as a script
sys.path.insert(0, str(Path(__file__).parent))  # where docs is no package

from baselines import (
    ANY_ORDER,
    BASELINES,
    OURS,
    compared,
    fastest,
    of_baselines,
    over_fastest,
    planned_order,
)
from io_complexity import THEORY, io_complexity
from long_context import (
    STRONG,
    STRONG_TEXT,
    WEAK,
    long_context,
    strong,
)
from long_context import TEXT as LONG_CONTEXT
from long_context import briefly as scaling_briefly
from records import (
    DEVICE,
    DIRECTIONS,
    FROM_DOCS,
    NAMES,
    NOTHING,
    ROOT,
    by_shape,
    find,
    load,
    load_each,
    measured,
    paragraphs,
    picture,
    time_of,
    words,
)

from experiments.markdown import table, update, written
from experiments.record import is_ours
from sparseflash.backends.hopper.configs import (
    MAX_DQ_WARPGROUP_DIMS,
    MAX_ORDINALS,
    MIN_FUSED_BLOCKS,
    MIN_PLANNED_BLOCKS,
)
from sparseflash.gap import LARGE

PAGE, README = ROOT / "docs/performance.md", ROOT / "README.md"
SHOWN = (2, 16, 16384, 128)  # batch, heads, tokens and head dim of the README's table
PICTURE = re.compile(r"!\[[^]]*\]\(experiments/results/speedup-[^)]*\)")
FLASH4 = "kernel_cutlass_kernel_flash_attncuteflash_"
KERNELS = {  # names in records: kernels of FlashAttention-4, and ours under their former names
    f"{FLASH4}fwd_sm90": "forward",
    f"{FLASH4}bwd_preprocess": "preprocess",
    f"{FLASH4}bwd_sm90": "backward",
    f"{FLASH4}bwd_postprocess": "postprocess",
    "query_gradient": "dq",
    "key_value_gradient": "dkdv",
    "fused_gradient": "fused",
    "row_terms": "lse_delta",
    "finish": "convert_dq",
}


def tflops(row: dict) -> str:
    return f"{row['tflops']:.0f}"


def terabytes(row: dict) -> str:
    return f"{row['terabytes_per_second']:.2f}"


def decoding(record: dict) -> str:
    """The rate of a copy, which is the limit, then all sizes."""
    copy = record["roofline"]["copy_terabytes_per_second"]
    limit = f"A copy of memory on the same device reaches {copy:.2f} TB/s."
    return f"{limit}\n\n{by_shape(record['rows'], terabytes)}"


def mebibytes(row: dict) -> str:
    return f"{row['peak_bytes'] / 2**20:,.0f}"


def suite(cell: Callable[[dict], str]) -> Callable[[dict], str]:
    """A section of all sizes of a record."""
    return lambda record: by_shape(record["rows"], cell)


def speedup(record: dict) -> str:
    """Times of every density at the longest length, with the speed-up and its ideal; gaps."""
    longest, rows = at_longest(record)
    name = next(r["implementation"] for r in rows if is_ours(r["implementation"]))
    ours = [r for r in rows if r["implementation"] == name]
    lines = []
    for pattern in dict.fromkeys(r["pattern"] for r in ours):
        line = [f"`{pattern}`"]
        for direction in DIRECTIONS:
            own = find(rows, pattern, direction, name)
            flex = find(rows, pattern, direction, "flex")
            if own is None:
                break
            if direction == "forward":
                line += [f"{own['density']:.4g}", f"{1 / own['density']:.1f}x"]
            ratio = f"{flex['median_ms'] / own['median_ms']:.2f}x" if flex else ""
            line += [time_of(own), f"{own['speedup']:.2f}x", ratio]
        lines.append(line)
    head = ["mask", "density s", "ideal speed-up 1 / s"]
    for direction in DIRECTIONS:
        head += [f"{direction}, ms", "speed-up over full mask", "speed-up over FlexAttention"]
    size = f"{longest:,} tokens, batch {ours[0]['batch']}, {words(ours[:1])}"
    parts = [f"**{size}**", table(head, lines)]
    parts += [speedup_picture(record), gaps(record)]
    return "\n\n".join(filter(None, parts))


def at_longest(record: dict) -> tuple[int, list[dict]]:
    """The longest length at which densities were measured, and the rows of it."""
    rows = [r for r in record["rows"] if r["suite"] == "density"]
    longest = max(r["seq_len"] for r in rows)
    return longest, [r for r in rows if r["seq_len"] == longest]


def speedup_picture(record: dict, folder: str = FROM_DOCS) -> str:
    """The picture at the longest length; `folder` is the path of the records from the page."""
    title = f"Speed-up over the full mask against density, {record['environment']['device']}"
    return picture(f"{record['stem']}-speedup-{at_longest(record)[0]}", title, folder)


def gaps(record: dict) -> str:
    """The parts of the gap of some masks, in milliseconds; empty if they were not measured."""
    found = record.get("gaps", [])
    if not found:
        return ""
    parts = [name for name in found[0]["parts"] if any(above_noise(gap, name) for gap in found)]
    lines = [
        [
            *(f"`{gap['pattern']}`", gap["direction"]),
            *(f"{gap['measured']:.3f}", f"{gap['ideal']:.3f}"),
            *(f"{gap['parts'][name]:+.3f}" if above_noise(gap, name) else "0" for name in parts),
            gap["largest"] or "none",
        ]
        for gap in found
    ]
    head = ["mask", "pass", "measured", "ideal", *parts, "largest part with a known change"]
    changes = {gap["largest"]: gap["change"] for gap in found if gap["largest"]}
    told = [
        f"**Gap to the ideal time at {found[0]['seq_len']:,} tokens, and its parts, in "
        "milliseconds**",
        "The ideal time is s times the time of the full mask. A part that does not exceed its "
        "noise is 0.",
        table(head, lines),
        unexplained(found),
    ]
    if changes:
        told.append("What would reduce the largest parts:")
        told.append("\n".join(f"- {name}: {change}" for name, change in changes.items()))
    return "\n\n".join(told)


def unexplained(gaps: list[dict]) -> str:
    """The largest remainder over the measured time, and those that `explain` points out."""
    shares = {
        f"`{gap['pattern']}` {gap['direction']}": gap["parts"]["remainder"] / gap["measured"]
        for gap in gaps
    }
    largest = max(map(abs, shares.values()))
    said = f"The remainder is at most {100 * largest:.1f} % of the measured time."
    above = [f"{n} {100 * s:+.1f} %" for n, s in shares.items() if abs(s) > LARGE]
    if above:
        limit = f"{100 * LARGE:g} %"
        said += f" Above {limit}, where the parts do not explain the gap: {', '.join(above)}."
    return said


def above_noise(gap: dict, part: str) -> bool:
    """Whether a part is larger than its noise, as `sparseflash.gap` prints it."""
    return abs(gap["parts"][part]) > gap["noise"][part]


def host_time(record: dict) -> str:
    """Host time of calls, and the parts of it that the record has."""
    parts = {"total_us": "total", "kernels_us": "launches", "engine_us": "autograd of torch"}
    parts |= {"overhead_us": "sparseflash"}
    known = [name for name in parts if name in record["rows"][0]]
    lines = [[r["call"], *(f"{r[name]:.0f}" for name in known)] for r in record["rows"]]
    head = ["call", *(f"{parts[name]}, µs" for name in known)]
    return f"**{shape_of_call(record)}**\n\n{table(head, lines)}"


def shape_of_call(record: dict) -> str:
    """The sizes of the calls of a record in words."""
    return ", ".join(f"{name.replace('_', ' ')} {n}" for name, n in record["shape"].items())


def first_call(record: dict) -> str:
    """Seconds of each call of a process, with empty and with filled caches."""
    calls = list(dict.fromkeys(row["call"] for row in record["rows"]))
    seconds = {
        (row["implementation"], row["cache"], row["call"]): row["seconds"]
        for row in record["rows"]
    }
    lines = [
        [
            WARMED_UP if name == "warmup" else NAMES[name],
            cache,
            *(
                f"{seconds[name, cache, c]:.2f}" if (name, cache, c) in seconds else ""
                for c in calls
            ),
        ]
        for name, cache in dict.fromkeys((name, cache) for name, cache, _ in seconds)
    ]
    head = ["", "caches", *(f"{call}, s" for call in calls)]
    return f"**{shape_of_call(record)}**\n\n{table(head, lines)}"


def counters(record: dict) -> str:
    """What binds, and the utilisation of the units of the device, for each kernel."""
    return paragraphs([what_binds(record), utilisation(record)])


def what_binds(record: dict) -> str:
    """Why a baseline can be faster, in sentences with figures of the record."""
    rows = {
        (row["problem"], NAMES.get(row["implementation"]), kernel_name(row["kernel"])): row
        for row in record["rows"]
    }

    def busy(problem: str, implementation: str, kernel: str, unit: str) -> str:
        row = rows.get((problem, NAMES[implementation], kernel))
        return NOTHING if row is None else f"{row['percent'][unit]:.0f}"

    dq, dkdv = (busy("full", OURS, kernel, "tensor cores") for kernel in ("dq", "dkdv"))
    in_order = "full, in any order"
    shared = busy(in_order, ANY_ORDER, "fused", "shared memory")
    of_theirs = busy("full", "flash4", "backward", "shared memory")
    small = "full, 64 dims"
    units = "tensor cores", "exponentials"
    own, theirs = (
        " and ".join(f"{busy(small, name, 'forward', unit)} %" for unit in units)
        for name in (OURS, "flash4")
    )
    return (
        "**What binds where a baseline is faster.** The two kernels of the default backward pass "
        f"keep the tensor cores busy for {dq} % and {dkdv} % of their cycles on the full mask, "
        "but they multiply seven times for a tile and one kernel five times, so that at most 5/7 "
        "of the matrix rate are useful. The kernel of `deterministic=False`, with five products, "
        f"is bound by shared memory, which is busy for {shared} % of its cycles (FlashAttention-4 "
        f"{of_theirs} %). With 64 dims no unit is near its limit in the forward pass: tensor "
        f"cores and exponentials are busy for {own} of the cycles (FlashAttention-4 {theirs}), "
        "and the rest are waits of one for the other."
    )


def utilisation(record: dict) -> str:
    """A row for each kernel."""
    units = list(record["rows"][0]["percent"])
    lines = [
        [
            row["problem"].removesuffix(", in any order").replace(" of 32,768", ", 32,768 tokens"),
            NAMES.get(row["implementation"], row["implementation"]),
            f"`{kernel_name(row['kernel'])}`",
            f"{row['cycles']:,.0f}",
            *(f"{row['percent'][unit]:.0f}" for unit in units),
        ]
        for row in record["rows"]
    ]
    return table(
        ["mask", "implementation", "kernel", "cycles", *(f"{unit}, %" for unit in units)],
        lines,
    )


def kernel_name(recorded: str) -> str:
    """The short name of a kernel, from the beginning of its recorded name."""
    known = (short for name, short in KERNELS.items() if recorded.startswith(name))
    return next(known, recorded)


def lab(record: dict) -> str:
    """Seconds and gigabytes of profiles."""
    lines = [
        [
            *(f"{r['layers']}", f"{r['heads']} on {r['kv_heads']}", f"{r['tokens']:,}"),
            *(f"{r['patterns']}", "yes" if r["loss"] else "no"),
            *(f"{r['seconds']:.1f}", f"{r['first_layer_seconds']:.1f}"),
            *(f"{value:.3g}" if value else "" for value in (r["layer_seconds"], r["peak_gb"])),
            f"{r['scores_gb']:.3g}",
        ]
        for r in record["rows"]
    ]
    head = ["layers", "heads of queries on keys", "tokens", "candidates", "loss", "seconds"]
    head += ["first layer, s", "further layer, s", "peak memory, GB"]
    return table([*head, "N x N scores of a layer would be, GB"], lines)


def power(record: dict) -> str:
    """Rested and sustained rates, and the clock under continuous load."""
    lines = [
        [
            row["problem"],
            f"{row['seq_len']:,}",
            row["direction"],
            NAMES.get(row["implementation"], row["implementation"]),
            f"{row['rested_tflops']:.0f}",
            f"{row['sustained_tflops']:.0f}",
            f"{row['clock'] / 1000:.2f}",
        ]
        for row in record["rows"]
    ]
    head = ["mask", "tokens", "pass", "implementation", "rested, TFLOP/s", "sustained, TFLOP/s"]
    return table([*head, "sustained clock, GHz"], lines)


TFLOPS = "Useful TFLOP/s; more is better."
WARMED_UP = "sparseflash after `sparseflash.warmup`"
HOST_TIME = (
    "Microseconds of host time for one call. The tensors are so small that the device is never "
    "the bottleneck. *Launches* is the time of the bare kernel launches."
)
PLANNED_ORDER = (
    f"The backward pass of heads of {MAX_DQ_WARPGROUP_DIMS} dims in useful TFLOP/s under "
    "continuous load; more is better. By default two kernels give the same bits in every run. "
    "With `planned_order=True` one kernel does, which adds the parts of dQ in an order that is "
    f"planned for each mask. Masks with fewer than {MIN_PLANNED_BLOCKS['H200']:g} blocks in a row "
    f"of keys, or more than {MAX_ORDINALS:,} blocks in all heads, have the default kernels: their "
    "cells are empty. So do heads of more dims, which are left out. With `deterministic=False` "
    "one kernel adds the parts in any order, as the baselines do, if a row of keys has at least "
    f"{MIN_FUSED_BLOCKS['H200'][MAX_DQ_WARPGROUP_DIMS]:g} blocks."
)
SECTIONS: tuple[tuple[str, str, str, Callable[[dict], str]], ...] = (
    (
        "speedup",
        "Speed-up against density",
        "The same kernels compute each mask and the full mask. The ideal speed-up over the full "
        'mask is 1 / s. FlexAttention computes the same masks in the same run. A mask "of 256" '
        "has blocks of 256 x 256 tokens. `fading_memory(w)` is a causal pattern of user code: a "
        "query attends the last w tokens, and fewer groups of tokens the further back they are. "
        "The [gallery](gallery.md) shows the other patterns.",
        speedup,
    ),
    (
        "bench-sparse",
        "Block-sparse masks",
        f"{TFLOPS} A cell has the rested and the sustained rate: rested / sustained.\n\n"
        "Every block of these masks is full or empty, so that every implementation can skip all "
        "zeros. *random 1/n* has one of n blocks and the diagonal. *band* is a window of 512 "
        "tokens to each side of a query; *band and edges* adds the first keys and the first "
        "queries. *butterfly* and *strided* are built-in patterns ([gallery](gallery.md)).\n\n"
        "FlashAttention-4, cuDNN and sparseflash with `deterministic=False` accumulate dQ in "
        "varying order, so the last bits of their gradients vary from run to run. sparseflash by "
        "default and FlexAttention give the same bits in every run.",
        compared,
    ),
    (
        "bench-dense",
        "Full and causal masks",
        f"{TFLOPS} A cell has the rested and the sustained rate: rested / sustained.",
        compared,
    ),
    (
        "bench-dense-planned",
        "Gradients in a planned order: full and causal masks",
        PLANNED_ORDER,
        planned_order,
    ),
    (
        "bench-sparse-planned",
        "Gradients in a planned order: block-sparse masks",
        "The same for the block-sparse masks of [another section](#block-sparse-masks).",
        planned_order,
    ),
    (
        "bench-small-blocks",
        "Blocks below 128",
        f"{TFLOPS} A block of b queries uses a key that it loads b times. So smaller blocks need "
        "more bytes from L2 for each FLOP.",
        suite(tflops),
    ),
    (
        "bench-decode",
        "Decoding",
        "TB/s of the keys and values in non-zero blocks; more is better.",
        decoding,
    ),
    (
        "bench-lra",
        "The sizes of Long Range Arena",
        "Time in milliseconds; less is better. For training on these tasks see "
        "[Long Range Arena](../experiments/lra/README.md).",
        suite(time_of),
    ),
    (
        "bench-memory",
        "Memory",
        "Peak memory of a pass in MiB, without its inputs; less is better. The figures of the "
        "backward pass include the forward pass. Standard attention stores N x N scores; the "
        "memory of the others grows linearly with N.",
        suite(mebibytes),
    ),
    (
        "host-time",
        "Host time of a call",
        f"{HOST_TIME} *Autograd of torch* is the time of the same pass through an autograd "
        "function that does nothing. *sparseflash* is the rest.",
        host_time,
    ),
    (
        "first-call",
        "First calls",
        "Seconds of the first calls of a process, both passes, which compile kernels: with empty "
        "caches of compiled kernels on disk, and with those that the process before left. *First "
        "mask* is causal, *second mask* has a quarter of the blocks at random, all full, and "
        "*again* is the second mask once more. Tables of masks are included.",
        first_call,
    ),
    (
        "lab",
        "Profile of a model",
        "Time and memory of [`sparseflash.lab.profile`](api/lab.md): recall, error and loss of "
        "every candidate in every head of a model that has only causal attention. The first layer "
        "includes the compilation of masks and kernels and the measurement of the candidates. "
        "Peak memory includes the tensors of all layers, which the change of the loss needs. "
        "No scores are stored.",
        lab,
    ),
    (
        "overhead",
        "Host time of a call, before dispatch was rewritten",
        f"{HOST_TIME} *sparseflash* is the rest, and includes the autograd engine of torch. This "
        "measurement was not repeated since.",
        host_time,
    ),
    (
        "counters",
        "Utilisation of the device",
        "Percent of the cycles of a kernel in which a unit of the device is busy, from hardware "
        "counters (Nsight Compute). Cycles do not depend on the clock frequency. "
        "[Hopper kernels](design/hopper-kernels.md) describes the kernels of sparseflash.",
        counters,
    ),
    (WEAK, "Context parallelism on two GPUs", LONG_CONTEXT, long_context),
    (STRONG, "Strong scaling on two GPUs", STRONG_TEXT, strong),
    ("io-complexity", "Theory and measurement", THEORY, io_complexity),
    (
        "power",
        "Rested and sustained rates",
        f"{TFLOPS} Under continuous load the power limit of the device lowers its clock.",
        power,
    ),
    (
        "triton/speedup",
        "The backend `triton`",
        "The portable Triton kernels on the same device, in place of those for Hopper.",
        speedup,
    ),
)
INTRODUCTION = """# Performance

<!-- Generated by `python docs/performance.py`. Do not edit. -->

Every figure on this page comes from a record in `experiments/results/`. The line below the tables
of a section gives the device, the versions, the commit and the command. To measure your own
device, run `python -m experiments.speedup` (one minute with `--quick`) and
`python -m experiments.bench`.

- **Density s** is the number of non-zero blocks over the number of all blocks.
- **Useful FLOPs** are those of the non-zero blocks: 4 · head dim for each pair in the forward
  pass, 2.5 times as many in the backward pass.
- **Rested** times are measured in short turns with pauses between them. All implementations have
  nearly the same clock there, that of their mixture, so rested ratios are nearly those of cycles.
- **Sustained** times are measured under continuous load of one implementation, after 100 ms in
  which the power limit has set its clock. One that draws less power keeps a higher clock, so
  factors over it are smaller than rested ones. In records before commit 31c3f61 these were 10 ms,
  which left all of them the clock of the mixture ([notebook](notebook/2026-11.md)).
- Times and rates are rested unless a table says otherwise.
- **An empty cell** means that the implementation was not measured on this mask; most do not
  support it.
- **Method.** Every result is checked before it is timed. Implementations are timed in alternation,
  so that each one follows every other one equally often. The L2 cache is flushed before every run.
  [What the benchmark prints](benchmark-columns.md) has the details.
- **Before commit ab930c8** the graph of a backward pass read O and LSE after their memory had been
  freed, in all implementations. Times do not depend on their values, except by the power
  that other values save under continuous load; none of these records has been repeated yet.

The [notebook](notebook/2026-11.md) describes what was tried without success.
"""


def page() -> str:
    """docs/performance.md."""
    parts = [INTRODUCTION]
    for name, title, text, show in SECTIONS:
        if records := load_each(name):
            parts.append(f"## {title}\n\n{text}\n\n{of_each_device(records, show)}\n")
    return "\n".join(parts)


def of_each_device(records: list[dict], show: Callable[[dict], str]) -> str:
    """The figures of each device; its name is above them if there are several."""
    heads = [f"### {r['environment']['device']}\n\n" * (len(records) > 1) for r in records]
    shown = (f"{show(record)}\n\n{measured(record)}" for record in records)
    return "\n\n".join(map(str.__add__, heads, shown))


def readme_picture() -> str:
    """Speed-up against density, of the device that was measured last."""
    records = sorted(load_each("speedup"), key=lambda record: record["environment"]["date"])
    pictures = (speedup_picture(record, "experiments/results") for record in records[::-1])
    return next(filter(None, pictures), "")


def readme_table() -> str:
    """Milliseconds of both passes, and of the fastest baseline of each row."""
    record = load("bench-sparse")
    assert record is not None, "the table of the README needs the record bench-sparse"
    rows = shown_rows(record)
    own = [("forward", OURS), ("backward", OURS), ("backward", ANY_ORDER)]
    lines = []
    for pattern in dict.fromkeys(row["pattern"] for row in rows):
        forward, backward, any_order = (find(rows, pattern, *which) for which in own)
        others = (fastest(of_baselines(rows, pattern, direction)) for direction in DIRECTIONS)
        ahead, behind = (f"{time_of(row)} ({NAMES[row['implementation']]})" for row in others)
        ours = map(time_of, (forward, backward, any_order))
        lines.append([pattern, f"{forward['density']:.1%}", next(ours), ahead, *ours, behind])
    head = ["mask", "blocks computed", "forward: sparseflash", "fastest baseline"]
    head += ["backward: sparseflash", "`deterministic=False`", "fastest baseline"]
    return table(head, lines)


def readme_devices() -> str:
    """Our speed on the same masks on every other device, each in a sentence after a space."""
    told = []
    for record in load_each("bench-sparse"):
        rows, device = shown_rows(record), record["environment"]["device"]
        measured_here = {row["implementation"] for row in rows}
        others = [NAMES[name] for name in BASELINES if name in measured_here]
        passes = {d: over_fastest(rows, d, OURS, "tflops") for d in DIRECTIONS}
        if record["stem"].endswith(DEVICE) or not all(passes.values()):
            continue
        speeds = " and ".join(
            f"{min(found):.2f} to {max(found):.2f} times as fast {direction}"
            for direction, found in passes.items()
        )
        fastest_of = others[0] if len(others) == 1 else f"the fastest of {', '.join(others)}"
        told.append(f" On one {device} sparseflash is {speeds} as {fastest_of}.")
    return "".join(told)


def shown_rows(record: dict) -> list[dict]:
    """The rows of a record with the size of the README's table."""
    names = ("batch", "heads", "seq_len", "head_dim")
    return [row for row in record["rows"] if tuple(row[name] for name in names) == SHOWN]


def readme() -> str:
    """The README, with its picture, its table and its sentence about other devices."""
    text = README.read_text()
    if shown := readme_picture():
        text = PICTURE.sub(lambda _: shown, text)
    sentences = {"devices": readme_devices, "context-parallel": scaling_briefly}
    return written(written(text, {"speed": readme_table}), sentences, between="")


def main() -> int:
    return update({PAGE: page(), README: readme()}, check="--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
