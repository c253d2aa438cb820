"""Sections of docs/performance.md: context parallelism on two GPUs."""

from records import DEVICE, Rows, load, measured, picture

from experiments.markdown import table

WEAK, GROUPED = "long-context-weak-128k-2", "long-context-weak-128k-16-4-heads-2"
MANY = "long-context-weak-128k-32-8-heads-2"
STRONG = "long-context-strong-256k-2"
WEAK_SCALING = {
    GROUPED: "Weak scaling, 131,072 tokens a GPU, 16 heads, 4 of keys",
    MANY: "Weak scaling, 131,072 tokens a GPU, 32 heads, 8 of keys",
    WEAK: "Weak scaling, 131,072 tokens a GPU, 16 heads",
}
LONGER = {  # weak scaling with more tokens, on the GPUs on which it was measured
    "long-context-weak-512k-2": "Weak scaling, 524,288 tokens a GPU, 16 heads",
    "long-context-weak-512k-16-4-heads-2": (
        "Weak scaling, 524,288 tokens a GPU, 16 heads, 4 of keys"
    ),
    "long-context-weak-1m-16-4-heads-2": (
        "Weak scaling, 1,048,576 tokens a GPU, 16 heads, 4 of keys"
    ),
}
STRONG_SCALING = {
    "long-context-strong-2m-16-4-heads-2": (
        "Strong scaling, 2,097,152 tokens, 16 heads, 4 of keys"
    ),
    "long-context-strong-1m-2": "Strong scaling, 1,048,576 tokens, 16 heads",
    STRONG: "Strong scaling, 262,144 tokens, 16 heads",
}
# Later runs of the same sizes, on the GPUs on which they exist.
LATER = {
    WEAK: (
        "long-context-weak-128k-2-run-2",
        "long-context-weak-128k-2-run-3",
        "long-context-weak-128k-2-run-7",
    ),
    GROUPED: ("long-context-weak-128k-16-4-heads-2-run-2",),
    "long-context-weak-1m-16-4-heads-2": ("long-context-weak-1m-16-4-heads-2-run-2",),
    "long-context-weak-512k-16-4-heads-2": ("long-context-weak-512k-16-4-heads-2-run-2",),
    STRONG: ("long-context-strong-256k-2-run-2",),
    "long-context-strong-1m-2": (
        "long-context-strong-1m-2-run-2",
        "long-context-strong-1m-2-run-3",
        "long-context-strong-1m-2-run-4",
    ),
    "long-context-strong-2m-16-4-heads-2": (
        "long-context-strong-2m-16-4-heads-2-run-2",
        "long-context-strong-2m-16-4-heads-2-run-4",
        "long-context-strong-2m-16-4-heads-2-run-5",
    ),
}
MACHINE = "long-context-machine"
AIMED = ("window", "butterfly")  # the masks of the aims
EFFICIENCY, OVER_GATHER, MEMORY = 0.90, 1.3, 0.55
ALL_TO_ALLS = "plan with all-to-alls"
LIMITED, CAPTURED = "plan with limited memory", "captured plan with limited memory"
WITH_LIMIT = {LIMITED: "with limited memory", CAPTURED: "with limited memory, captured"}
NVLINK = 450  # GB/s in each direction between two H100 or H200 of a host, as specified
TEXT = """\
[Context-parallel attention](design/context-parallel.md) on one and two GPUs of a host: head dim
128, batch 1, bfloat16, blocks of 128. *window* has 4,096 keys for a query, *local+global* a
window and 128 global tokens; *documents* have a mean of 8,192 tokens, *random* has 8,192 keys for
a query on average (*random 1/16* one of 16 blocks), and *top-k* selects 4,096 keys for a query.
The all-gather and the ring use the same kernels. Other programs used other GPUs of the host. A run
ends after a given time, so it may have only some of the masks or of the implementations.

- Times and memory are those of both passes, if a column does not name one.
- **Efficiency** is the useful FLOP/s of a GPU over that of one GPU with the same plan.
- **Over all-gather** is the time of the all-gather over that of the plan. *At most* is this ratio
  for a plan with efficiency 1.
- **Over all-to-alls** is the time of the plan with all-to-alls of NCCL over that with copies
  between the GPUs (`transport`). Where the cell is empty, only one of them was measured: copies
  from commit 4ce1605 on, all-to-alls before.
- **Exposed** is the time of both passes minus that of the same run without exchanges. **Local** is
  what else is lost against efficiency 1: copies that pack and add keys and gradients, and kernels
  with fewer blocks.
- **Received** are megabytes of a GPU in the forward pass. They were counted, and equal those of
  the plan.
- **With limited memory** (`round_tokens`) heads are exchanged in groups, and once more in the
  backward pass. Each group has kernels and exchanges of its own. If Python launches them, small
  groups take longer, and much longer on a host that other work keeps busy. *Captured* plans are
  CUDA graphs of both passes, which are launched at once; their efficiency, too, is that over one
  GPU whose passes Python calls.
- **Peak memory** is that of both passes without inputs, with the buffers of copies, in MB. That of
  one GPU is proportional to the number of tokens."""

