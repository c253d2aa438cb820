import json
import subprocess

import torch

from experiments import environment as environment_module
from experiments.environment import environment, without_folders


def test_the_commit_of_a_folder_around_the_code_is_not_its_own(tmp_path, monkeypatch):
    assert set(environment_module.git_state()) == {"commit", "dirty"}
    inner = tmp_path / "export"
    inner.mkdir()
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], [*identity, "commit", "-q", "--allow-empty", "-m", "outer"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    monkeypatch.setattr(environment_module, "ROOT", tmp_path)
    assert environment_module.git_state()["commit"]
    monkeypatch.setattr(environment_module, "ROOT", inner)
    assert environment_module.git_state() == {"commit": None, "dirty": None}


def test_a_command_does_not_tell_where_the_machine_has_its_folders(tmp_path, monkeypatch):
    monkeypatch.setattr(environment_module, "ROOT", tmp_path / "tmp/copy")
    monkeypatch.setattr(environment_module.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    monkeypatch.chdir(tmp_path)
    told = {
        "{}/tmp/copy/experiments/bench.py": "experiments/bench.py",
        "{}/tmp/new/record.json": "new/record.json",
        "--output={}/tmp/new": "--output=new",
        "--output={}/tmp": "--output=.",
        "{}": ".",
        "{}/tmp/a.py:pattern; {}/b.py:pattern": "a.py:pattern; b.py:pattern",
        "{}-other/tmp": "{}-other/tmp",
        "/elsewhere{}/tmp/a": "/elsewhere{}/tmp/a",
        "local(1024) | butterfly()": "local(1024) | butterfly()",
    }
    given = [argument.replace("{}", str(tmp_path)) for argument in told]
    assert without_folders(given) == [name.replace("{}", str(tmp_path)) for name in told.values()]
    monkeypatch.setattr(environment_module.sys, "orig_argv", ["python", given[1]])
    assert environment(torch.device("cpu"))["command"].endswith(" new/record.json")


def test_environment_is_plain_and_complete():
    found = json.loads(json.dumps(environment(torch.device("cpu"))))
    assert set(found) == {"date", "command", "git", "device", "hardware", "versions"}
    assert found["device"]
    assert found["hardware"]["cores"] >= 1
    assert torch.__version__.startswith(found["versions"]["torch"])
    assert found["git"]["commit"] is None or len(found["git"]["commit"]) == 40
