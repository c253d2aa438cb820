"""Sections of docs/performance.md: context parallelism on two and on four GPUs."""

from records import Rows, load, measured, picture

from experiments.markdown import table

WEAK, GROUPED = "long-context-weak-128k-2", "long-context-weak-128k-16-4-heads-2"
# Records of a former commit: strong scaling, and masks that were not measured since.
STRONG, LONG = "long-context-strong-256k-2", "long-context-strong-2m-16-4-heads-2"
OTHERS = "long-context-weak-128k-2-commit-489e2d7"
FOUR = "long-context-strong-1m-4"
SCALING = {
    GROUPED: "Weak scaling, 131,072 tokens a GPU, 16 heads, 4 of keys",
    WEAK: "Weak scaling, 131,072 tokens a GPU, 16 heads",
}
FORMER = {
    OTHERS: "Weak scaling, 131,072 tokens a GPU, 16 heads",
    LONG: "Strong scaling, 2,097,152 tokens, 16 heads, 4 of keys",
    STRONG: "Strong scaling, 262,144 tokens, 16 heads",
}
AIMED = ("window", "window of 1024", "butterfly")  # the masks of the aims
EFFICIENCY, OVER_GATHER, MEMORY = 0.90, 1.3, 0.5
ANALYSED = "nvidia-h100-80gb-hbm3"  # the device whose figures the reasons explain
NVLINK = 450  # GB/s in each direction between two H100 of a host, as specified
TEXT = """\
[Context-parallel attention](design/context-parallel.md) on one and two GPUs of a host: head dim
128, batch 1, bfloat16, blocks of 128. *window* has 4,096 keys for a query, *local+global* a
window and 128 global tokens. Plans of two GPUs are computed in place. The all-gather and the ring
use the same kernels.

- **Efficiency** is the useful FLOP/s of a GPU over that of one GPU with the same plan.
- **Over all-gather** is the time of the all-gather over that of the plan. *At most* is this ratio
  for a plan with efficiency 1.
- **Exposed** is the time of both passes minus that of the same run without exchanges. **Local** is
  what else is lost against efficiency 1: copies that pack and add keys and gradients, and kernels
  with fewer blocks.
- **Received** are megabytes of a GPU in the forward pass. They were counted, and equal those of
  the plan.
- **Peak memory** is that of both passes without inputs, in MB. That of one GPU is proportional to
  the number of tokens."""

FORMER_TEXT = """\
Strong scaling, and masks whose weak scaling was not measured again. The code of these records
packed all keys and gradients that it sent, copied own keys behind received ones, and divided a
butterfly into halves that exchange all keys, so none of these figures is one of the present code.
They are kept until they are measured again. *documents* have a mean of 8,192 tokens, *top-k*
selects 4,096 keys for a query. The all-gather was measured first, probably on a device that had
rested, so that it may seem too fast. A run ends after a given time, so that the last masks of a
long sequence are missing."""

FOUR_TEXT = """\
The same with up to four GPUs of a host and one sequence of 1,048,576 tokens, 16 heads. This record
is older than plans that are computed in place: each plan sends whole shards and gradients from
where they lie, reads own keys in place, and merges rows. *Predicted* was written before the
measurement; the rates were fitted to records of two H100 of commit 489e2d7, so the device is
another one. *Memory* is the peak memory of a GPU over that of one GPU that holds the whole
sequence; 1 / GPUs would be ideal. The window of 4,096 keys was measured too, but another program
used one of the GPUs at that time, so its rows were removed. Weak scaling on four GPUs has no
record."""


def four_gpus(record: dict) -> str:
    """A line for each mask and number of GPUs."""
    rows = record["rows"]
    before = {
        (each["pattern"], each["prediction"]["ranks"]): each["prediction"]["total_ms"]
        for each in record["predicted"]
    }
    lines = []
    for name in patterns(rows):
        one = row_of(rows, name, "plan", 1)
        for ranks in sorted({row["ranks"] for row in rows if row["pattern"] == name}):
            plan = row_of(rows, name, "plan", ranks)
            error = before[name, ranks] / plan["total_ms"] - 1
            line = [name, f"{ranks}", f"{plan['total_ms']:.1f}"]
            line += [f"{plan['tflops'] / one['tflops']:.2f}", f"{plan['exposed_total_ms']:.1f}"]
            for way in ("all-gather", "ring"):
                ratio = over(rows, name, way, ranks) if ranks > 1 else None
                line.append("" if ratio is None else f"{ratio:.2f}x")
            line += [f"{plan['counted_mb']:,.0f}", f"{plan['gathered_mb']:,.0f}"]
            line.append(f"{plan['peak_bytes'] / one['peak_bytes']:.2f}")
            line += [f"{before[name, ranks]:.1f}", f"{error:+.0%}"]
            lines.append(line)
    head = ["mask", "GPUs", "both passes, ms", "efficiency", "exposed, ms", "over all-gather"]
    head += ["over ring", "received, MB", "by all-gather, MB", "memory", "predicted, ms", "error"]
    title = f"Strong scaling on four GPUs, {record['environment']['device']}"
    parts = [table(head, lines), outcome(rows)]
    return "\n\n".join([*parts, picture(record, "", title, "../experiments/results")])


