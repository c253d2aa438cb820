"""Table 4 on docs/paper.md: language models with longer contexts."""

import re
from itertools import groupby
from statistics import fmean

from records import NOTHING, ROOT, latest, load_each, measured, paragraphs, picture, ratio

from experiments.files import shared
from experiments.language_model.model import causal_pattern
from experiments.language_model.results import (
    Runs,
    bits_at,
    bits_of,
    bytes_of_token,
    common_seconds,
    context_of,
    mean_bits,
    mean_speed,
    repeated,
    unended,
    unit_of,
)
from experiments.markdown import table

CONTEXTS = ROOT / "experiments/language_model/runs/contexts.sh"
WARM_UP = "language-model-25m-warm-up"
LANGUAGE_MODELS = {  # records of Table 4 and their titles
    "language-model-25m-contexts": "A token is a byte, without warm-up",
    WARM_UP: "A token is a byte, with warm-up",
    "language-model-25m-warm-up-tokens": "A token is one of byte-level BPE, with warm-up",
    "language-model-124m-warm-up": "A token is a byte, with warm-up, a larger model",
}
CONTEXT = 16384  # tokens, of the sentence in the README
WITHIN = 0.01  # of the bits per byte of dense attention
KINDS = ("block-sparse", "dense")
TIMES = (1 / 4, 1 / 2, 1)  # of the time after which the first run of a record ended
Groups = dict[str, list[dict]]  # runs of equal settings, by the name of the first; see `repeated`


def language_model(name: str) -> str:
    """Bits per byte and throughput of each run, compared with the dense run of its context.

    Runs of several GPUs and of several seeds are in one table, those of equal settings in one row.
    Their bits per byte are compared, but throughputs and times only on one GPU.
    """
    records = load_each(name)
    if not records:
        return ""
    runs = together(records)
    groups, devices = grouped(runs), [record["device"] for record in records]
    first, *_ = next(iter(groups.values()))
    read = first["steps"] * first["step_bytes"]
    facts = f"{first['parameters'] / 1e6:.0f}M parameters, {read / 1e6:,.0f} MB of training data"
    if unit_of(first) == "tokens":
        facts += f", {bytes_of_token(first):.2f} bytes in a token"
    warm = {(run.get("short_steps", 0), run.get("short_context")) for run in runs.values()}
    for steps, context in sorted(found for found in warm if found[0]):
        facts += (
            f", the first {steps:,} of {first['steps']:,} steps at {context:,} {unit_of(first)}"
        )
    parts = [f"**{LANGUAGE_MODELS[name]}: {facts}**", comparison(groups, devices), better(groups)]
    for device in devices:
        of_device = {
            label: own
            for label, group in groups.items()
            if (own := [run for run in group if run["environment"]["device"] == device])
        }
        parts += [at_equal_time(of_device, device * (len(records) > 1))]
    parts += [not_trained(name, runs)]
    return paragraphs([*parts, *map(of_record, records)])


def grouped(runs: Runs) -> Groups:
    """Runs of equal settings, by context, dense ones first."""
    groups = repeated(runs)
    order = sorted(
        groups,
        key=lambda name: (groups[name][0]["model"]["context"], not is_dense(groups[name][0])),
    )
    return {name: groups[name] for name in order}


def comparison(groups: Groups, devices: list[str]) -> str:
    """The table of all runs: those of equal settings are a row with their mean and spread."""
    base, (first, *_) = next(iter(groups.items()))
    size = first["model"]["context"]
    several = any(len(group) > 1 for group in groups.values())
    lines = []
    for label, group in groups.items():
        run, other = group[0], dense_like(group, groups)
        middle, late = (
            [bits for each in group if (bits := at(each)) is not None]
            for at in (lambda r: at_position(r, size), lambda r: r["curve"][-1]["by_position"][-1])
        )
        line = [f"{label}{unended(run)}", context_of(run), attention_of(run), blocks_of(run)]
        line += [f"{len(group)}"] * several
        line += [bits_of(group), f"{fmean(middle):.3f}" if middle else NOTHING]
        line += [f"{fmean(late):.3f}", change(group, groups[base]), change(group, other)]
        for device in devices:
            speed = mean_speed(group, device)
            line += [f"{speed:,.0f}" if speed else NOTHING]
            line += [ratio(speed, mean_speed(other or [], device)) if speed else NOTHING]
        lines.append(line)
    head = ["run", "context", "attention", "blocks", *["runs"] * several, "bits per byte"]
    head += [f"positions {size // 2:,} to {size:,}", "last positions", f"against {base}"]
    head += ["against dense"]
    for device in devices:
        on = f", {device}" * (len(devices) > 1)
        head += [f"bytes/s{on}", f"speed-up over dense{on}"]
    return table(head, lines)


def change(group: list[dict], other: list[dict] | None) -> str:
    """Percent by which the bits per byte of ended runs are above those of others."""
    if other is None or not (group[0]["ended"] and other[0]["ended"]):
        return NOTHING
    return f"{100 * (mean_bits(group) / mean_bits(other) - 1):+.2f} %"


