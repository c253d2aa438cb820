import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from sparseflash.__main__ import app
from sparseflash.advisor import choices

SIZE = ("--seq-len", "1024", "--heads", "2")


def invoke(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


def test_advise_lists_block_sizes(tmp_path):
    result = invoke("advise", "local(20)", *SIZE, "--plot", tmp_path / "sizes.svg", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert {choice["block_size"] for choice in found["choices"]} == {16, 32, 64, 128, 256, 512}
    assert (found["workload"]["device"], found["workload"]["dtype"]) == ("H200", "bfloat16")
    assert (tmp_path / "sizes.svg").exists()
    shown = invoke("advise", "local(20)", *SIZE, "--device", "A100", "--no-backward").output
    assert "local(20)" in shown
    assert "A100, forward, bfloat16: 1,024 tokens, batch 1, 2 heads, head dim 128" in shown
    assert "sorted by predicted time on A100" in shown
    assert "a lower bound. On an H200, measured calls took 1.2 to 2.0 times as long" in shown


def test_a_long_pattern_is_printed_whole_in_a_narrow_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    pattern = "(local(64) | butterfly() | strided(4, window=1) | global_tokens(16)) & causal()"
    line = r" *128 +[0-9.]+ +[0-9.]+% +[0-9.]+ +"
    for arguments in (("advise", pattern), ("search", "--layers", 3, "--pattern", pattern)):
        shown = invoke(*arguments, *SIZE, "--no-backward").output
        assert re.search(line + r"(100.0% +)?" + re.escape(pattern), shown), shown
        assert "measured ms" not in shown


@pytest.mark.parametrize(
    ("name", "predicted"), [("NVIDIA A100-SXM4-40GB", "A100"), ("L4", "H200")]
)
def test_times_are_predicted_for_the_gpu_of_this_machine(monkeypatch, name, predicted):
    gpu = SimpleNamespace(name=name, multi_processor_count=108)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    assert f"sorted by predicted time on {predicted}" in invoke("advise", "full", *SIZE).output
    found = json.loads(invoke("advise", "full", *SIZE, "--json").stdout)
    assert found["workload"]["device"] == predicted


def test_advise_says_that_a_rule_of_blocks_is_another_pattern_in_other_blocks():
    assert "Defined on blocks:" in invoke("advise", "butterfly()", *SIZE).output
    assert "Defined on blocks" not in invoke("advise", "local(20)", *SIZE).output


@pytest.mark.parametrize("command", [("advise", "full()"), ("search", "--layers", 1)])
def test_pictures_are_checked_before_any_work(command, monkeypatch):
    monkeypatch.setattr(choices.Workload, "mask", None)
    for path, message in (("x.doc", "must end in"), ("nowhere/x.png", "in a folder that exists")):
        result = invoke(*command, "--plot", path)
        assert result.exit_code == 2
        assert f"--plot must {message}".split()[-1] in result.output


def test_search_exits_with_1_where_nothing_is_found():
    result = invoke("search", "--layers", 3, *SIZE, "--most", 2, "--json")
    assert result.exit_code == 0, result.output
    assert [choice["connected"] for choice in json.loads(result.stdout)["choices"]] == [1, 1]
    shown = invoke("search", "--layers", 3, *SIZE, "--causal").output
    assert "2 heads, head dim 128, causal" in shown
    assert "100.0%" in shown
    nothing = invoke("search", "--layers", 1, *SIZE, "--budget-ms", 1e-9)
    assert (nothing.exit_code, nothing.stdout) == (
        1,
        "no pattern connects enough pairs within the budget\n",
    )


def test_search_finds_more_patterns_if_fewer_pairs_must_be_connected():
    given = ("search", "--layers", 1, *SIZE, "--pattern", "local(20)", "--pattern", "local(200)")
    assert invoke(*given).exit_code == 1
    found = invoke(*given, "--connected", 0.2, "--json")
    assert [choice["pattern"] for choice in json.loads(found.stdout)["choices"]] == ["local(200)"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("advise", "locl(3)"), "locl"),
        (("advise", "full", "--device", "H900"), "H900"),
        (("search", "--layers", 2, "--pattern", "x"), "'x'"),
    ],
)
def test_bad_input_is_named(arguments, named):
    result = invoke(*arguments, *SIZE)
    assert result.exit_code == 2
    assert named in " ".join(result.output.replace("│", " ").split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_measuring_needs_a_gpu_before_any_work(monkeypatch):
    monkeypatch.setattr(choices.Workload, "mask", None)
    for command in (("advise", "full()"), ("search", "--layers", 1)):
        result = invoke(*command, *SIZE, "--measure")
        assert result.exit_code == 2
        assert "CUDA" in result.output


def test_measured_choices_are_printed_in_their_order(monkeypatch):
    def measure(found, workload, progress):
        progress(1, 1)
        return [replace(choice, measured_ms=4.0) for choice in found]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(choices, "measure", measure)
    shown = invoke("advise", "local(20)", *SIZE, "--device", "H200", "--measure").output
    assert "4.000" in shown
    assert "sorted by measured time" in shown
    assert "bound" not in shown
