import json

import pytest
from typer.testing import CliRunner

from sparseflash.__main__ import app
from sparseflash.gap import CHANGES

SIZE = ("--seq-len", "256", "--heads", "2", "--head-dim", "16", "--device", "cpu")


def invoke(*arguments):
    return CliRunner().invoke(app, ["explain", *map(str, arguments)])


def test_a_call_is_explained_and_its_gap_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr("sparseflash._explain.SECONDS", 0.0)
    picture = tmp_path / "gap.svg"
    result = invoke("local(20)", *SIZE, "--block-size", 32, "--measure", "--plot", picture)
    assert result.exit_code == 0, result.output
    assert "torch.float32 on cpu, block size (32, 32)" in result.stdout
    assert "measured (rested, in short turns with pauses): forward" in result.stdout
    assert f"wrote {picture}" in result.stdout
    drawn = picture.read_text()
    for text in (
        *CHANGES,
        "forward:",
        "backward:",
        "part of the gap (ms)",
        "2 heads, head dim 16, cpu",
    ):
        assert text in drawn


def test_json_has_all_values_and_the_part_that_costs_most(monkeypatch):
    monkeypatch.setattr("sparseflash._explain.SECONDS", 0.0)
    found = json.loads(invoke("local(20)", *SIZE, "--measure", "--json").stdout)
    gap = found["forward_gap"]
    assert gap["parts"].keys() == gap["noise"].keys() == CHANGES.keys()
    assert gap["largest"] in (None, *CHANGES)
    assert gap["ideal"] + sum(gap["parts"].values()) == pytest.approx(gap["measured"])
    assert found["measured"]["forward"] == gap["measured"]
    assert found["sustained"] is None
    unmeasured = json.loads(invoke("full()", *SIZE, "--json").stdout)
    assert (unmeasured["backend"], unmeasured["measured"]) == ("cpu", None)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("locl(3)",), "locl"),
        (("full", "--block-size", 17), "got 17"),
        (("full", "--plot", "x.png"), "--plot needs --measure"),
        (("full", "--measure", "--plot", "x.doc"), "--plot must end in"),
        (("full", "--dtype", "float8"), "float8"),
        (("full", "--device", "tpu"), "tpu"),
    ],
)
def test_bad_input_is_named_before_any_work(arguments, named, monkeypatch):
    monkeypatch.setattr("sparseflash._explain.explain", None)
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert named in " ".join(result.output.replace("│", " ").split())