STRONG_TEXT = """\
One sequence on one and on two GPUs, with the columns of weak scaling."""

EACH_PASS = """\
Each pass; the backward pass is the time of both passes minus that of the forward pass:"""

LIMITED_TEXT = "Plans with limited memory, beside those without a limit:"

# Of records that an earlier instrument wrote.
FROM_IDLE = """\
In these runs the GPU was idle when the first kernel was launched, so each time has up to 0.3 ms of
Python in it."""


def long_context(record: dict) -> str:
    """Aims, what holds and what does not, the time model, and a table for each record."""
    device = record["stem"].removeprefix(f"{WEAK}-")
    found = {name: each for name in WEAK_SCALING if (each := runs(name, device))}
    parts = [aims(found)]
    if WEAK in found and GROUPED in found:
        parts.append(reasons(found[WEAK]["rows"], found[GROUPED]["rows"]))
    parts += [model(found), fitted(load(MACHINE, device))]
    for name, each in found.items():
        parts += [f"**{WEAK_SCALING[name]}**", *tables(each["rows"])]
        parts += each["others"] + each["pictures"]
        parts += [measured(each)] * (name != WEAK)  # the caller adds that of WEAK, the last
    for name, title in LONGER.items():
        if (each := runs(name, device)) is not None:
            parts += [f"**{title}**", *tables(each["rows"])]
            parts += [*each["others"], *each["pictures"], measured(each)]
    title = f"Weak scaling on two GPUs, {record['environment']['device']}"
    parts.append(picture(record["stem"], title))
    return "\n\n".join(filter(None, parts))


def briefly() -> str:
    """A part of a sentence: efficiency of weak scaling, and the all-gather's time beside it."""
    record = runs(WEAK, DEVICE)
    assert record is not None, f"the README needs the record {WEAK}"
    rows = record["rows"]
    shares = " and ".join(f"{efficiency(rows, mask):.2f} for a {mask}" for mask in AIMED)
    times = " and ".join(f"{over(rows, mask, 'all-gather'):.2f}" for mask in AIMED)
    return (
        f"a weak-scaling efficiency of {shares}; an all-gather with the same kernels takes "
        f"{times} times as long"
    )


def strong(record: dict) -> str:
    """A table for each record of strong scaling."""
    device, parts = record["stem"].removeprefix(f"{STRONG}-"), []
    for name, title in STRONG_SCALING.items():
        each = runs(name, device)
        if each is not None:
            parts += [f"**{title}**", *tables(each["rows"])]
            parts += [FROM_IDLE] * ("exchanges" not in each)
            parts += each["others"] + each["pictures"]
            parts += [measured(each)] * (name != STRONG)  # the caller adds that of STRONG
    return "\n\n".join(filter(None, parts))


def runs(name: str, device: str) -> dict | None:
    """A record with the masks of all runs of the same sizes; None if there is no run.

    All rows of a mask are of one run, the newest one that has the mask on one and on two GPUs.
    `others` says where those are from that are not of the first record, and `pictures` has the
    pictures of these runs, if there are any.
    """
    record = load(name, device)
    if record is None:
        return None
    laters = (load(later, device) for later in LATER.get(name, ()))
    newest: dict[str, dict] = {}
    found = (record, *filter(None, laters))
    for each in sorted(found, key=lambda run: run["environment"]["date"]):
        newest |= dict.fromkeys(patterns(each["rows"]), each)
    rows = [row for row in record["rows"] if row["pattern"] not in newest]
    others: dict[str, list[str]] = {}
    pictures: dict[str, str] = {}
    for mask, run in newest.items():
        rows += [row for row in run["rows"] if row["pattern"] == mask]
        if run is not record:
            others.setdefault(measured(run), []).append(mask)
            tokens = run["rows"][0]["seq_len"]
            title = f"{run['kind'].capitalize()} scaling, {tokens:,} tokens on two GPUs"
            pictures[run["stem"]] = picture(run["stem"], title)
    return {
        **record,
        "rows": rows,
        "others": [f"{' and '.join(masks)}: {source}" for source, masks in others.items()],
        "pictures": [each for each in pictures.values() if each],
    }


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
    """The masks that were measured on one and on two GPUs."""
    names = dict.fromkeys(row["pattern"] for row in rows)
    return [name for name in names if all(row_of(rows, name, "plan", n) for n in (1, 2))]


