"""Data on disk with hashes: folders of generated arrays, and folders of files that were built.

A folder of arrays gets its name when it is complete, so that an interrupted process leaves none.
"""

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
# Allocates an array by name, shape and dtype.
Allocate = Callable[[str, tuple[int, ...], DTypeLike], np.ndarray]
MANIFEST = "manifest.json"
HASHES = "sha256.json"
UNFINISHED = ".unfinished-"  # with which the name of a draft begins
ABANDONED = 24 * 3600  # seconds after which the process that wrote a draft is taken to have ended


def stored(folder: Path, facts: dict, generate: Callable[[Allocate], None]) -> Arrays:
    """The memory-mapped arrays of a folder, which are generated if it does not exist.

    Args:
        folder: The folder.
        facts: What the arrays depend on, as JSON.
        generate: Called with `allocate`; fills the arrays that allocate(name, shape, dtype)
            returns.

    Raises:
        ValueError: The folder was generated from other facts, or a file of it has changed; the
            message names it.
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
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}; delete {folder}") from error
    return manifest


def _loaded(folder: Path, name: str) -> np.ndarray:
    path = folder / f"{name}.npy"
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{path} cannot be read: {error}; delete {folder}") from error


def write_hashes(folder: Path, patterns: Sequence[str]) -> None:
    """Writes HASHES, with which `check_hashes` compares the files of a folder.

    Args:
        folder: The complete folder.
        patterns: Glob patterns of the files that loaders read.
    """
    hashes = {str(path.relative_to(folder)): _sha256(path) for path in _matching(folder, patterns)}
    write_json(folder / HASHES, {"patterns": list(patterns), "sha256": hashes})


def check_hashes(folder: Path, build: str) -> None:
    """Checks that the files of a folder are those that were built.

    A folder without HASHES was not built by this package and is not checked.

    Args:
        folder: The folder.
        build: The arguments of `python -m experiments.lra.data` that build it, for the message.

    Raises:
        ValueError: A file is missing, new or changed; the message names it.
    """
    if not (folder / HASHES).exists():
        return
    rebuild = f"move {folder} away and build it with python -m experiments.lra.data {build}"
    try:
        facts = json.loads((folder / HASHES).read_text())
        patterns, known = facts["patterns"], facts["sha256"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{folder / HASHES} cannot be read: {error}; {rebuild}") from error
    files = _matching(folder, patterns)
    names = {str(path.relative_to(folder)) for path in files}
    for what, which in (("is missing", known.keys() - names), ("is new", names - known.keys())):
        if which:
            raise ValueError(f"{folder / min(which)} {what} since it was built; {rebuild}")

    def verify_files() -> None:
        for path in files:
            if _sha256(path) != known[str(path.relative_to(folder))]:
                raise ValueError(f"{path} is not what was built; {rebuild}")

    _once(folder, files, verify_files)


def _matching(folder: Path, patterns: Sequence[str]) -> list[Path]:
    return sorted(path for pattern in patterns for path in folder.glob(pattern))


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# Folders that this process has verified, with (path, size, time) of their files.
_verified: dict[Path, list[tuple]] = {}


def _once(folder: Path, files: Sequence[Path], verify: Callable[[], None]) -> None:
    """Verifies a folder, unless this process has done so and its files are unchanged since."""
    state = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    if _verified.get(folder) != state:
        verify()
        _verified[folder] = state


def verify(folder: Path) -> None:
    """Checks the content hash of every array of a folder.

    Raises:
        ValueError: An array has changed since it was generated; the message names it.
    """
    for name, expected in _manifest(folder)["sha256"].items():
        if content_hash(_loaded(folder, name)) != expected:
            raise ValueError(f"{folder / name}.npy is not what was generated: delete {folder}")


def content_hash(array: np.ndarray) -> str:
    """The SHA-256 of the values of an array in C order."""
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()


def _write(folder: Path, facts: dict, generate: Callable[[Allocate], None]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    for path in folder.parent.glob(f"{UNFINISHED}*"):
        if time.time() - path.stat().st_mtime > ABANDONED:
            shutil.rmtree(path, ignore_errors=True)
    draft = Path(mkdtemp(prefix=UNFINISHED, dir=folder.parent))
    arrays: Arrays = {}

    def allocate(name: str, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
        path = draft / f"{name}.npy"
        arrays[name] = open_memmap(path, "w+", np.dtype(dtype), shape)
        _reserve(path, folder)
        return arrays[name]

    try:
        generate(allocate)
        manifest = {
            "facts": facts,
            "shape": {name: list(array.shape) for name, array in arrays.items()},
            "sha256": {name: content_hash(array) for name, array in arrays.items()},
        }
        write_json(draft / MANIFEST, manifest)
        _publish(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _reserve(path: Path, folder: Path) -> None:
    """Allocates the disk space of a sparse file.

    Otherwise a write to its memory map would end the process by SIGBUS if the disk is full.

    Raises:
        OSError: The disk is full; the message has the bytes that are needed.
    """
    size = path.stat().st_size
    try:
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, size)
    except OSError as error:
        needed = f"{path.name} of {folder} needs {size:,} bytes"
        raise OSError(error.errno, f"{error.strerror}: {needed}") from error


def _publish(draft: Path, folder: Path) -> None:
    """Renames a complete draft, unless another process has generated the folder meanwhile.

    Then both processes read that folder, and check that it has their facts.
    """
    try:
        draft.rename(folder)
    except OSError:
        if not (folder / MANIFEST).exists():
            raise
