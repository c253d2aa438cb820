"""Generated data on disk: memory-mapped arrays with a content hash; whole or not there."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import DTypeLike

from experiments.files import write_json

Arrays = dict[str, np.ndarray]
Allocate = Callable[[str, tuple[int, ...], DTypeLike], np.ndarray]
MANIFEST = "manifest.json"


def stored(folder: Path, facts: dict, generate: Callable[[Allocate], None]) -> Arrays:
    """The arrays of `folder`, memory-mapped; generated first where it does not exist.

    facts: what the arrays are generated from; generate(allocate): fills the arrays that
    allocate(name, shape, dtype) makes on disk. Raises ValueError for a folder that was generated
    from other facts, or whose arrays have not the size that its manifest says.
    """
    if not folder.exists():
        _write(folder, facts, generate)
    manifest = json.loads((folder / MANIFEST).read_text())
    if manifest["facts"] != json.loads(json.dumps(facts)):
        raise ValueError(f"{folder} holds {manifest['facts']}, not {facts}: move it away")
    arrays = {
        name: np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
        for name in manifest["sha256"]
    }
    for name, array in arrays.items():
        if list(array.shape) != manifest["shape"][name]:
            raise ValueError(
                f"{folder / name}.npy must be {manifest['shape'][name]}, got {array.shape}"
            )
    return arrays


def verify(folder: Path) -> None:
    """Raises ValueError naming the first array whose content hash is not that of the manifest."""
    for name, expected in json.loads((folder / MANIFEST).read_text())["sha256"].items():
        if content_hash(np.load(folder / f"{name}.npy", mmap_mode="r")) != expected:
            raise ValueError(f"{folder / name}.npy is not what was generated: delete {folder}")


def content_hash(array: np.ndarray) -> str:
    """SHA-256 of an array's values in C order."""
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()


def _write(folder: Path, facts: dict, generate: Callable[[Allocate], None]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    # A folder takes its name only when it is complete: an interrupted write leaves no whole one.
    draft = Path(mkdtemp(prefix=".unfinished-", dir=folder.parent))
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