def outcome(rows: Rows) -> str:
    """What the figures on four GPUs show."""
    near, far = (row_of(rows, name, "plan", 4) for name in ("window of 1024", "butterfly"))
    alone = row_of(rows, "butterfly", "plan", 1)
    local = far["forward_ms"] - far["exposed_forward_ms"] - alone["forward_ms"] / 4
    share = far["counted_mb"] / far["gathered_mb"]
    return (
        f"A window of 1,024 keys receives {near['counted_mb']:.0f} MB and is "
        f"{over(rows, 'window of 1024', 'all-gather', 4):.1f} times as fast as an all-gather. "
        f"The butterfly receives {share:.0%} of what an all-gather does, and hides all but "
        f"{far['exposed_total_ms']:.1f} ms of it. But its forward pass takes "
        f"{far['forward_ms']:.1f} ms, of which {local:.1f} are neither exposed nor a quarter of "
        "the time of one GPU. The likely cause, not profiled: its keys are scattered, so that "
        "they were packed before they were sent, and its rows were computed in parts that were "
        "merged."
    )


def long_context(record: dict) -> str:
    """Aims, what holds and what does not, the time model, and a table for each record."""
    device = record["stem"].removeprefix(f"{WEAK}-")
    found = {name: each for name in SCALING if (each := load(name, device))}
    parts = [aims(found)]
    if device == ANALYSED and len(found) == len(SCALING):
        parts.append(reasons(record, found[GROUPED]["rows"]))
    parts.append(model(found))
    for name, each in found.items():
        parts += [f"**{SCALING[name]}**", scaling(each["rows"])]
        parts += [measured(each)] * (name != WEAK)  # the caller adds that of WEAK, the last
    title = f"Weak scaling on two GPUs, {record['environment']['device']}"
    parts.append(picture(record, "", title, "../experiments/results"))
    return "\n\n".join(filter(None, parts))


def former(record: dict) -> str:
    """A table for each record of a former commit, without the masks that were measured since."""
    device, parts = record["stem"].removeprefix(f"{STRONG}-"), []
    present = load(WEAK, device)
    since = patterns(present["rows"]) if present else []
    for name, title in FORMER.items():
        each = load(name, device)
        if each is not None:
            gone = since if name == OTHERS else []
            rows = [row for row in each["rows"] if row["pattern"] not in gone]
            parts += [f"**{title}**", scaling(rows)]
            parts += [measured(each)] * (name != STRONG)  # the caller adds that of STRONG
    return "\n\n".join(parts)


def row_of(rows: Rows, pattern: str, way: str, ranks: int) -> dict | None:
    """The row of an implementation, or None."""
    wanted = (pattern, way, ranks)
    same = (r for r in rows if (r["pattern"], r["implementation"], r["ranks"]) == wanted)
    return next(same, None)


def efficiency(rows: Rows, pattern: str) -> float:
    one, two = (row_of(rows, pattern, "plan", n) for n in (1, 2))
    return two["tflops"] / one["tflops"]


def over(rows: Rows, pattern: str, way: str, ranks: int = 2) -> float | None:
    """The time of another implementation over that of the plan; None if it was not measured."""
    plan, other = (row_of(rows, pattern, each, ranks) for each in ("plan", way))
    return other and other["total_ms"] / plan["total_ms"]


def patterns(rows: Rows) -> list[str]:
    """The masks that were measured on two GPUs."""
    names = dict.fromkeys(row["pattern"] for row in rows)
    return [name for name in names if row_of(rows, name, "plan", 2)]


