"""Data on disk with hashes: generated arrays, either complete or absent, and built files."""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import DTypeLike

from experiments.files import write_json

Arrays = dict[str, np.ndarray]
Allocate = Callable[[str, tuple[int, ...], DTypeLike], np.ndarray]
MANIFEST = "manifest.json"
HASHES = "sha256.json"
UNFINISHED = ".unfinished-"
ABANDONED = 24 * 3600  # seconds after which a draft is nobody's


def stored(folder: Path, facts: dict, generate: Callable[[Allocate], None]) -> Arrays:
    """The arrays of `folder`, memory-mapped; generated first where it does not exist.

    facts: what the arrays are generated from; generate(allocate): fills the arrays that
    allocate(name, shape, dtype) makes on disk. Raises ValueError for a folder that was generated
    from other facts, or whose files are not what was generated; names the file.
    """
    if not folder.exists():
        _write(folder, facts, generate)
    manifest = _manifest(folder)
    if manifest["facts"] != json.loads(json.dumps(facts)):
        raise ValueError(f"{folder} has {manifest['facts']}, not {facts}: move it away")
    arrays = {name: _loaded(folder, name) for name in manifest["sha256"]}
    for name, array in arrays.items():
        if list(array.shape) != manifest["shape"][name]:
            raise ValueError(
                f"{folder / name}.npy must be {manifest['shape'][name]}, got {array.shape}"
            )
    files = sorted(path for path in folder.iterdir() if path.is_file())
    _once(folder, files, lambda: verify(folder))
    return arrays


def _manifest(folder: Path) -> dict:
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text())
        if manifest["shape"].keys() != manifest["sha256"].keys() or "facts" not in manifest:
            raise ValueError("it is incomplete")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read: {error}; delete {folder}") from error
    return manifest


def _loaded(folder: Path, name: str) -> np.ndarray:
    path = folder / f"{name}.npy"
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{path} cannot be read: {error}; delete {folder}") from error


def write_hashes(folder: Path, patterns: Sequence[str]) -> None:
    """Writes HASHES: what `check_hashes` finds the files of a built folder by.

    Args:
        folder: Complete.
        patterns: Of its files that loaders read.
    """
    found = {str(path.relative_to(folder)): _sha256(path) for path in _matching(folder, patterns)}
    write_json(folder / HASHES, {"patterns": list(patterns), "sha256": found})


def check_hashes(folder: Path) -> None:
    """Raises ValueError naming the first file of a folder that is not as it was built.

    A folder without HASHES was not built here and is taken as it is.
    """
    if not (folder / HASHES).exists():
        return
    try:
        facts = json.loads((folder / HASHES).read_text())
        patterns, known = facts["patterns"], facts["sha256"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / HASHES} cannot be read: {error}; {REBUILD}") from error
    files = _matching(folder, patterns)
    names = {str(path.relative_to(folder)) for path in files}
    for what, which in (("is missing", known.keys() - names), ("is new", names - known.keys())):
        if which:
            raise ValueError(f"{folder / min(which)} {what} since it was built; {REBUILD}")

    def verify_files() -> None:
        for path in files:
            if _sha256(path) != known[str(path.relative_to(folder))]:
                raise ValueError(f"{path} is not what was built; {REBUILD}")

    _once(folder, files, verify_files)


REBUILD = "move the folder away and build it with python -m experiments.lra.data"


def _matching(folder: Path, patterns: Sequence[str]) -> list[Path]:
    return sorted(path for pattern in patterns for path in folder.glob(pattern))


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# Folders that this process has verified, with the sizes and times of their files.
_verified: dict[Path, list[tuple]] = {}


def _once(folder: Path, files: Sequence[Path], verify: Callable[[], None]) -> None:
    """Verifies a folder unless its files are as they were when this process did so before."""
    found = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    if _verified.get(folder) != found:
        verify()
        _verified[folder] = found


def verify(folder: Path) -> None:
    """Raises ValueError naming the first array whose content hash is not that of the manifest."""
    for name, expected in _manifest(folder)["sha256"].items():
        if content_hash(_loaded(folder, name)) != expected:
            raise ValueError(f"{folder / name}.npy is not what was generated: delete {folder}")


def content_hash(array: np.ndarray) -> str:
    """SHA-256 of an array's values in C order."""
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()


def _write(folder: Path, facts: dict, generate: Callable[[Allocate], None]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    for path in folder.parent.glob(f"{UNFINISHED}*"):
        if time.time() - path.stat().st_mtime > ABANDONED:  # by a process that was killed
            shutil.rmtree(path, ignore_errors=True)
    # A folder takes its name only when it is complete, which an interrupted write never is.
    draft = Path(mkdtemp(prefix=UNFINISHED, dir=folder.parent))
    arrays: Arrays = {}

    def allocate(name: str, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
        path = draft / f"{name}.npy"
        arrays[name] = open_memmap(path, "w+", np.dtype(dtype), shape)
        _take_space(path, folder)
        return arrays[name]

    try:
        generate(allocate)
        manifest = {
            "facts": facts,
            "shape": {name: list(array.shape) for name, array in arrays.items()},
            "sha256": {name: content_hash(array) for name, array in arrays.items()},
        }
        write_json(draft / MANIFEST, manifest)
        _name(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _take_space(path: Path, folder: Path) -> None:
    """Gives a sparse file its blocks: where a disk is full, filling it would be a SIGBUS.

    Raises OSError with the bytes that it needs.
    """
    size = path.stat().st_size
    try:
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        needed = f"{path.name} of {folder} needs {size:,} bytes"
        raise OSError(error.errno, f"{error.strerror}: {needed}") from error


def _name(draft: Path, folder: Path) -> None:
    """Gives a complete draft its name, unless another process was first: what that one generated
    is then read, and checked against the facts, by both."""
    try:
        draft.rename(folder)
    except OSError:
        if not (folder / MANIFEST).exists():
            raise
