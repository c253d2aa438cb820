"""A section of docs/performance.md: context parallelism on two GPUs, and what it misses."""

from records import Rows, load, measured, picture

from experiments.markdown import table

WEAK, GROUPED = "long-context-weak-128k-2", "long-context-weak-128k-16-4-heads-2"
STRONG, LONG = "long-context-strong-256k-2", "long-context-strong-2m-16-4-heads-2"
MACHINE = "long-context-machine"
FOUR = "long-context-strong-1m-4"
SCALING = {
    STRONG: "Strong scaling, 262,144 tokens, 16 heads",
    LONG: "Strong scaling, 2,097,152 tokens, 16 heads, 4 of keys",
    GROUPED: "Weak scaling, 131,072 tokens a GPU, 16 heads, 4 of keys",
    WEAK: "Weak scaling, 131,072 tokens a GPU, 16 heads",
}
AIMED = ("window", "window of 1024", "butterfly")  # the masks of the aims
EFFICIENCY, OVER_GATHER, MEMORY = 0.90, 1.3, 0.5
ANALYSED = "nvidia-h100-80gb-hbm3"  # the device whose figures the reasons explain
NVLINK = 450  # GB/s in each direction between two H100 of a host, as specified
TEXT = """\
[Context-parallel attention](design/context-parallel.md) on one and two GPUs of a host: head dim
128, batch 1, bfloat16, blocks of 128. *window* and *top-k* have 4,096 keys for a query, *window
of 1024* has 1,024, *local+global* a window and 128 global tokens, *documents* a mean of 8,192
tokens. The all-gather and the ring use the same kernels.

- **Efficiency** is the useful FLOP/s of a GPU over that of one GPU with the same plan.
- **Over all-gather** is the time of the all-gather over that of the plan. *At most* is this ratio
  for a plan with efficiency 1.
- **Exposed** is the time of both passes minus that of the same run without exchanges. **Local** is
  what else is lost against efficiency 1: copies that pack and add keys and gradients, and kernels
  with fewer blocks.
- **Received** are megabytes of a GPU in the forward pass. They were counted, and equal those of
  the plan.
- **Peak memory** is that of both passes without inputs, in MB.

A run ends after a given time, so that the last masks of a long sequence are missing."""

FOUR_TEXT = """\
The same with up to four GPUs of a host and one sequence of 1,048,576 tokens, 16 heads. Here a plan
sends whole shards and gradients from where they lie, reads own keys in place, and counts local
copies in its time model. *Predicted* was written before the measurement; the rates were fitted to
the records of two H100 above, so the device is another one. *Memory* is the peak memory of a GPU
over that of one GPU that holds the whole sequence; 1 / GPUs would be ideal. The window of 4,096
keys was measured too, but another program used one of the GPUs at that time, so its rows were
removed. Weak scaling on four GPUs has no record."""


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
        "they are packed before they are sent, and its rows are computed in parts that are "
        "merged."
    )


def long_context(record: dict) -> str:
    """Aims, a table for each record of the device, and the error of the time model."""
    device = record["stem"].removeprefix(f"{WEAK}-")
    found = {name: load(name, device) for name in SCALING}
    parts = [aims(found)] + [reasons(record["rows"])] * (device == ANALYSED)
    machine = load(MACHINE, device)
    if machine is not None:
        parts += [model(machine, [each for each in found.values() if each]), measured(machine)]
    for name, each in found.items():
        if each is not None:
            parts += [f"**{SCALING[name]}**", scaling(each["rows"])]
            parts += [measured(each)] * (name != WEAK)  # the caller adds that of WEAK, the last
    title = f"Weak scaling on two GPUs, {record['environment']['device']}"
    parts.append(picture(record, "", title, "../experiments/results"))
    return "\n\n".join(filter(None, parts))


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


def aims(found: dict[str, dict | None]) -> str:
    """What was aimed at, and whether it is reached."""
    lines = []
    for name, record in found.items():
        rows = record["rows"] if record else []
        for mask in (each for each in AIMED if each in patterns(rows)):
            one, two = (row_of(rows, mask, "plan", n)["peak_bytes"] for n in (1, 2))
            tokens = SCALING[name].partition(", ")[2]
            if name in (WEAK, GROUPED):
                share, ratio = efficiency(rows, mask), over(rows, mask, "all-gather")
                weak = f"weak-scaling efficiency of at least {EFFICIENCY:.2f}"
                lines += [
                    [weak, tokens, mask, f"{share:.2f}", yes(share >= EFFICIENCY)],
                    [
                        *(f"at least {OVER_GATHER}x an all-gather", tokens, mask),
                        *(f"{ratio:.2f}x", yes(ratio >= OVER_GATHER)),
                    ],
                ]
            else:
                part = two / one
                memory = "memory of a GPU of two over that of one: 0.5"
                lines.append([memory, tokens, mask, f"{part:.2f}", yes(part < MEMORY + 0.05)])
    lines.sort(key=lambda line: line[0])
    return table(["aim", "sizes", "mask", "measured", "reached"], lines)


def yes(reached: bool) -> str:
    return "yes" if reached else "**no**"


