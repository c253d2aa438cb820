"""Presets by name: files of this folder, each read after the common.yaml of its folders."""

from pathlib import Path
from typing import Any

import yaml

from experiments.lra import tasks
from experiments.lra.tasks import Task

FOLDER = Path(__file__).parent
COMMON = "common.yaml"
OPTION = "--preset"  # of the command line, which is replaced before the parser sees it


def names() -> list[str]:
    files = (path for path in FOLDER.rglob("*.yaml") if path.name != COMMON)
    return sorted(str(path.relative_to(FOLDER).with_suffix("")) for path in files)


def files_of(name: str) -> list[Path]:
    """The files of a preset such as "nystromformer/listops", the general ones first.

    Raises ValueError with the known names.
    """
    if name not in names():
        raise ValueError(f"unknown preset {name!r}; known: {', '.join(names())}")
    path = FOLDER / f"{name}.yaml"
    commons = [FOLDER / folder / COMMON for folder in reversed(Path(name).parents)]
    return [common for common in commons if common.exists()] + [path]


def read(name: str) -> dict[str, Any]:
    """The values of a preset, as the command line reads them."""
    values: dict[str, Any] = {}
    for path in files_of(name):
        values = _merged(values, yaml.safe_load(path.read_text()))
    return values


def _merged(values: dict, more: dict) -> dict:
    both = {
        key: _merged(values[key], more[key])
        for key in values.keys() & more.keys()
        if isinstance(more[key], dict) and isinstance(values[key], dict)
    }
    return values | more | both


def task_of(values: dict[str, Any]) -> Task:
    """The task of a preset's values."""
    task = values["data"]["task"]
    if isinstance(task, str):
        return getattr(tasks, task)()
    return getattr(tasks, task["class_path"])(**task["init_args"])
