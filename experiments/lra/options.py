"""The options with which the runs of a folder were started. A command that resumes them must have
the same ones, but for those of the machine.
"""

import json
from pathlib import Path

from experiments.cli import ROOT
from experiments.files import read_json, write_json

OPTIONS = "options.json"  # of all runs of a folder
# Options of `fit` that a command which resumes on another machine may change.
OF_MACHINE = (
    "data.data_root",
    "data.workers",
    "trainer.accelerator",
    "trainer.devices",
    "trainer.enable_progress_bar",
    "trainer.strategy",
)


def check_options(folder: Path, arguments: list[str], started: bool) -> None:
    """Checks that the runs of a folder, if any, have these options, and records them.

    Args:
        folder: The folder.
        arguments: Options of the command.
        started: Whether the folder has runs that are resumed.

    Raises:
        ValueError: The runs have other options, or their options were not recorded. Their results
            would be taken for those of a run with these options.
    """
    path, own = folder / OPTIONS, that_determine(arguments)
    recorded = read_json(path, None) if started else own
    if recorded is None:
        raise ValueError(
            f"{folder} has runs but no {OPTIONS}, so that their options are not known: give "
            f"another --output, or write {json.dumps(own)} to {path} if these were their options"
        )
    if not isinstance(recorded, list) or not all(isinstance(part, str) for part in recorded):
        raise ValueError(f"{path} must be a list of options, got {recorded!r}")
    if recorded != own:
        raise ValueError(
            f"{folder} has runs with other options: {differences(recorded, own)}; give the "
            "recorded options, or another --output"
        )
    write_json(path, own)


def differences(recorded: list[str], own: list[str]) -> str:
    """Which of two lists of NAME=VALUE differ, with the recorded value and the new one."""
    before, now = _by_name(recorded), _by_name(own)
    found = [
        f"{name} was {before.get(name, 'not given')} and is {now.get(name, 'not given')} now"
        for name in dict.fromkeys([*before, *now])
        if before.get(name) != now.get(name)
    ]
    return ", ".join(found) or f"their order was {' '.join(recorded)}"


def _by_name(options: list[str]) -> dict[str, str]:
    """The values of each option, separated by commas if it was given several times."""
    found: dict[str, str] = {}
    for option in options:
        name, _, value = option.partition("=")
        found[name] = f"{found[name]}, {value}" if name in found else value
    return found


def that_determine(arguments: list[str]) -> list[str]:
    """The options of `fit` that determine a result, each as --NAME=VALUE, in their order.

    Files of this package are relative to it, so that another checkout has the same options.
    """
    found = []
    given = iter(arguments)
    for argument in given:
        name, equals, value = argument.removeprefix("--").partition("=")
        if argument.startswith("--") and not equals:
            value = next(given, "")
        if name not in OF_MACHINE:
            inside = Path(value).is_absolute() and Path(value).is_relative_to(ROOT)
            found.append(f"--{name}={Path(value).relative_to(ROOT) if inside else value}")
    return found