def together(records: list[dict]) -> Runs:
    """The runs of the records of several GPUs, by name; a second one has its GPU in its name.

    Raises:
        ValueError: They were not trained with the same data, or those that ended not with as much.
    """
    runs = {}
    for record in records:
        for label, run in record["runs"].items():
            runs[f"{label}, {record['device']}" if label in runs else label] = run
    what = f"training data in {records[0]['name']}"
    shared(what, (f"{run['data']}" for run in runs.values()))
    amounts = [f"{run['steps'] * run['step_bytes']:.0f} bytes" for run in runs.values()]
    shared(what, amounts)
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
    # The line of the record, and a next one if it selects runs.
    record = rf"record={re.escape(name.removeprefix('language-model-'))}$(\n.*chosen=\((.*?)\))?"
    found = re.search(record, script.replace(" ;;", ""), re.M)
    if found is None:
        return ""
    wanted = found[2].split() if found[2] else re.findall(r"^run (\S+)", script, re.M)
    lacking = [run for run in wanted if run not in runs]
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


def blocks_of(run: dict) -> str:
    """The share of the causal mask's blocks that the patterns have, mean over layers and heads."""
    model = run["model"]
    sizes = model["heads"], model["block_size"]
    every, *own = (
        causal_pattern(text, *sizes)(model["context"]).density
        for text in ("flash", *model["attention"])
    )
    # The layers repeat these texts in turn.
    turns = [own[layer % len(own)] for layer in range(model["layers"])]
    return f"{100 * fmean(turns) / every:.0f} %"


def is_dense(run: dict) -> bool:
    return set(run["model"]["attention"]) <= {"flash", "sdpa"}


def dense_like(group: list[dict], groups: Groups) -> list[dict] | None:
    """The dense runs with the same context, those that have ended if there are some; or None."""
    context = group[0]["model"]["context"]
    found = [
        own
        for own in groups.values()
        if is_dense(own[0]) and own[0]["model"]["context"] == context
    ]
    return max(found, key=lambda own: own[0]["ended"], default=None)


def better(groups: Groups) -> str:
    """Which longer contexts have fewer bits per byte than the shortest."""
    base, first = next(iter(groups.items()))
    size = first[0]["model"]["context"]
    longer = {
        name: group
        for name, group in groups.items()
        if group[0]["model"]["context"] > size and group[0]["ended"] and first[0]["ended"]
    }
    lower = [name for name, group in longer.items() if mean_bits(group) < mean_bits(first)]
    others = [name for name in longer if name not in lower]
    told = [
        f"{what} bits per byte than {base} after as much training: {', '.join(names)}."
        for what, names in (("Fewer", lower), ("No fewer", others))
        if names
    ]
    return " ".join(told)


def at_position(run: dict, end: int) -> float | None:
    """Final bits per byte of the octave of positions that ends there, or None."""
    ends = run["positions"][1:]
    return run["curve"][-1]["by_position"][ends.index(end)] if end in ends else None


def briefly() -> str:
    """A part of a sentence: the fastest pattern with about the loss of dense attention."""
    records, found = load_each(WARM_UP), []
    groups = grouped(together(records)) if records else {}
    for group in groups.values():
        other = dense_like(group, groups)
        run = group[0]
        if other is None or is_dense(run) or not (run["ended"] and other[0]["ended"]):
            continue
        more = mean_bits(group) / mean_bits(other) - 1
        if run["model"]["context"] != CONTEXT or more > WITHIN:
            continue
        for record in records:
            speed, dense = (mean_speed(each, record["device"]) for each in (group, other))
            if speed and dense:
                found.append((speed / dense, more, len(group), len(other)))
                break
    if not found:
        return "not run"
    times, more, *counts = max(found)
    sparse, dense = (
        f"{n} {kind} run{'s' * (n > 1)}" for n, kind in zip(counts, KINDS, strict=True)
    )
    runs = "one run of each" if counts == [1, 1] else f"{sparse}, {dense}"
    return (
        f"{times:.2f} times as fast with a block-sparse pattern as with dense attention, to "
        f"{100 * abs(more):.1f} % {'more' if more > 0 else 'fewer'} bits per byte ({runs})"
    )


def at_equal_time(groups: Groups, device: str = "") -> str:
    """Bits per byte of ended runs of one GPU, whose name may be shown, after equal times.

    Empty if there is no time after which all have been measured.
    """
    groups = {name: group for name, group in groups.items() if group[0]["ended"]}
    if len(groups) < 2:
        return ""
    last = common_seconds(run for group in groups.values() for run in group)
    if last is None:
        return ""
    times = [last * share for share in TIMES]

    def mean_at(group: list[dict], seconds: float) -> float | None:
        found = [bits_at(run, seconds) for run in group]
        known = [bits for bits in found if bits is not None]
        return fmean(known) if len(known) == len(found) else None

    base, first = next(iter(groups.items()))
    from_first = mean_at(first, last)
    lines = []
    for name, group in groups.items():
        bits = [mean_at(group, seconds) for seconds in times]
        end = bits[-1]
        more = f"{100 * (end / from_first - 1):+.1f} %" if end and from_first else NOTHING
        lines.append([name, *(f"{b:.4f}" if b else NOTHING for b in bits), more])
    on = f", {device}" * bool(device)
    title = f"**Bits per byte after equal times of training{on}**"
    head = ["run", *(f"{seconds:.3g} s" for seconds in times)]
    return paragraphs([title, table([*head, f"against {base}"], lines)])