def tables(rows: Rows) -> list[str]:
    """Both passes together, each pass, and plans with limited memory."""
    return [scaling(rows), of_each_pass(rows), limited(rows)]


def scaling(rows: Rows) -> str:
    """A line for each mask on two GPUs."""
    head = ["mask", "density s", "one GPU, ms", "two GPUs, ms", "efficiency", "exposed, ms"]
    head += ["local, ms", "over all-gather", "at most", "over ring", "over all-to-alls"]
    head += [
        "received, MB",
        "by all-gather, MB",
        "peak memory, one GPU",
        "two GPUs",
        "two GPUs, all-gather",
    ]
    lines = []
    for name in patterns(rows):
        one, two = (row_of(rows, name, "plan", n) for n in (1, 2))
        gather, share = row_of(rows, name, "all-gather", 2), efficiency(rows, name)
        exposed = two["exposed_total_ms"]
        best = share * two["total_ms"]
        ratios = [over(rows, name, "all-gather"), most_over(rows, name) if gather else None]
        ratios += [over(rows, name, "ring"), over(rows, name, ALL_TO_ALLS)]
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


def of_pass(row: dict, name: str) -> float:
    """The milliseconds of the forward or of the backward pass."""
    forward = row["forward_ms"]
    return forward if name == "forward" else row["total_ms"] - forward


def efficiency_of_pass(rows: Rows, pattern: str, name: str) -> float:
    """The efficiency in one pass, whose share of the useful FLOPs is the same on any ranks."""
    one, two = (row_of(rows, pattern, "plan", n) for n in (1, 2))
    both = two["total_ms"] / one["total_ms"]
    return efficiency(rows, pattern) * both * of_pass(one, name) / of_pass(two, name)


def of_each_pass(rows: Rows) -> str:
    """A line for each mask, with the forward and the backward pass apart."""
    head, lines = ["mask"], []
    for name in ("forward", "backward"):
        head += [f"{name}: one GPU, ms", "two GPUs, ms", "efficiency", "over all-gather"]
        head += ["over ring", *["exposed, ms"] * (name == "forward")]
    for pattern in patterns(rows):
        line = [pattern]
        one, two = (row_of(rows, pattern, "plan", n) for n in (1, 2))
        for name in ("forward", "backward"):
            line += [f"{of_pass(each, name):.2f}" for each in (one, two)]
            line += [f"{efficiency_of_pass(rows, pattern, name):.2f}"]
            for way in ("all-gather", "ring"):
                other = row_of(rows, pattern, way, 2)
                line += [f"{of_pass(other, name) / of_pass(two, name):.2f}x" if other else ""]
            line += [f"{two['exposed_forward_ms']:.1f}"] * (name == "forward")
        lines.append(line)
    return "\n\n".join([EACH_PASS, table(head, lines)]) if lines else ""


def aims(found: dict[str, dict]) -> str:
    """What was aimed at, and whether it is reached."""
    lines = []
    for name, record in found.items():
        rows = record["rows"]
        for mask in (each for each in AIMED if each in patterns(rows)):
            share, ratio = efficiency(rows, mask), over(rows, mask, "all-gather")
            way = least_memory(rows, mask)
            part, note = memory(rows, mask, way), ""
            if way in WITH_LIMIT:
                slow = share / (over(rows, mask, way) or 1)
                note = f" {WITH_LIMIT[way]}, at an efficiency of {slow:.2f}"
            reached = {
                f"weak-scaling efficiency of at least {EFFICIENCY:.2f}": (
                    f"{share:.3f}",
                    share >= EFFICIENCY,
                ),
                f"at least {OVER_GATHER}x an all-gather": (f"{ratio:.2f}x", ratio >= OVER_GATHER),
                f"memory of a GPU of two at most {MEMORY} of that of one with the same sequence": (
                    f"{part:.2f}{note}",
                    part <= MEMORY,
                ),
            }
            lines += [
                [aim, WEAK_SCALING[name].partition(", ")[2], mask, figure, yes(true)]
                for aim, (figure, true) in reached.items()
            ]
    lines.sort(key=lambda line: line[0])
    return table(["aim", "sizes", "mask", "measured", "reached"], lines)


