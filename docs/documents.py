"""Table 5 on docs/paper.md: classification of long documents."""

import json
from collections.abc import Iterable
from statistics import fmean

from records import NOTHING, measured, newest, paragraphs, picture, read

from experiments.long_documents.results import (
    by_device,
    continues,
    samples_read,
    span,
    start_of,
)
from experiments.markdown import in_percent, table

AUTHORS = {  # records of encoders, EXPECTED or more, and the tokens that they read
    "long-documents-authors-words": "words",
    "long-documents-authors-words-chain": "words",
    "long-documents-authors-words-long": "words",
    "long-documents-authors-bytes": "bytes",
}
EXPECTED = ("long-documents-authors-words", "long-documents-authors-words-chain")
TUNED = ("long-documents-ecthr", "long-documents-mimic")


def authors() -> str:
    """Accuracy of encoders at each length, and of linear models of counts on the same passages."""
    floors = read("long-documents-floors")["floors"]
    paths = {name: path for name in AUTHORS if (path := newest(name))}
    found = {name: json.loads(path.read_text()) for name, path in paths.items()}
    groups = [
        (length, kind, group)
        for name, record in found.items()
        for kind in [AUTHORS[name]]
        for length, group in record["lengths"].items()
    ]
    trained = {length for length, *_ in groups}
    groups += [(length, "", None) for length in floors if length not in trained]
    lines = [
        [
            f"{int(length):,}",
            *(training_of(kind, group) if group else [NOTHING] * 6),
            accuracy(group),
            *(f"{100 * floors[length][kind]['accuracy']:.1f}" for kind in ("words", "bytes")),
        ]
        for length, kind, group in sorted(groups, key=lambda each: int(each[0]))
    ]
    head = ["bytes of a passage", "encoder of", "starts from", "runs", "steps", "passages read"]
    head += ["validation, %", "test, %", "floor: word counts", "floor: byte counts"]
    parts = [table(head, lines)]
    several = {name: record for name, record in found.items() if len(record["lengths"]) > 1}
    parts += [over_lengths(name, record) for name, record in several.items()]
    parts += [
        picture(paths[name].stem, "Accuracy against the length of a passage") for name in several
    ]
    parts.append("Floors: record `experiments/results/long-documents-floors.json`.")
    for name, record in found.items():
        for _, own in by_device(record["lengths"]):
            run = record["lengths"][own[0]]["runs"][0]
            parts.append(f"{encoders_of(name, record)}, {span(own)}: {measured(run)}")
    return paragraphs([*parts, "" if found else "No encoder has been trained yet."])


def training_of(kind: str, group: dict) -> list[str]:
    """What encoders of one length read, and their best accuracy on validation passages."""
    runs = group["runs"]
    best = [max(accuracy for _, accuracy, *_ in run["curve"]) for run in runs]
    return [
        kind,
        start_of(runs[0]),
        str(len(runs)),
        interval(run["steps"] for run in runs),
        interval(map(samples_read, runs)),
        f"{100 * fmean(best):.1f}",
    ]


def encoders_of(name: str, record: dict) -> str:
    """What the encoders of a record read, and whether they continue those of shorter lengths."""
    continued = " that start from a shorter length" * continues(record["lengths"])
    return f"Encoders of {AUTHORS[name]}{continued}"


def over_lengths(name: str, record: dict) -> str:
    """How accuracy changes with length, beside the floor of counts, and at the end of training."""
    groups, kind = record["lengths"], AUTHORS[name]
    shares = {length: 100 * group["accuracy"] for length, group in groups.items()}
    first, *_, last = groups
    best = max(shares, key=lambda length: shares[length])
    text = (
        f"{encoders_of(name, record)}: test accuracy is {shares[first]:.1f} % at {span([first])}, "
    )
    text += f"{shares[best]:.1f} % at {span([best])}"
    text += "" if best == last else f" and {shares[last]:.1f} % at {span([last])}"
    floors = {length: floor.get(kind) for length, floor in record["floors"].items()}
    over = {n: shares[n] - 100 * floor["accuracy"] for n, floor in floors.items() if floor}
    above = [f"{int(length):,}" for length, points in over.items() if points > 0]
    lowest = min(over, key=lambda length: over[length])
    text += f". It is above the floor of {kind[:-1]} counts at {', '.join(above) or 'no'} bytes"
    if over[lowest] < 0:
        text += f" and below it by up to {-over[lowest]:.1f} points, at {span([lowest])}"
    rises = {
        length: fmean(100 * (r["curve"][-1][1] - r["curve"][-2][1]) for r in group["runs"])
        for length, group in groups.items()
        if all(len(run["curve"]) > 1 for run in group["runs"])
    }
    if not rises:
        return f"{text}."
    most = max(rises, key=lambda length: rises[length])
    change = f"by {rises[most]:.1f} points, at {span([most])}"
    return f"{text}. Between the last two validations their accuracy rose most, {change}."


def interval(values: Iterable[int]) -> str:
    """The least and the greatest of some numbers, or the number that all are."""
    found = list(values)
    return " to ".join(f"{n:,}" for n in dict.fromkeys((min(found), max(found))))


def accuracy(group: dict | None) -> str:
    if group is None or group["accuracy"] is None:
        return NOTHING
    return in_percent(group["accuracy"], group["deviation"], digits=1)


def tuned() -> str:
    """Micro F1 of a fine-tuned encoder at each length, for each data set with a record."""
    parts = []
    for name in TUNED:
        path = newest(name)
        if path is None:
            continue
        record = json.loads(path.read_text())
        rows = [
            [
                f"{int(tokens):,}",
                accuracy(group | {"accuracy": group["micro_f1"]}),
                str(len(group["runs"])),
                f"`{group['runs'][0]['attention']}`".replace("|", "\\|"),
            ]
            for tokens, group in record["lengths"].items()
        ]
        first = next(iter(record["lengths"].values()))["runs"][0]
        parts += [f"**{record['name']}**"]
        parts += [table(["tokens", "micro F1, %", "runs", "attention"], rows), measured(first)]
    return paragraphs(parts)