def reasons(rows: Rows) -> str:
    """Why the aims are missed, with the figures of the record of weak scaling."""
    share, alone = efficiency(rows, "butterfly"), row_of(rows, "butterfly", "plan", 1)
    plan, few, window = (
        row_of(rows, name, "plan", 2) for name in ("butterfly", "local+global", "window")
    )
    best, moved = share * plan["total_ms"], plan["counted_mb"] / 1e3
    forward = alone["forward_ms"] * best / alone["total_ms"]
    local = plan["total_ms"] - best - plan["exposed_total_ms"]
    gathered = f"{window['gathered_mb']:,.0f} MB"
    first = [1 / over(rows, name, "all-gather", 1) for name in patterns(rows)]
    parts = [
        f"**What holds.** A *window* scales. A GPU receives {window['counted_mb']:.0f} MB instead "
        f"of {gathered} while it computes, and its memory falls as 1 / GPUs. But two GPUs of one "
        f"host gather {gathered} so fast that a plan of efficiency 1 would be only "
        f"{most_over(rows, 'window'):.2f} times as fast as the all-gather, so that 1.3 cannot be "
        "reached at this size. This bound is (compute + gather) / compute, for every mask.",
        "**What does not: butterfly.** On two GPUs every block row attends keys of the other GPU, "
        f"and together they attend all of them. A GPU receives {moved:.2f} GB and has to send as "
        f"many gradients, each at least {moved / NVLINK * 1e3:.1f} ms at the {NVLINK} GB/s of "
        f"NVLink. At the rate of one GPU its blocks take {forward:.1f} ms forward and "
        f"{best:.1f} ms in both passes, so there is hardly enough to compute to hide an exchange. "
        f"Yet of the {plan['total_ms']:.1f} ms only {plan['exposed_total_ms']:.1f} are exposed. "
        f"{local:.1f} are local: {moved:.2f} GB of sent keys and as many own keys are packed, as "
        "many gradients are packed, and those that arrive are added. With a quarter of the key "
        "heads a third of it is left. The all-gather has such copies too.",
        "**What does not: few global tokens.** With *local+global* the plan takes "
        f"{1 / over(rows, 'local+global', 'all-gather'):.2f} times as long as the all-gather, "
        f"although it receives only {few['counted_mb']:.0f} MB. Two causes follow from the plan. "
        "Every row attends the global keys, so all rows of the second GPU wait for them, and all "
        "its own keys are copied behind them. And the shared row is a call of its own: 16 heads "
        "are 16 work tiles of 1,024 blocks each for 132 multiprocessors. The time model counts "
        "neither, so it did not choose the split by keys.",
        "**Memory.** If a GPU fetches all keys of the other one, these keys, their gradients and "
        "the packed copies of both take as much as two GPUs save, or more.",
        f"**One GPU.** The plan takes {min(first):.2f} to {max(first):.2f} times as long as the "
        "all-gather, although there is nothing to exchange, to copy or to merge, and both run the "
        "same kernels on equal masks. The all-gather is always measured first. The likely cause "
        "is that the device has rested before: the excess is largest in the first and shortest "
        "measurements. If so, the ratios over the all-gather are too low. For *top-k* the plan "
        "makes the lookup tables of the selected blocks in every call, and the all-gather once.",
    ]
    return "\n\n".join(parts)


def most_over(rows: Rows, pattern: str) -> float:
    """The time of the all-gather over that of a plan of efficiency 1."""
    return over(rows, pattern, "all-gather") / efficiency(rows, pattern)


def model(machine: dict, records: list[dict]) -> str:
    """The fitted rates, and the times on two GPUs predicted before and by other masks."""
    said = {
        each["environment"]["command"]: {
            (p["pattern"], p["prediction"]["ranks"]): p["prediction"]["total_ms"]
            for p in each["predicted"]
        }
        for each in records
    }
    lines = []
    for row in machine["rows"]:
        if row["ranks"] == 1:
            continue
        same = ("kind", "pattern", "ranks", "seq_len", "total_ms")
        each, of_run = next(
            (found, record)
            for record in records
            for found in record["rows"]
            if all(found[name] == row[name] for name in same)
        )
        before = said[of_run["environment"]["command"]][row["pattern"], 2]
        heads = f"{each['heads']}" + f", {each['kv_heads']} of keys" * (
            each["kv_heads"] != each["heads"]
        )
        lines.append(
            [
                *(row["kind"], row["pattern"], f"{row['seq_len']:,}", heads),
                *(
                    f"{row['total_ms']:.1f}",
                    f"{before:.1f}",
                    f"{before / row['total_ms'] - 1:+.0%}",
                ),
                *(f"{row['predicted_total_ms']:.1f}", f"{row['total_error']:+.0%}"),
            ]
        )
    head = ["scaling", "mask", "tokens", "heads", "measured, ms", "predicted before, ms", "error"]
    head += ["predicted from the other masks, ms", "error"]
    rates, most = machine["machine"], max(machine["rows"], key=lambda r: abs(r["total_error"]))
    return "\n\n".join(
        [
            "**The time model on two GPUs**",
            "*Predicted before* was computed before the measurement, with the default rates. Then "
            "the rates were fitted to the measured times (`experiments.long_context.calibrate`): "
            f"{rates['tflops']:.0f} TFLOP/s forward, {rates['backward_tflops']:.0f} backward, "
            f"{rates['bandwidth']:.0f} GB/s and {rates['latency_us'] / 1e3:.1f} ms for an "
            "exchange. The last columns show each mask predicted by a fit without it. The median "
            f"error over all {len(machine['rows'])} points, those on one GPU included, is "
            f"{machine['median_error']:.0%}, and the largest {machine['most_error']:.0%}, for "
            f"*{most['pattern']}*. When these times were measured, plans packed all keys and "
            "gradients that they sent, and the model had no term for local copies. The fit hides "
            "them in the time of an exchange: these rates do not predict other numbers of GPUs.",
            table(head, lines),
        ]
    )
