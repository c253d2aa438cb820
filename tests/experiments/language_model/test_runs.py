"""The script of runs names presets and attentions that exist, and records what it trained."""

import os
import shlex
import subprocess
from itertools import pairwise
from pathlib import Path

from experiments.language_model.model import causal_pattern
from experiments.language_model.presets import PRESETS

SCRIPT = Path(__file__).parents[3] / "experiments/language_model/runs/contexts.sh"


def test_commands_name_what_exists(tmp_path):
    python, log = tmp_path / "python", tmp_path / "log"
    python.write_text(f"#!/bin/bash\nprintf '%q ' \"$@\" >>{log}; echo >>{log}\n")
    python.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["bash", SCRIPT, "books"], check=True, env=environment, cwd=tmp_path)
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
    assert commands[-1][2:] == ["record", "25m-contexts", *outputs]
