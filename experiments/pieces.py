"""Splits files into pieces of a limited size, each with a hash, for transfer of small files only.

A piece is a line of JSON (number, count, SHA-256 of its content and of the whole), then its part
of a tar archive.
"""

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path

PIECE_BYTES = 14_900_000
HEADER_BYTES = 1000  # upper bound
PREFIX = "piece-"


def export(files: Mapping[str, bytes], folder: Path, piece_bytes: int = PIECE_BYTES) -> list[Path]:
    """Writes files into pieces, which replace the pieces in the folder.

    Args:
        files: Contents by path, relative to the folder into which they will be unpacked.
        folder: Folder of the pieces, `piece-0`, `piece-1`, ...
        piece_bytes: Largest size of a piece.

    Returns:
        The paths of the pieces.
    """
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    whole = packed.getvalue()
    step = piece_bytes - HEADER_BYTES
    parts = [whole[start : start + step] for start in range(0, len(whole), step)]
    folder.mkdir(parents=True, exist_ok=True)
    drafts = []
    for number, part in enumerate(parts):
        facts = {"piece": number, "of": len(parts), "sha256": _hash(part), "whole": _hash(whole)}
        draft = folder / f".{PREFIX}{number}.part"
        draft.write_bytes(json.dumps(facts).encode() + b"\n" + part)
        drafts.append(draft)
    for old in folder.glob(f"{PREFIX}*"):
        old.unlink()
    return [draft.rename(folder / draft.name[1:-5]) for draft in drafts]


def restore(folder: Path, target: Path) -> list[Path]:
    """Unpacks the pieces of a folder.

    Args:
        folder: Folder of the pieces, which may have any names.
        target: Folder into which the files are written.

    Returns:
        The paths of the files.

    Raises:
        ValueError: The folder has no pieces, or a piece is missing, damaged or of another archive.
            The message names the file.
    """
    pieces = [_read(path) for path in sorted(folder.glob(f"{PREFIX}*"))]
    if not pieces:
        raise ValueError(f"{folder} has no {PREFIX}*")
    first = pieces[0][1]
    for path, facts, _ in pieces:
        if (facts["whole"], facts["of"]) != (first["whole"], first["of"]):
            raise ValueError(f"{path} is of another archive than {pieces[0][0]}")
    by_number = {facts["piece"]: part for _, facts, part in pieces}
    missing = sorted(set(range(first["of"])) - set(by_number))
    if missing:
        raise ValueError(f"{folder} lacks {', '.join(f'{PREFIX}{n}' for n in missing)}")
    whole = b"".join(by_number[number] for number in range(first["of"]))
    with tarfile.open(fileobj=io.BytesIO(whole)) as archive:
        archive.extractall(target, filter="data")
        return [target / name for name in archive.getnames()]


def _read(path: Path) -> tuple[Path, dict, bytes]:
    header, _, part = path.read_bytes().partition(b"\n")
    try:
        facts = json.loads(header)
        intact = facts["sha256"] == _hash(part) and {"piece", "of", "whole"} <= facts.keys()
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a piece of an archive") from error
    if not intact:
        raise ValueError(f"{path} is damaged: its SHA-256 is not that of its header")
    return path, facts, part


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
