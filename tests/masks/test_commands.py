import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from typer.testing import CliRunner

import masks
from masks.__main__ import app
from masks.analysis import pixel_reach

ROOT = Path(masks.__file__).parents[1]
COMMANDS = [
    *("masks", "masks draw", "masks reach", "masks lint", "masks gallery", "masks diff"),
    *("sparseflash", "sparseflash selfcheck", "sparseflash profile", "sparseflash advise"),
    "sparseflash search",
]


def test_help_imports_no_torch():
    """One process prints all, and says after which of them something is imported."""
    code = (
        "import runpy, sys\n"
        "from contextlib import suppress\n"
        f"for command in {COMMANDS!r}:\n"
        "    sys.argv = [*command.split(), '--help']\n"
        "    with suppress(SystemExit):\n"
        "        runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)\n"
        "    slow = {'torch', 'numpy', 'scipy', 'matplotlib'} & {*sys.modules}\n"
        "    assert not slow, (command, slow)\n"
    )
    program = [sys.executable, "-c", code]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for command in COMMANDS:
        assert f"Usage: python -m {command}" in done.stdout, done.stdout


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_no_arguments_print_the_help():
    assert invoke().output == invoke("--help").output


def test_reach_prints_layers_and_what_is_out_of_reach():
    result = invoke("reach", "butterfly", "--seq-len", 1024, "--block-size", 64)
    assert result.exit_code == 0, result.output
    assert "31.2500%" in result.output
    assert "layers until all pairs are connected 4" in " ".join(result.output.split())


def test_reach_as_json_has_views_of_tokens_and_pixels():
    arguments = ("--seq-len", 256, "--block-size", 16, "--layers", 3, "--image", "16,16")
    result = invoke("reach", "local(16)", "local(0)", *arguments, "--token", 100, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["added"] == [True, False, True]
    assert found["tokens"] == [{"token": 100, "seen": [33, 33, 65]}]
    assert found["pixels"]["up"] == [1, 1, 2]
    assert found["spectral_gap"][0] > 0
    assert found["spectral_gap"][1] is None  # causal


def test_reach_follows_random_keys_pixels_in_tiles_and_tokens():
    mask = masks.local(20)(256, 16)
    given = ("reach", "local(20)", "--seq-len", 256, "--block-size", 16, "--layers", 2)
    shown = " ".join(invoke(*given, "--samples", 32, "--token", 0).output.split())
    assert "followed 32 random keys, 95 % interval" in shown
    assert "token 0 sees [21, 41] tokens after each layer" in shown
    found = json.loads(invoke(*given, "--image", "16,16", "--tile", "4", "--json").stdout)
    tiled = pixel_reach(mask, (16, 16), 2, tile=(4, 4))
    assert found["pixels"] == {name: list(side) for name, side in asdict(tiled).items()}
    assert tiled != pixel_reach(mask, (16, 16), 2)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("buterfly",), "butterfly"),
        (("full", "--seq-len", "64,128"), "as many keys as queries"),
        (("full", "--seq-len", "x"), "--seq-len"),
        (("full", "--seq-len", "0"), "seq_len must be at least 1 token, got 0 "),
        (("full", "--seq-len", "3,0"), "seq_len must be at least 1 token, got (3, 0)"),
        (("full", "--block-size", "17"), "(16, 32, 64, 128, 256, 512), got 17 "),
        (("full", "--image", "3,3"), "pixels"),
        (("full", "--token", "5000"), "tokens"),
    ],
)
def test_bad_input_of_reach_is_named(arguments, named):
    result = invoke("reach", *arguments)
    assert result.exit_code == 2
    assert named in " ".join(result.output.replace("│", " ").split())


def test_lint_exits_with_1_where_it_finds_something():
    clean = invoke("lint", "butterfly", "--within", "full", "--layers", 6)
    assert (clean.exit_code, clean.stdout) == (0, "nothing found\n")
    leak = invoke("lint", "butterfly", "--within", "causal()")
    assert leak.exit_code == 1
    assert leak.stdout.startswith("leaks (layer 0): ")
    assert invoke("lint", "butterfly", "--within", "causal()", "--ignore", "leaks").exit_code == 0


