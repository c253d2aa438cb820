"""The scripts of runs call commands that exist, with presets, stages and attentions that exist."""

import os
import shlex
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from experiments.attention import parse_attention
from experiments.lra import curriculum, page, presets

ROOT = Path(curriculum.__file__).parents[2]
SCRIPTS = sorted((ROOT / "experiments/lra/runs").glob("*.sh"))


def called(script: Path, folder: Path, *arguments: str) -> list[list[str]]:
    """What a script gives to python, where every checkpoint is found."""
    log = folder / "log"
    for name, body in {
        "python": f"printf '%q ' \"$@\" >>{log}; echo >>{log}",
        "find": "echo best.ckpt",
    }.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}
    subprocess.run(["bash", script, *arguments], check=True, env=environment)
    return [shlex.split(line) for line in log.read_text().splitlines()]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_commands_name_what_exists(script, tmp_path):
    for command in called(script, tmp_path):
        assert command[0] == "-m"
        module = ROOT / command[1].replace(".", "/")
        assert module.exists() or module.with_suffix(".py").exists()
        for option, value in pairwise(command):
            if option == "--preset":
                assert value in presets.names()
            elif option == "--stage":
                curriculum.Stage.parse(value)
            elif option == "--model.encoder.attention":
                parse_attention(value, 64)
            elif option == "--config" and value.startswith("experiments"):
                assert (ROOT / value).exists()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_records_are_of_folders_that_were_trained(script, tmp_path):
    commands = called(script, tmp_path)
    texts = [" ".join(command) for command in commands]
    for number, command in enumerate(commands):
        if command[1].endswith(".results"):
            for folder in command[3:]:
                assert any(f"{folder}/" in f"{text} ".replace(" ", "/") for text in texts[:number])


def test_rows_of_the_page_are_groups_of_the_scripts(tmp_path):
    groups = set()
    for number, script in enumerate(SCRIPTS):
        folder = tmp_path / str(number)
        folder.mkdir()
        for command in called(script, folder):
            if command[1].endswith(".results"):
                groups |= {(command[2], Path(group).name) for group in command[3:]}
    assert {(row.record, row.group) for row in page.TRAINED} <= groups


def test_further_arguments_reach_every_run(tmp_path):
    (script,) = (path for path in SCRIPTS if path.stem == "text")
    *runs, _ = called(script, tmp_path, "--trainer.max_steps", "2")
    assert len(runs) == 2
    assert all(run[-2:] == ["--trainer.max_steps", "2"] for run in runs)
