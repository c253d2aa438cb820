"""JSON files that are replaced atomically, and the common properties of several runs."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from uuid import uuid4

RESULT = "result.json"  # in the folder of a run: what it reports at its end


def write_json(path: Path, value: object) -> None:
    """Writes a value and creates the folders above it.

    The text is written to a temporary file with a unique name, which then replaces `path`. So a
    reader sees the old or the new value, and two writers do not mix. If writing fails, the
    temporary file is removed.

    Args:
        path: The file, which is replaced if it exists.
        value: A value that `json.dumps` accepts.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{uuid4().hex}.part")
    try:
        draft.write_text(_lines(value) + "\n")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def read_json(path: Path, absent: Any) -> Any:
    """The value in a JSON file, or `absent` if there is no such file.

    Raises:
        ValueError: The file is not JSON, for example because only a part of it was copied.
    """
    if not path.exists():
        return absent
    try:
        return json.loads(path.read_text())
    except (RecursionError, ValueError) as error:
        raise ValueError(f"{path} must be JSON: {error}") from error


def read_object(path: Path, what: str, keys: Iterable[str]) -> dict:
    """The JSON object in a file.

    Args:
        path: The file.
        what: What the file must be, for the message of an error.
        keys: Keys that every such object has.

    Raises:
        ValueError: The file does not exist, is not JSON, or has no object with these keys.
    """
    found = read_json(path, None)
    if not isinstance(found, dict):
        raise ValueError(
            f"{path} must be {what}, got {'no object' if path.exists() else 'no file'}"
        )
    if lacking := [key for key in keys if key not in found]:
        raise ValueError(f"{path} must be {what}, but has no {', '.join(map(repr, lacking))}")
    return found


def record_path(folder: Path, name: str, device: str) -> Path:
    """NAME-DEVICE.json in a folder, for the full name of a device."""
    machine = re.sub(r"\W+", "-", device.lower())
    return folder / f"{name}-{machine}.json"


def shared(what: str, found: Iterable[str]) -> str:
    """The common value of all runs of a record. Raises ValueError if they differ."""
    distinct = set(found)
    if not distinct:
        raise ValueError(f"a record must have a run, of which the {what} is read; got none")
    if len(distinct) != 1:
        raise ValueError(f"runs of a record must have one {what}, got {sorted(distinct)}")
    return distinct.pop()


def read_results(folders: Iterable[Path], what: str, keys: Iterable[str]) -> list[dict]:
    """The contents of RESULT in folders of runs; `what` and `keys` as in `read_object`.

    Raises:
        ValueError: A folder has no such file, or one of another command.
    """
    paths, keys = [folder / RESULT for folder in folders], list(keys)
    for path in paths:
        if not path.exists():
            raise ValueError(f"{path.parent} has no {RESULT}: none of its runs has finished")
    return [read_object(path, what, keys) for path in paths]


def _lines(value: object, depth: int = 1) -> str:
    """JSON with one line for each entry of the outer two levels."""
    indent = "\n" + " " * depth
    if not value or depth > 2 or not isinstance(value, dict | list):
        return json.dumps(value)
    if isinstance(value, dict):
        entries = [f"{json.dumps(str(k))}: {_lines(v, depth + 1)}" for k, v in value.items()]
    else:
        entries = [_lines(v, depth + 2) for v in value]
    opened, closed = "{}" if isinstance(value, dict) else "[]"
    return f"{opened}{indent}{f',{indent}'.join(entries)}{indent[:-1]}{closed}"