def test_lint_as_json_has_layers_and_heads():
    result = invoke("lint", "local(0)", "butterfly", "--json")
    findings = json.loads(result.stdout)
    assert [f["rule"] for f in findings] == ["useless-pairs", "dead-layers"]
    assert findings[0]["layers"] == findings[1]["layers"] == [0]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(("full", "--within", "cusal"), "cusal"), (("full", "--ignore", "x"), "empty-queries")],
)
def test_bad_input_of_lint_is_named(arguments, named):
    result = invoke("lint", *arguments)
    assert result.exit_code == 2
    assert named in " ".join(result.output.replace("│", " ").split())


def test_gallery_of_a_module(tmp_path):
    module = tmp_path / "own.py"
    module.write_text("import masks\nnear = masks.local(8)\n")
    result = invoke(
        *("gallery", "--only", "--module", module, "--seq-len", 128, "--output", tmp_path / "page")
    )
    assert result.exit_code == 0, result.output
    assert {p.name for p in (tmp_path / "page").iterdir()} == {
        "index.html",
        "near.png",
        "near.svg",
    }
    page = ("--output", tmp_path / "page", "--json")
    result = invoke("gallery", "--only", "--module", module, "--seq-len", 128, *page)
    found = json.loads(result.stdout)
    assert found["page"] == str(tmp_path / "page/index.html")
    (pattern,) = found["patterns"]
    assert (pattern["title"], pattern["pattern"]) == ("near", "local(8)")
    assert pattern["pictures"] == ["near.png", "near.svg"]
    assert pattern["figures"]["sequence length"] == "128 x 128"


def test_figures_of_a_drawn_pattern_as_json(tmp_path):
    path = tmp_path / "local.png"
    result = invoke("local(8)", "--seq-len", 512, "--output", path, "--json")
    found = json.loads(result.stdout)
    assert found["picture"] == str(path)
    assert path.exists()
    assert found["figures"]["sequence length"] == "512 x 512"
    assert "darker" in invoke("local(8)", "--seq-len", 512, "--output", path).output


@pytest.mark.parametrize("arguments", [["gallery", "--module", "{}"], ["draw", "{}:mine"]])
def test_a_file_that_is_no_python_is_one_sentence(arguments, tmp_path):
    broken = tmp_path / "broken.py"
    broken.write_text("near = masks.local(8\n")
    result = invoke(*(argument.format(broken) for argument in arguments))
    assert result.exit_code == 2
    output = "".join(result.output.replace("│", " ").split())
    assert "broken.pyisnotvalidPython:'('wasneverclosed(broken.py,line1)" in output


def test_diff_prints_pairs_and_draws(tmp_path):
    size = ("--seq-len", 64, "--block-size", 16)
    path = tmp_path / "difference.svg"
    result = invoke("diff", "full", "causal", *size, "--json", "--output", path)
    found = json.loads(result.stdout)
    assert (found["both"], found["only_a"], found["only_b"]) == (2080, 2016, 0)
    assert path.read_text().startswith("<?xml")
    printed = invoke("diff", "full", "causal", *size, "--output", path).output
    assert "2,016" in printed
    assert "wrote" in printed


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("gallery", "--module", "nothing.py"), "nothing.py"),
        (("diff", "full", "ful"), "ful"),
        (("diff", "full", "causal", "--output", "x.pdf"), ".svg"),
        (("diff", "full", "causal", "--output", "no/folder/x.png"), "--output"),
    ],
)
def test_bad_input_of_gallery_and_diff_is_named(arguments, named):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert named in " ".join(result.output.replace("│", " ").split())


def test_a_gallery_that_cannot_be_written_is_one_sentence(tmp_path):
    module = tmp_path / "own.py"
    module.write_text("import masks\nx = masks.full()")
    size = ("--seq-len", 64, "--block-size", 16)
    result = invoke("gallery", "--module", module, "--only", *size, "--output", module / "x")
    assert result.exit_code == 2
    assert "--output: [Errno" in result.output
