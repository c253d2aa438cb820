"""`python -m masks` and `python -m sparseflash` import torch when a command runs, and no later."""

import subprocess
import sys
from pathlib import Path

import pytest

import masks
from masks._program import is_starting

ROOT = Path(masks.__file__).parents[1]
COMMANDS = [
    *("masks", "masks draw", "masks reach", "masks lint", "masks gallery", "masks diff"),
    *("sparseflash", "sparseflash selfcheck", "sparseflash profile", "sparseflash advise"),
    "sparseflash search",
]


def run(*arguments, folder: Path = ROOT) -> subprocess.CompletedProcess:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_imports_no_torch(command):
    done = run("-X", "importtime", "-m", *command.split(), "--help")
    assert "Usage: python -m " in done.stdout, done.stderr
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not imported & {"torch", "numpy", "scipy", "matplotlib"}


def test_a_command_has_all_of_the_package(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import masks\n"
        "assert masks.parse('full') == masks.full()\n"
        "near = masks.pattern(lambda q, k: q - k < 9) & masks.causal()\n"
    )
    done = run("-m", "masks", "mine.py:near", "--seq-len", 100, folder=tmp_path)
    assert "wrote mine_py_near" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("argv", "original", "starts"),
    [
        (["-m"], ["python", "-m", "masks"], True),
        (["-m", "full"], ["python", "-W", "error", "-m", "sparseflash", "full"], True),
        (["-m", "masks"], ["python", "-m", "pytest", "masks"], False),
        (["-m"], ["python", "-m", "experiments.bench"], False),
        (["masks.py"], ["python", "masks.py"], False),
        (["-c"], ["python", "-c", "import masks"], False),
        ([], [], False),
    ],
)
def test_other_programs_import_all_at_once(argv, original, starts, monkeypatch):
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", original)
    assert is_starting() == starts