def memory(rows: Rows, pattern: str, way: str = "plan") -> float | None:
    """The peak memory of a GPU of two over that of one GPU that has all tokens of both; None if
    this implementation was not measured.
    """
    one, two = row_of(rows, pattern, "plan", 1), row_of(rows, pattern, way, 2)
    return two and two["peak_bytes"] / (one["peak_bytes"] * two["seq_len"] / one["seq_len"])


def least_memory(rows: Rows, pattern: str) -> str:
    """The plan with a limit that is fastest where memory is as small as aimed at, or has least."""
    measured = [way for way in WITH_LIMIT if row_of(rows, pattern, way, 2)]
    small = [way for way in measured if memory(rows, pattern, way) <= MEMORY]
    if small:
        return min(small, key=lambda way: over(rows, pattern, way))
    return min(measured, key=lambda way: memory(rows, pattern, way), default="plan")


def limited(rows: Rows) -> str:
    """Lines of each mask with a plan that limits memory, beside the plan without a limit."""
    lines = []
    for name in patterns(rows):
        one = row_of(rows, name, "plan", 1)
        found = {way: row_of(rows, name, way, 2) for way in ("plan", *WITH_LIMIT)}
        if not any(found[way] for way in WITH_LIMIT):
            continue
        lines += [
            [
                *(name, WITH_LIMIT.get(way, "without a limit"), f"{row['total_ms']:.1f}"),
                f"{row['tflops'] / one['tflops']:.2f}",
                *(f"{row['peak_bytes'] / 1e6:,.0f}", f"{memory(rows, name, way):.3f}"),
            ]
            for way, row in found.items()
            if row
        ]
    head = ["mask", "plan", "both passes, ms", "efficiency", "peak memory, MB"]
    head += ["over one GPU with the same sequence"]
    return "\n\n".join([LIMITED_TEXT, table(head, lines)]) if lines else ""


def yes(reached: bool) -> str:
    return "yes" if reached else "**no**"


def reasons(rows: Rows, grouped: Rows) -> str:
    """What holds and what does not, with the figures of the records of weak scaling."""
    random = next(name for name in patterns(rows) if name.startswith("random"))
    alone, plan, window, drawn, chosen = (
        row_of(rows, *each)
        for each in (
            ("butterfly", "plan", 1),
            ("butterfly", "plan", 2),
            ("window", "plan", 2),
            (random, "plan", 2),
            ("top-k", "plan", 2),
        )
    )
    narrow = row_of(grouped, "butterfly", "plan", 2)
    moved = plan["counted_mb"]
    own, fetched = window["peak_bytes"] / 1e6, plan["peak_bytes"] / 1e6
    few = ""
    if "window" in patterns(grouped):
        gathered = row_of(grouped, "window", "plan", 2)["gathered_mb"]
        few = (
            f" With 4 key heads the efficiency is {efficiency(grouped, 'window'):.2f}. But there "
            f"an all-gather receives only {gathered:.0f} MB, so that a plan of efficiency 1 would "
            f"be {most_over(grouped, 'window'):.2f} times as fast, and {OVER_GATHER} cannot be "
            "reached at this size. This bound is (compute + gather) / compute, for masks whose "
            "contiguous shards take equally long, as those of the all-gather and the ring are."
        )
    ratios, rings = [over(rows, each, "ring") for each in (random, "top-k")], ""
    if None not in ratios:
        rings = f" The ring takes {ratios[0]:.2f} and {ratios[1]:.2f} times as long."
    alone_forward, alone_backward = (
        {mask: efficiency_of_pass(rows, mask, name) for mask in patterns(rows)}
        for name in ("forward", "backward")
    )
    slower = [
        f"{of_pass(ring, 'forward') / of_pass(row_of(rows, mask, 'plan', 2), 'forward'):.2f} "
        f"times as long for *{mask}*"
        for mask in patterns(rows)
        if (ring := row_of(rows, mask, "ring", 2))
        and of_pass(ring, "forward") < of_pass(row_of(rows, mask, "plan", 2), "forward")
    ]
    forward = (
        "**Each pass.** The aims are for both passes together. The forward pass takes about a "
        "quarter of their time, and fetches as many bytes as the backward pass sends. So it "
        "scales worse: its efficiency is "
        + ", ".join(f"{share:.2f} for *{mask}*" for mask, share in alone_forward.items())
        + f"; that of the backward pass is {min(alone_backward.values()):.2f} or more."
    )
    if slower:
        forward += f" In it the ring takes {' and '.join(slower)}."
    parts = [
        f"**Window.** With 16 key heads a GPU receives {window['counted_mb']:.0f} MB instead of "
        f"{window['gathered_mb']:,.0f} while it computes. "
        f"The efficiency is {efficiency(rows, 'window'):.2f}, and the plan is "
        f"{over(rows, 'window', 'all-gather'):.2f} times as fast as the all-gather.{few}",
        f"**Butterfly.** A GPU receives {moved:.0f} MB, "
        f"{moved / plan['gathered_mb']:.0%} of what an all-gather does, and sends as many "
        f"gradients, which takes at least {moved / NVLINK:.1f} ms in each pass at the {NVLINK} "
        "GB/s of NVLink. "
        f"The plan is {over(rows, 'butterfly', 'all-gather'):.2f} times as fast as the "
        f"all-gather, and {over(grouped, 'butterfly', 'all-gather'):.2f} times with 4 key heads. "
        f"Of both passes {plan['exposed_total_ms']:.1f} and {narrow['exposed_total_ms']:.1f} ms "
        f"are exposed. The efficiency is {efficiency(rows, 'butterfly'):.2f} with 16 key heads, "
        f"and {efficiency(grouped, 'butterfly'):.2f} with 4, where a quarter as much is packed, "
        "sent and added.",
        f"**Masks that need nearly all keys.** *{random}* and *top-k* receive "
        f"{drawn['counted_mb']:,.0f} MB, as an all-gather does, so a plan can only hide the "
        f"exchange: {drawn['exposed_total_ms']:.1f} and {chosen['exposed_total_ms']:.1f} ms are "
        f"exposed, and the efficiencies are {efficiency(rows, random):.2f} and "
        f"{efficiency(rows, 'top-k'):.2f}.{rings}",
        forward,
        f"**Memory.** A GPU of two needs {own:,.0f} MB for the window, and {fetched:,.0f} for the "
        f"butterfly: also keys, values and gradients that are sent and received. One GPU with "
        f"half of the sequence needs {alone['peak_bytes'] / 1e6:,.0f}.{others_need(rows)}",
    ]
    return "\n\n".join(parts)


