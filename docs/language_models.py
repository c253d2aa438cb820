"""Table 4 on docs/paper.md: language models with longer contexts."""

import re
from itertools import groupby

from records import NOTHING, ROOT, latest, load_each, measured, paragraphs, picture, ratio

from experiments.files import shared
from experiments.language_model.results import bits_at, common_seconds, contexts_of
from experiments.markdown import table

CONTEXTS = ROOT / "experiments/language_model/runs/contexts.sh"
LANGUAGE_MODELS = (
    "language-model-25m-contexts",
    "language-model-25m-warm-up",
    "language-model-25m-warm-up-tokens",
)
CONTEXT = 16384  # tokens, of the sentence in the README
WITHIN = 0.01  # of the bits per byte of dense attention
TIMES = (1 / 4, 1 / 2, 1)  # of the time after which the first run of a record ended


def language_model(name: str) -> str:
    """Bits per byte and throughput of each run, compared with the dense run of its context.

    Runs of several GPUs are in one table. Their bits per byte are compared, but throughputs and
    times only on one GPU.
    """
    records = load_each(name)
    if not records:
        return ""
    runs, several = together(records), len(records) > 1
    lines = []
    for label, run in runs.items():
        other = dense_like(run, runs)
        loss, speed = run["bits_per_byte"], run["bytes_per_second"]
        lines.append(
            [
                label,
                contexts_of(run),
                f"{run['parameters'] / 1e6:.0f}M",
                attention_of(run),
                f"{run['trained'] * run['step_bytes'] / 1e6:,.0f}",
                f"{loss:.4f}",
                f"{run['curve'][-1]['by_position'][-1]:.4f}",
                NOTHING
                if other is None
                else f"{100 * (loss / other['bits_per_byte'] - 1):+.2f} %",
                *[device_of(run)] * several,
                f"{speed:,.0f}",
                NOTHING
                if other is None or device_of(other) != device_of(run)
                else ratio(speed, other["bytes_per_second"]),
            ]
        )
    head = ["run", "context, tokens", "parameters", "attention", "training data, MB"]
    head += ["bits per byte", "bits per byte, last positions", "bits per byte against dense"]
    head += [*["device"] * several, "bytes/s", "speed-up over dense"]
    parts = [f"**{records[0]['name']}**", table(head, lines), contexts(runs), patterns(runs)]
    parts += [at_equal_time(each["runs"], each["device"] * several) for each in records]
    parts += [not_trained(name, runs)]
    return paragraphs([*parts, *map(of_record, records)])


def together(records: list[dict]) -> dict[str, dict]:
    """The runs of the records of several GPUs, by name; a second one has its GPU in its name.

    Raises:
        ValueError: They were not trained with the same data, or not with as much.
    """
    runs = {}
    for record in records:
        for label, run in record["runs"].items():
            runs[f"{label}, {record['device']}" if label in runs else label] = run
    amounts = (
        f"{run['data']}, {run['trained'] * run['step_bytes']:.0f} bytes" for run in runs.values()
    )
    shared(f"training data in {records[0]['name']}", amounts)
    return runs


def of_record(record: dict) -> str:
    """The picture and the source of a record."""
    shown = picture(record["stem"], "Bits per byte over bytes read, over time, and by position")
    first = next(iter(record["runs"].values()))
    parts = [shown, f"Record `experiments/results/{record['stem']}.json`. {measured(first)}"]
    changed = [name for name, run in record["runs"].items() if run["environment"]["git"]["dirty"]]
    if changed and not first["environment"]["git"]["dirty"]:
        parts.append(f"These runs ended in a checkout with local changes: {', '.join(changed)}.")
    return paragraphs(parts)


def not_trained(name: str, runs: dict[str, dict]) -> str:
    """The runs of CONTEXTS that the record of this name lacks, if it is a record of CONTEXTS."""
    script = CONTEXTS.read_text()
    if f"record={name.removeprefix('language-model-')}" not in script.split():
        return ""
    lacking = [run for run in re.findall(r"^run (\S+)", script, re.M) if run not in runs]
    return f"*Not trained yet: {', '.join(lacking)}.*" if lacking else ""


def long_step() -> str:
    """Throughput of training steps at 64K tokens, too few to say anything of losses."""
    record, _ = latest("language-model-25m-64k-step")
    if record is None:
        return ""
    runs = list(record["runs"].values())
    dense = next(run for run in runs if is_dense(run))
    found = [
        [
            attention_of(run),
            f"{run['model']['context']:,}",
            f"{run['parameters'] / 1e6:.0f}M",
            f"{run['step_bytes']:,.0f}",
            f"{1e3 * run['step_bytes'] / run['bytes_per_second']:,.0f}",
            f"{run['bytes_per_second']:,.0f}",
            ratio(run["bytes_per_second"], dense["bytes_per_second"]),
        ]
        for run in runs
    ]
    head = ["attention", "context, tokens", "parameters", "bytes of a step", "ms of a step"]
    head += ["bytes/s", "speed-up over dense"]
    return paragraphs(
        ["**Training steps with 64K tokens of context**", table(head, found), measured(runs[0])]
    )


