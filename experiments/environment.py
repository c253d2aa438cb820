"""The environment of a measurement: hardware, versions, command, commit, date."""

import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch

from experiments.cli import ROOT

PACKAGES = (
    *("torch", "triton", "numpy", "flash-attn-4", "nvidia-cudnn-frontend", "flashinfer-python"),
    *("transformers", "local-attention", "routing-transformer", "sinkhorn-transformer"),
)


def environment(device: torch.device) -> dict:
    """The environment of a measurement, as values of JSON."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.executable).name, *without_folders(sys.orig_argv[1:])]),
        "git": git_state(),
        "device": device_name(device),
        "hardware": _hardware(device),
        "versions": _versions(),
    }


def without_folders(arguments: Iterable[str]) -> list[str]:
    """Arguments with paths that say nothing of the machine.

    A path in the working directory, the repository or the folder of temporary files is relative to
    it, so that the command can be read and repeated elsewhere.
    """
    folders = {str(folder) for folder in (Path.cwd(), ROOT, tempfile.gettempdir())} - {"/"}
    longest_first = sorted(map(re.escape, folders), key=len, reverse=True)
    # A path begins an argument, or follows a sign such as the = of an option.
    inside = re.compile(rf"(?<![\w./-])({'|'.join(longest_first)})(/+|(?![^:,;]))")
    return [inside.sub(lambda found: "" if found[2] else ".", each) for each in arguments]


def device_name(device: torch.device) -> str:
    """The product name of the device, such as "NVIDIA H200"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_model()


def git_state() -> dict:
    """(commit, whether tracked files differ from it); (None, None) outside of a repository.

    The repository of a parent folder does not count.
    """
    try:
        if Path(_git("rev-parse", "--show-toplevel")).resolve() == ROOT.resolve():
            dirty = bool(_git("status", "--porcelain", "--untracked-files=no"))
            return {"commit": _git("rev-parse", "HEAD"), "dirty": dirty}
    except (OSError, subprocess.CalledProcessError):
        pass
    return {"commit": None, "dirty": None}


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _hardware(device: torch.device) -> dict:
    affinity = getattr(os, "sched_getaffinity", None)  # not on every system
    host = {
        "cpu": _cpu_model(),
        "cores": len(affinity(0)) if affinity else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if device.type != "cuda":
        return host
    gpu = torch.cuda.get_device_properties(device)
    return host | {
        "gpu": gpu.name,
        "gpu_memory_bytes": gpu.total_memory,
        "multiprocessors": gpu.multi_processor_count,
        "capability": f"{gpu.major}.{gpu.minor}",
    }


def _versions() -> dict:
    packages = {}
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            packages[name] = metadata.version(name)
    return packages | {
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if torch.cuda.is_available() else None,
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