def others_need(rows: Rows) -> str:
    """The memory of masks without an aim, over that of one GPU with the same sequence."""
    shares = []
    for mask in (each for each in patterns(rows) if each not in AIMED):
        few = memory(rows, mask, way) if (way := least_memory(rows, mask)) != "plan" else None
        note = f" ({few:.2f} {WITH_LIMIT[way]})" if few else ""
        shares.append(f"{memory(rows, mask):.2f} for *{mask}*{note}")
    return f" Over one GPU with the whole sequence it is {', '.join(shares)}." if shares else ""


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
        f"for an exchange and {rates['memory']:,.0f} GB/s for copies, from earlier records."
    )
    return "\n\n".join(["**The time model on two GPUs**", text, table(head, lines)])


def fitted(record: dict | None) -> str:
    """The rates of a device, fitted to the records, and the errors on held-out masks."""
    if record is None:
        return ""
    rates, rows = record["machine"], record["rows"]
    lines = []
    for name in dict.fromkeys(row["pattern"] for row in rows):
        errors = [row["total_error"] for row in rows if row["pattern"] == name]
        lines.append([name, f"{len(errors)}", f"{min(errors):+.0%}", f"{max(errors):+.0%}"])
    text = (
        "`experiments.long_context.calibrate` fits the rates of the time model to the records of "
        f"weak and strong scaling: {rates['tflops']:.0f} TFLOP/s forward, "
        f"{rates['backward_tflops']:.0f} backward, {rates['call_us'] / 1e3:.2f} ms for a pass and "
        f"{rates['memory']:,.0f} GB/s for copies. The {rates['bandwidth']:.0f} GB/s and "
        f"{rates['latency_us']:.0f} us of an exchange are those of all-to-alls of known sizes. "
        "Each mask below was predicted by a fit to the other masks. The error of the predicted "
        f"time of both passes has a median of {record['median_error']:.1%} and is "
        f"{record['most_error']:.0%} at most. With `--machine` these rates predict any number of "
        "GPUs of such a host: `python -m sparseflash simulate`."
    )
    head = ["held-out mask", "plans", "smallest error", "largest error"]
    return "\n\n".join([text, table(head, lines), measured(record)])
