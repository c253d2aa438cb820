"""Table 4 on docs/paper.md: language models with longer contexts."""

import json
import re

from records import NOTHING, ROOT, latest, measured, newest, paragraphs, picture, ratio

from experiments.language_model.results import bits_at, common_seconds, contexts_of
from experiments.markdown import table

CONTEXTS = ROOT / "experiments/language_model/runs/contexts.sh"
LANGUAGE_MODELS = (
    "language-model-25m-contexts",
    "language-model-25m-warm-up",
    "language-model-25m-warm-up-tokens",
)
TIMES = (1 / 4, 1 / 2, 1)  # of the time after which the first run of a record ended


def language_model(name: str) -> str:
    """Bits per byte and throughput of each run, compared with the dense run of its context."""
    path = newest(name)
    if path is None:
        return ""
    record = json.loads(path.read_text())
    runs = record["runs"].values()
    dense = {run["model"]["context"]: run for run in runs if is_dense(run)}
    lines = []
    for label, run in record["runs"].items():
        other = dense.get(run["model"]["context"])
        loss, speed = run["bits_per_byte"], run["bytes_per_second"]
        lines.append(
            [
                label,
                contexts_of(run),
                f"{run['parameters'] / 1e6:.0f}M",
                "; ".join(f"`{text}`" for text in run["model"]["attention"]).replace("|", "\\|"),
                f"{run['trained'] * run['step_bytes'] / 1e6:,.0f}",
                f"{loss:.4f}",
                f"{run['curve'][-1]['by_position'][-1]:.4f}",
                NOTHING
                if other is None
                else f"{100 * (loss / other['bits_per_byte'] - 1):+.2f} %",
                f"{speed:,.0f}",
                NOTHING if other is None else ratio(speed, other["bytes_per_second"]),
            ]
        )
    head = ["run", "context, tokens", "parameters", "attention", "training data, MB"]
    head += ["bits per byte", "bits per byte, last positions", "bits per byte against dense"]
    head += ["bytes/s", "speed-up over dense"]
    first = next(iter(runs))
    shown = picture(path.stem, "Bits per byte over bytes read, over time, and by position")
    source = f"Record `experiments/results/{path.name}`."
    parts = [f"**{record['name']}**", table(head, lines), contexts(record["runs"])]
    parts += [patterns(record["runs"], dense), at_equal_time(record["runs"])]
    parts += [not_trained(name, record["runs"])]
    parts += [shown, f"{source} {measured(first)}"]
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
            "; ".join(f"`{text}`" for text in run["model"]["attention"]).replace("|", "\\|"),
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


def is_dense(run: dict) -> bool:
    return set(run["model"]["attention"]) <= {"flash", "sdpa"}


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
    where = f"at positions {size // 2:,} to {size:,}"
    return f"{text} Bits per byte {where}, which every run has: {', '.join(found)}."


def at_position(run: dict, end: int) -> float | None:
    """Final bits per byte of the octave of positions that ends there, or None."""
    ends = run["positions"][1:]
    return run["curve"][-1]["by_position"][ends.index(end)] if end in ends else None


def patterns(runs: dict[str, dict], dense: dict[int, dict]) -> str:
    """Loss and throughput of patterns, compared with dense attention with the same context."""
    told = []
    for name, run in runs.items():
        other = dense.get(run["model"]["context"])
        if other is None or is_dense(run):
            continue
        change = 100 * (run["bits_per_byte"] / other["bits_per_byte"] - 1)
        times = ratio(run["bytes_per_second"], other["bytes_per_second"])
        told.append(f"{name} {change:+.1f} % bits per byte and {times} times the throughput")
    return f"Against dense attention with the same context: {'; '.join(told)}." if told else ""


def at_equal_time(runs: dict[str, dict]) -> str:
    """Bits per byte of runs after the same times of training."""
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
    title = "**Bits per byte after equal times of training**"
    head = ["run", *(f"{seconds:.3g} s" for seconds in times)]
    return paragraphs([title, table([*head, f"against {next(iter(runs))}"], lines)])
