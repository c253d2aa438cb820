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


@pytest.mark.parametrize("kind", ["bytes", "tokens"])
def test_commands_name_what_exists(kind, tmp_path):
    python, log = tmp_path / "python", tmp_path / "log"
    python.write_text(f"#!/bin/bash\nprintf '%q ' \"$@\" >>{log}; echo >>{log}\n")
    python.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(
        ["bash", SCRIPT, "books", "540", kind], check=True, env=environment, cwd=tmp_path
    )
    commands = [shlex.split(line) for line in log.read_text().splitlines()]
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


def test_another_kind_of_tokens_is_refused(tmp_path):
    done = subprocess.run(["bash", SCRIPT, "books", "540", "words"], cwd=tmp_path, check=False)
    assert done.returncode
