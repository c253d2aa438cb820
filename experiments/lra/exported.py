"""Exports trained runs to small files, with which another machine can resume them."""

import io
from pathlib import Path

from experiments.files import RESULT

# That a run takes for its last validation and its test, after the time for training is up.
EVALUATION_SECONDS = 40.0
# Parts of a checkpoint that is not resumed: the best one is only tested, or used as a start.
RESUMPTION_ONLY = ("optimizer_states", "lr_schedulers", "current_model_state", "averaging_state")


def contents(folder: Path, below: Path, resumable: bool) -> dict[str, bytes]:
    """The files of a run, by their path below another folder.

    Args:
        folder: Folder of the run.
        below: The folder into which pieces are unpacked.
        resumable: Whether the run can be resumed; else its last checkpoint is not exported.
    """
    reports = filter(Path.exists, (folder / name for name in ("curve.json", RESULT)))
    files = {path: path.read_bytes() for path in reports}
    best, last = (folder / "checkpoints" / f"{name}.ckpt" for name in ("best", "last"))
    if best.exists():
        files[best] = compact(best, resumable=False)
    if resumable and last.exists():
        files[last] = compact(last, resumable=True)
    return {str(path.relative_to(below)): content for path, content in files.items()}


def compact(path: Path, resumable: bool) -> bytes:
    """A checkpoint without unused parts: only its weights, if the run is not resumed from it."""
    import torch

    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    if not resumable:
        checkpoint = {k: v for k, v in checkpoint.items() if k not in RESUMPTION_ONLY}
    buffer = io.BytesIO()
    torch.save(checkpoint, buffer)
    return buffer.getvalue()