def scaling(rows: Rows) -> str:
    """A line for each mask on two GPUs."""
    head = ["mask", "density s", "one GPU, ms", "two GPUs, ms", "efficiency", "exposed, ms"]
    head += ["local, ms", "over all-gather", "at most", "over ring", "received, MB"]
    head += ["by all-gather, MB", "peak memory, one GPU", "two GPUs", "two GPUs, all-gather"]
    lines = []
    for name in patterns(rows):
        one, two = (row_of(rows, name, "plan", n) for n in (1, 2))
        gather, share = row_of(rows, name, "all-gather", 2), efficiency(rows, name)
        exposed = two["exposed_total_ms"]
        best = share * two["total_ms"]
        ratios = [over(rows, name, "all-gather"), most_over(rows, name) if gather else None]
        ratios.append(over(rows, name, "ring"))
        lines.append(
            [
                *(name, f"{two['density']:.3g}", f"{one['total_ms']:.1f}"),
                *(f"{two['total_ms']:.1f}", f"{share:.2f}", f"{exposed:.1f}"),
                f"{two['total_ms'] - best - exposed:.1f}",
                *("" if ratio is None else f"{ratio:.2f}x" for ratio in ratios),
                *(f"{two['counted_mb']:,.0f}", f"{two['gathered_mb']:,.0f}"),
                *(f"{row['peak_bytes'] / 1e6:,.0f}" if row else "" for row in (one, two, gather)),
            ]
        )
    return table(head, lines)


def aims(found: dict[str, dict]) -> str:
    """What was aimed at, and whether it is reached."""
    lines = []
    for name, record in found.items():
        rows = record["rows"]
        for mask in (each for each in AIMED if each in patterns(rows)):
            share, ratio, part = (
                efficiency(rows, mask),
                over(rows, mask, "all-gather"),
                memory(rows, mask),
            )
            reached = {
                f"weak-scaling efficiency of at least {EFFICIENCY:.2f}": (
                    f"{share:.2f}",
                    share >= EFFICIENCY,
                ),
                f"at least {OVER_GATHER}x an all-gather": (f"{ratio:.2f}x", ratio >= OVER_GATHER),
                f"memory of a GPU of two over that of one with the same sequence: {MEMORY}": (
                    f"{part:.2f}",
                    part < MEMORY + 0.05,
                ),
            }
            lines += [
                [aim, SCALING[name].partition(", ")[2], mask, figure, yes(true)]
                for aim, (figure, true) in reached.items()
            ]
    lines.sort(key=lambda line: line[0])
    return table(["aim", "sizes", "mask", "measured", "reached"], lines)


def memory(rows: Rows, pattern: str) -> float:
    """The peak memory of a GPU of two over that of one GPU that has all tokens of both."""
    one, two = (row_of(rows, pattern, "plan", n) for n in (1, 2))
    return two["peak_bytes"] / (one["peak_bytes"] * two["seq_len"] / one["seq_len"])


def yes(reached: bool) -> str:
    return "yes" if reached else "**no**"


