"""The scripts of runs call commands that exist, with presets, stages and attentions that exist."""

import os
import shlex
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from experiments.attention import parse_attention
from experiments.lra import curriculum, page, presets
from experiments.packaged import PACKAGED

ROOT = Path(curriculum.__file__).parents[2]
SCRIPTS = sorted((ROOT / "experiments/lra/runs").glob("*.sh"))


def called(script: Path, folder: Path, *arguments: str) -> list[list[str]]:
    """What a script gives to python."""
    log, python = folder / "log", folder / "python"
    python.write_text(f"#!/bin/bash\nprintf '%q ' \"$@\" >>{log}; echo >>{log}\n")
    python.chmod(0o755)
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
                assert value in PACKAGED or parse_attention(value, 64)
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
    assert {run for row in page.ROWS for run in row.trained.values()} <= groups


TRAINING = ("experiments.lra.seeds", "experiments.lra.curriculum")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_further_arguments_reach_every_run(script, tmp_path):
    commands = called(script, tmp_path, "--data.workers", "0")
    runs = [command for command in commands if command[1] in TRAINING]
    assert runs or script.stem == "measurements"
    # Options of a script's own may come after them, but not this one.
    for run in runs:
        assert [value for option, value in pairwise(run) if option == "--data.workers"][-1] == "0"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_runs_of_pathfinder_have_the_images_of_the_records(script, tmp_path):
    option = "--data.task.init_args.resampling"
    for run in called(script, tmp_path):
        read = [value for name, value in pairwise(run) if name in ("--preset", "--config")]
        if any("/path" in value for value in read):
            assert [value for name, value in pairwise(run) if name == option][-1:] == ["clipped"]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_weights_are_those_of_a_run_before(script, tmp_path):
    """Of this script or of another: a folder of a seed or of a stage."""
    folders = {f"runs/{name}" for name in trained_folders(tmp_path / "all")}
    for command in called(script, tmp_path):
        for option, value in pairwise(command):
            if option == "--model.init_from":
                folder, file = value.split("/checkpoints/")
                assert file == "best.ckpt"
                assert folder in folders


def trained_folders(folder: Path) -> set[str]:
    """The folders that runs of all scripts have, below `runs`."""
    found = set()
    for number, script in enumerate(SCRIPTS):
        (folder / str(number)).mkdir(parents=True)
        for command in called(script, folder / str(number)):
            if command[1] not in TRAINING:
                continue
            output = command[command.index("--output") + 1].removeprefix("runs/")
            given = [value for option, value in pairwise(command) if option == "--stage"]
            stages = map(curriculum.Stage.parse, given or curriculum.STAGES)
            folders = [stage.folder(n) for n, stage in enumerate(stages)]
            if command[1].endswith("seeds"):
                folders = ["seed0", "seed{seed}"]
            found |= {f"{output}/{name}" for name in folders}
    return found
