"""The script of runs names presets and attentions that exist, and records what it trained."""

import os
import shlex
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from experiments.language_model.model import causal_pattern
from experiments.language_model.presets import PRESETS

SHORT = ("--short-context", "--short-steps")
SCRIPT = Path(__file__).parents[3] / "experiments/language_model/runs/contexts.sh"


def commands_of(folder: Path, *arguments: str) -> list[list[str]]:
    """The commands that the script runs, without running them."""
    python, log = folder / "python", folder / "log"
    python.write_text(f"#!/bin/bash\nprintf '%q ' \"$@\" >>{log}; echo >>{log}\n")
    python.chmod(0o755)
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}
    command = ["bash", SCRIPT, "books", "540", *arguments]
    subprocess.run(command, check=True, env=environment, cwd=folder)
    return [shlex.split(line) for line in log.read_text().splitlines()]


@pytest.mark.parametrize("kind", ["bytes", "tokens"])
def test_commands_name_what_exists(kind, tmp_path):
    commands = commands_of(tmp_path, kind)
    assert all(command[:2] == ["-m", "experiments.language_model"] for command in commands)
    trained = [command for command in commands if command[2] == "train"]
    for command in trained:
        chosen = PRESETS[command[3]]
        for option, value in pairwise(command):
            if option == "--attention":
                causal_pattern(value, chosen.heads, 128)
    assert {PRESETS[command[3]].context for command in trained} == {1024, 4096, 16384, 65536}
    outputs = [command[command.index("--output") + 1] for command in trained]
    suffix = "-tokens" * (kind == "tokens")
    assert commands[-1][2:] == ["record", f"25m-warm-up{suffix}", *outputs]
    assert [command[2] for command in commands if command[2] == "tokenize"] == ["tokenize"] * (
        kind == "tokens"
    )
    for command in trained:
        assert ("--data" in command) == (kind == "tokens")
        # Longer contexts begin with the shortest.
        short = [command[command.index(o) + 1] for o in SHORT if o in command]
        steps = "600" if kind == "tokens" else "2280"
        assert short == ([] if command[3] == "25m-1k" else ["1024", steps])
    # About as much text in both: a token is a byte, or some four of them.
    steps = {int(command[command.index("--steps") + 1]) for command in trained}
    assert steps == {1000 if kind == "tokens" else 3800}


def test_some_of_the_runs_are_trained_and_recorded(tmp_path):
    *_, dense, seed, record = commands_of(tmp_path, "bytes", "mid-16k-seed-1", "dense-4k")
    assert [command[3] for command in (dense, seed)] == ["25m-4k", "25m-16k"]
    assert seed[-2:] == ["--seed", "1"]
    folders = [f"runs/language-model/{name}" for name in ("dense-4k", "mid-16k-seed-1")]
    assert record[2:] == ["record", "25m-warm-up", *folders]
    command = ["bash", SCRIPT, "books", "540", "bytes", "dense"]
    done = subprocess.run(command, cwd=tmp_path, check=False, capture_output=True, text=True)
    assert done.returncode == 2
    assert "run must be one of dense-1k dense-4k dense-16k wide-16k" in done.stderr
    assert done.stderr.endswith("dense-64k, got dense\n")


def test_three_runs_of_a_larger_model(tmp_path):
    *trained, record = commands_of(tmp_path, "large")
    assert [command[3] for command in trained[1:]] == ["124m-1k", "124m-16k", "124m-16k"]
    for command in trained[1:]:
        attention = [value for option, value in pairwise(command) if option == "--attention"]
        for text in attention:
            causal_pattern(text, PRESETS[command[3]].heads, 128)
    names = ("dense-1k", "dense-16k", "mid-16k")
    folders = [f"runs/language-model-124m/{name}" for name in names]
    assert record[2:] == ["record", "124m-warm-up", *folders]


def test_another_kind_of_tokens_is_refused(tmp_path):
    done = subprocess.run(["bash", SCRIPT, "books", "540", "words"], cwd=tmp_path, check=False)
    assert done.returncode