def attention_of(run: dict) -> str:
    """The attention of the layers, with equal heads counted."""
    layers = []
    for text in run["model"]["attention"]:
        heads = [(head, len([*same])) for head, same in groupby(text.split("; "))]
        layers.append(", ".join(f"{n} x `{head}`" if n > 1 else f"`{head}`" for head, n in heads))
    return "; ".join(layers).replace("|", "\\|")


def is_dense(run: dict) -> bool:
    return set(run["model"]["attention"]) <= {"flash", "sdpa"}


def device_of(run: dict) -> str:
    return run["environment"]["device"]


def dense_like(run: dict, runs: dict[str, dict]) -> dict | None:
    """The dense run with the same context, of the same GPU if there is one; or None."""
    context = run["model"]["context"]
    found = [own for own in runs.values() if is_dense(own) and own["model"]["context"] == context]
    return max(found, key=lambda own: device_of(own) == device_of(run), default=None)


def contexts(runs: dict[str, dict]) -> str:
    """Bits per byte of longer contexts, and at positions that every run has."""
    (name, first), *others = runs.items()
    size = first["model"]["context"]
    longer = [(n, run) for n, run in others if run["model"]["context"] > size]
    if not longer:
        return ""
    loss = first["bits_per_byte"]
    told = (f"{n} {100 * (run['bits_per_byte'] / loss - 1):+.1f} %" for n, run in longer)
    text = f"Bits per byte against {name}: {', '.join(told)}."
    at = ((n, run, at_position(run, size)) for n, run in ((name, first), *longer))
    found = [f"{n} {bits:.3f}" for n, _, bits in at if bits is not None]
    if all(run["bits_per_byte"] >= loss for _, run in longer):
        text += " None of these longer contexts is better after this much training."
    if all(run["bits_per_byte"] < loss for _, run in longer):
        text += " Each of these longer contexts is better after as much training."
    where = f"at positions {size // 2:,} to {size:,}"
    return f"{text} Bits per byte {where}, which every run has: {', '.join(found)}."


def at_position(run: dict, end: int) -> float | None:
    """Final bits per byte of the octave of positions that ends there, or None."""
    ends = run["positions"][1:]
    return run["curve"][-1]["by_position"][ends.index(end)] if end in ends else None


def patterns(runs: dict[str, dict]) -> str:
    """Loss and throughput of patterns, compared with dense attention with the same context."""
    told = []
    for name, run in runs.items():
        other = dense_like(run, runs)
        if other is None or is_dense(run):
            continue
        change = 100 * (run["bits_per_byte"] / other["bits_per_byte"] - 1)
        text = f"{name} {change:+.1f} % bits per byte"
        if device_of(other) == device_of(run):
            times = ratio(run["bytes_per_second"], other["bytes_per_second"])
            text += f" and {times} times the throughput"
        told.append(text)
    return f"Against dense attention with the same context: {'; '.join(told)}." if told else ""


def briefly() -> str:
    """A part of a sentence: the fastest pattern with about the loss of dense attention."""
    records, found = load_each("language-model-25m-warm-up"), []
    runs = together(records) if records else {}
    for run in runs.values():
        other = dense_like(run, runs)
        if other is None or is_dense(run) or device_of(other) != device_of(run):
            continue
        more = run["bits_per_byte"] / other["bits_per_byte"] - 1
        if run["model"]["context"] == CONTEXT and more <= WITHIN:
            found.append((run["bytes_per_second"] / other["bytes_per_second"], more))
    if not found:
        return "not run"
    times, more = max(found)
    return (
        f"{times:.2f} times as fast with a block-sparse pattern as with dense attention, to "
        f"{100 * more:.1f} % more bits per byte (one run of each)"
    )


def at_equal_time(runs: dict[str, dict], device: str = "") -> str:
    """Bits per byte of runs of one GPU, whose name may be shown, after the same times of training.

    Empty if there is no time after which all have been measured.
    """
    last = common_seconds(runs.values())
    if last is None or len(runs) == 1:
        return ""
    times = [last * share for share in TIMES]
    first = bits_at(next(iter(runs.values())), last)
    lines = []
    for name, run in runs.items():
        bits = [bits_at(run, seconds) for seconds in times]
        end = bits[-1]
        change = f"{100 * (end / first - 1):+.1f} %" if end and first else NOTHING
        lines.append([name, *(f"{b:.4f}" if b else NOTHING for b in bits), change])
    on = f", {device}" * bool(device)
    title = f"**Bits per byte after equal times of training{on}**"
    head = ["run", *(f"{seconds:.3g} s" for seconds in times)]
    return paragraphs([title, table([*head, f"against {next(iter(runs))}"], lines)])
