"""Collects trained runs of all lengths in one record, with its picture and its table."""

import json
from itertools import groupby
from pathlib import Path

from rich.table import Table

from experiments.files import read_object, record_path, shared, write_json
from experiments.long_documents.authors import DATA
from experiments.lra.results import ended, in_words
from experiments.lra.seeds import summary_of
from experiments.pictures import COLOURS, panels, save

FLOORS = ("data", "floors")  # keys of their record
RANDOM = "random weights"


def gather(name: str, runs: Path, floors: Path, output: Path) -> tuple[dict, tuple[Path, Path]]:
    """Writes long-documents-NAME-DEVICE.json and a picture of it.

    Runs of different lengths may be of different devices: the record has the device of each
    length, and its own device is all of them, which the name of the file has, too.

    Args:
        name: Name of the record.
        runs: A folder with a folder for each length, which contains a folder for each seed.
        floors: Path of the record of floors.
        output: Folder of both files.

    Returns:
        The record, and the paths.

    Raises:
        ValueError: A file is of another command, no length has a result, the runs differ in
            data, or runs of one length differ in device or in what they started from.
    """
    known = read_object(floors, "a record of `experiments.long_documents floors`", FLOORS)
    folders = [folder for folder in runs.glob("[0-9]*") if folder.name.isdecimal()]
    if not folders:
        raise ValueError(f"{runs} must have a folder for each length, such as 4096; it has none")
    lengths = {}
    for folder in sorted(folders, key=lambda folder: int(folder.name)):
        books = read_object(folder / DATA, "written by `experiments.long_documents train`", ())
        if books != known["data"]:
            raise ValueError(f"{folder} was trained on other books than {floors} is of")
        results = ended(folder)
        device = shared(f"device in {folder}", (r["environment"]["device"] for r in results))
        shared(f"start in {folder}", map(start_of, results))
        lengths[folder.name] = {"device": device} | summary_of(results) | {"runs": results}
    device = ", ".join(dict.fromkeys(group["device"] for group in lengths.values()))
    facts = {"name": name, "device": device, "data": known["data"], "lengths": lengths}
    facts["floors"] = {length: known["floors"].get(length, {}) for length in lengths}
    path = record_path(output, f"long-documents-{name}", device)
    write_json(path, facts)
    return facts, (path, draw(path))


def start_of(run: dict) -> str:
    """The weights with which an encoder started: RANDOM, or "512 bytes" for those of a length.

    Raises:
        ValueError: It started from another task, or a checkpoint that does not say of which.
    """
    before = run.get("init_from")
    if before is None:
        return RANDOM
    kind, _, length = before.get("task", "").removesuffix("-words").partition("-")
    if kind != "authors":
        raise ValueError(f"init_from of a run must be of `train`, got {before}")
    return span([length]) + ", without labels" * (not before["labels"])


def continues(lengths: dict[str, dict]) -> bool:
    """Whether encoders of a length in a record start from those of another one."""
    return any(start_of(run) != RANDOM for group in lengths.values() for run in group["runs"])


def samples_read(run: dict) -> int:
    """Number of passages that a run read in training, each time counted."""
    return run["steps"] * run["batch_size"] * run.get("accumulate_grad_batches", 1)


def by_device(lengths: dict[str, dict]) -> list[tuple[str, list[str]]]:
    """Each device with the lengths that it trained, which follow one another in the record."""
    pairs = groupby(lengths, key=lambda length: lengths[length]["device"])
    return [(device, list(own)) for device, own in pairs]


def span(lengths: list[str]) -> str:
    """The first and the last of some lengths: "512 to 4,096 bytes"."""
    return " to ".join(f"{int(n):,}" for n in dict.fromkeys((lengths[0], lengths[-1]))) + " bytes"


def draw(record: Path) -> Path:
    """Draws accuracy over the length of a passage, with the floors; returns the path."""
    facts = json.loads(record.read_text())
    figure, ax = panels(size=(7, 4.2))
    lengths = [int(length) for length in facts["lengths"]]
    found = [each["accuracy"] for each in facts["lengths"].values()]
    spread = [each["deviation"] or 0.0 for each in facts["lengths"].values()]
    percent = [[100 * value for value in values] for values in (found, spread)]
    label = "block-sparse encoder" + ", from a shorter length" * continues(facts["lengths"])
    look = {"color": COLOURS[0], "marker": "o", "markersize": 4, "capsize": 3}
    ax.errorbar(lengths, percent[0], percent[1], label=label, **look)
    for colour, name in zip(COLOURS[1:], ("words", "bytes"), strict=False):
        floor = {
            int(length): 100 * each[name]["accuracy"]
            for length, each in facts["floors"].items()
            if name in each
        }
        style = {"color": colour, "markersize": 3, "label": f"{name[:-1]} counts"}
        ax.plot(list(floor), list(floor.values()), ":s", **style)
    ax.set_xscale("log", base=2)
    found = by_device(facts["lengths"])
    title = "\n".join(f"{device}, {span(own)}" for device, own in found)
    ax.set(xlabel="bytes of a passage", ylabel="test accuracy, %", title=title)
    ax.legend(frameon=False)
    return save(figure, record)[0]


def table_of(record: dict) -> Table:
    """Test accuracy at each length, and that of linear models of word and byte counts."""
    head = ("bytes", "starts from", "encoder", "word counts", "byte counts")
    table = Table(*head, title=record["name"])
    for length, group in record["lengths"].items():
        floors = record["floors"][length]
        accuracies = (
            f"{100 * floors[name]['accuracy']:.1f} %" if name in floors else ""
            for name in ("words", "bytes")
        )
        start = start_of(group["runs"][0])
        table.add_row(f"{int(length):,}", start, in_words(group), *accuracies)
    return table
