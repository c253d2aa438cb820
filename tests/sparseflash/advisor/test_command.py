import json

import pytest
import torch
from typer.testing import CliRunner

from sparseflash.__main__ import app

SIZE = ("--seq-len", "1024", "--heads", "2")


def invoke(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


def test_advise_lists_block_sizes(tmp_path):
    result = invoke("advise", "local(20)", *SIZE, "--plot", tmp_path / "sizes.svg", "--json")
    assert result.exit_code == 0, result.output
    assert {choice["block_size"] for choice in json.loads(result.stdout)} == {16, 32, 64, 128, 256}
    assert (tmp_path / "sizes.svg").exists()
    assert "local(20)" in invoke("advise", "local(20)", *SIZE).output


def test_search_exits_with_1_where_nothing_is_found():
    result = invoke("search", "--layers", 3, *SIZE, "--most", 2, "--json")
    assert result.exit_code == 0, result.output
    assert [choice["connected"] for choice in json.loads(result.stdout)] == [1, 1]
    assert "100.0%" in invoke("search", "--layers", 3, *SIZE).output
    nothing = invoke("search", "--layers", 1, *SIZE, "--budget-ms", "1e-9")
    assert nothing.exit_code == 1
    assert "no pattern" in nothing.output


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
def test_measuring_needs_a_gpu():
    result = invoke("advise", "full", *SIZE, "--measure")
    assert result.exit_code == 2
    assert "CUDA" in result.output