def reasons(record: dict, grouped: Rows) -> str:
    """What holds and what does not, with the figures of the records of weak scaling."""
    rows = record["rows"]
    alone = row_of(rows, "butterfly", "plan", 1)
    plan, few, window = (
        row_of(rows, name, "plan", 2) for name in ("butterfly", "local+global", "window")
    )
    narrow = row_of(grouped, "butterfly", "plan", 2)
    share, gained = efficiency(rows, "butterfly"), over(rows, "butterfly", "all-gather")
    moved, silent = plan["counted_mb"], plan["total_ms"] - plan["exposed_total_ms"]
    first = {
        (name, heads): 1 / over(found, name, "all-gather", 1)
        for heads, found in (("16", rows), ("4", grouped))
        for name in patterns(found)
    }
    largest = first.pop(("butterfly", "16"))
    multiprocessors = record["environment"]["hardware"]["multiprocessors"]
    own, fetched = window["peak_bytes"] / 1e6, plan["peak_bytes"] / 1e6
    parts = [
        f"**Window.** With 16 key heads a GPU receives {window['counted_mb']:.0f} MB instead of "
        f"{window['gathered_mb']:,.0f} while it computes. "
        f"The efficiency is {efficiency(rows, 'window'):.2f}, and the plan is "
        f"{over(rows, 'window', 'all-gather'):.2f} times as fast as the all-gather. With 4 key "
        f"heads the efficiency is {efficiency(grouped, 'window'):.2f}. But there an all-gather "
        f"receives only {row_of(grouped, 'window', 'plan', 2)['gathered_mb']:.0f} MB, so that a "
        f"plan of efficiency 1 would be {most_over(grouped, 'window'):.2f} times as fast, and 1.3 "
        "cannot be reached at this size. This bound is (compute + gather) / compute, for every "
        "mask.",
        f"**Butterfly.** A GPU receives {moved:.0f} MB, "
        f"{moved / plan['gathered_mb']:.0%} of what an all-gather does, and sends as many "
        f"gradients. The plan is {gained:.2f} times as fast as the all-gather, and "
        f"{over(grouped, 'butterfly', 'all-gather'):.2f} times with 4 key heads, where the "
        f"all-gather receives {narrow['gathered_mb']:.0f} MB and hides most of it. What is "
        f"missing from efficiency {share:.2f} and {efficiency(grouped, 'butterfly'):.2f} is the "
        f"exchange: {plan['exposed_total_ms']:.1f} and {narrow['exposed_total_ms']:.1f} ms of "
        f"both passes are exposed. Without exchanges they take {silent:.1f} ms with 16 key heads, "
        f"where one GPU takes {alone['total_ms']:.1f} for 11 of 12 blocks. Each exchange of "
        f"{moved:.0f} MB takes at least {moved / NVLINK:.1f} ms at the {NVLINK} GB/s of NVLink. "
        "At the commit of this record keys and values were exchanged one after the other, in both "
        "passes, and a profile in the [notebook](notebook/2026-11.md) shows that only the first "
        "of two exchanges ran beside a kernel of attention. Now they are one exchange, which was "
        "not measured yet.",
        "**How certain.** On one GPU there is nothing to exchange, and the plan and the "
        "all-gather launch the same kernels. For the butterfly with 16 key heads, the first case "
        f"of its run, the plan took {alone['total_ms']:.2f} ms and the all-gather "
        f"{alone['total_ms'] / largest:.2f}; in the other cases the plan took "
        f"{min(first.values()):.2f} to {max(first.values()):.2f} times as long. So the efficiency "
        f"of {share:.2f} is uncertain by about a tenth: with the all-gather as reference it is "
        f"{share / largest:.2f}. Times on two GPUs do not depend on this reference. (The plan of "
        "one GPU was in place, with a call for dQ and one for dK and dV; now it is one call.)",
        "**Few global tokens.** With *local+global* the efficiency is "
        f"{efficiency(rows, 'local+global'):.2f}, and the plan is "
        f"{over(rows, 'local+global', 'all-gather'):.2f} times as fast as the all-gather. A GPU "
        f"receives only {few['counted_mb']:.0f} MB, but {few['exposed_total_ms']:.1f} ms are "
        "exposed, all of them in the backward pass. Two costs of that pass follow from the plan; "
        "it was not profiled. On the second GPU dK and dV of the global keys were one work tile "
        f"for each head, {few['heads']} for {multiprocessors} multiprocessors, and were computed "
        "before all others; now they are computed in chunks of queries, which was not measured "
        "yet. And the row of the global tokens, which both GPUs share, is a call of its own, "
        "whose dK and dV have the size of all own keys and are added to those of the other rows.",
        f"**Memory.** A GPU of two needs {own:,.0f} MB for the window, and {fetched:,.0f} for the "
        f"butterfly: also keys, values and gradients that are sent and received. One GPU with "
        f"half of the sequence needs {alone['peak_bytes'] / 1e6:,.0f}.",
    ]
    return "\n\n".join(parts)


def most_over(rows: Rows, pattern: str) -> float:
    """The time of the all-gather over that of a plan of efficiency 1."""
    return over(rows, pattern, "all-gather") / efficiency(rows, pattern)


def model(found: dict[str, dict]) -> str:
    """The times that were predicted before the measurement, and the measured ones."""
    lines = []
    for record in found.values():
        said = {
            (each["pattern"], each["prediction"]["ranks"]): each["prediction"]
            for each in record["predicted"]
        }
        for name in patterns(record["rows"]):
            one, two = (row_of(record["rows"], name, "plan", n) for n in (1, 2))
            line = [name, f"{one['kv_heads']}"]
            for row in (one, two):
                before = said[name, row["ranks"]]["total_ms"]
                line += [f"{before:.1f}", f"{row['total_ms']:.1f}"]
                line.append(f"{before / row['total_ms'] - 1:+.0%}")
            line += [f"{said[name, 2]['exposed_ms']:.1f}", f"{two['exposed_total_ms']:.1f}"]
            lines.append(line)
    head = ["mask", "key heads", "one GPU: predicted, ms", "measured", "error"]
    head += ["two GPUs: predicted, ms", "measured", "error", "exposed: predicted, ms", "measured"]
    rates = next(iter(found.values()))["machine"]
    text = (
        f"*Predicted* was written before the measurement, with {rates['tflops']:.0f} TFLOP/s "
        f"forward, {rates['backward_tflops'] or rates['tflops']:.0f} "
        f"backward, {rates['call_us'] / 1e3:.1f} ms for a pass, {rates['bandwidth']:.0f} GB/s "
        f"for an exchange and {rates['memory']:,.0f} GB/s for copies. "
        "`experiments.long_context.calibrate` fits such rates to records. These two are not "
        "enough for it: only in the butterfly an exchange takes long, so that a fit does not tell "
        "its bandwidth from its latency."
    )
    return "\n\n".join(["**The time model on two GPUs**", text, table(head, lines)])
