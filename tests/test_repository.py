"""The whole repository: style, types, layers, packaging, where tests are, what CI runs."""

import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
README = ROOT / "README.md"
FLOORS = ("lra", "long-documents")  # whose records programs set beside what they measure


def run(*command: str | Path) -> str:
    """What a command prints, run at the root; when it fails, so does the test, with all of it."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"{shlex.join(map(str, command))}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(("ruff", "check", "--no-cache"), id="style"),
        pytest.param(("ruff", "format", "--check", "--no-cache"), id="format"),
        pytest.param(("lint-imports", "--no-cache"), id="layers"),
        pytest.param(
            ("basedpyright", "--pythonpath", sys.executable),
            id="types",
            marks=pytest.mark.slow(60),
        ),
    ],
)
def test_linter_has_nothing_to_say(command):
    run(BIN / command[0], *command[1:])


def test_pytest_collects_as_a_command():
    """As a module it collects these tests: the commands of CI are `python -m pytest`."""
    files = ("tests/sparseflash/test_attention.py", "tests/masks/test_block_mask.py")
    run(BIN / "pytest", "-q", "-n", "0", "--collect-only", *files)


# Test files that are about no one module, or about what a module is for.
ABOUT_NO_MODULE = {
    "experiments/language_model/test_runs.py",  # runs of the command line, from data to samples
    "experiments/lra/test_runs.py",  # scripts
    "experiments/test_landscape.py",  # a suite, through all its modules
    "masks/test_dynamic_mask.py",
    "masks/test_imports.py",
    "masks/test_scale.py",
    "sparseflash/backends/hopper/test_packed_heads.py",
    "sparseflash/backends/hopper/test_planted_bugs.py",
    "sparseflash/backends/hopper/test_simulated_kernels.py",
    "sparseflash/backends/triton/test_why_not.py",
    "sparseflash/backends/triton_common/test_repeated_launches.py",  # of both Triton backends
    "sparseflash/nn/test_parallel.py",
    "sparseflash/distributed/test_captured.py",  # of copies, in CUDA graphs
    "sparseflash/distributed/test_gpus.py",
    "sparseflash/distributed/test_memory.py",
    "sparseflash/distributed/test_refusals.py",
    "sparseflash/test_default_device.py",
    "sparseflash/test_dynamic_masks.py",
    "sparseflash/test_endurance.py",
    "sparseflash/test_flex.py",
    "sparseflash/test_import.py",
    "sparseflash/test_masks_of_key_heads.py",
    "sparseflash/test_max_logits.py",
    "sparseflash/test_sanitizer.py",
    "sparseflash/test_score_tensors.py",
    "sparseflash/test_value_dim.py",
}


def test_test_files_are_where_the_modules_are_that_they_test():
    files = {
        file.relative_to(ROOT / "tests")
        for package in ("masks", "sparseflash", "experiments")
        for file in (ROOT / "tests" / package).rglob("test_*.py")
    }
    astray = {str(file) for file in files if not is_named_after_a_module(file)}
    assert astray == ABOUT_NO_MODULE


def is_named_after_a_module(file: Path) -> bool:
    """Whether there is a module or package of this path, or the file is named after its folder."""
    name = file.stem.removeprefix("test_")
    module = ROOT / file.parent / name
    private = module.with_name(f"_{name}.py")
    found = (module.with_suffix(".py"), private, module / "__init__.py")
    return name == file.parent.name or any(path.exists() for path in found)


def test_every_folder_of_code_is_distributed():
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    roots = [
        name.removesuffix("*")
        for name in config["tool"]["setuptools"]["packages"]["find"]["include"]
    ]
    folders = {file.parent for root in roots for file in (ROOT / root).rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


def test_data_that_programs_read_is_distributed():
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    distributed = {
        path
        for package, patterns in config["tool"]["setuptools"]["package-data"].items()
        for pattern in patterns
        for path in ROOT.joinpath(*package.split(".")).glob(pattern)
    }
    settings = {*(ROOT / "experiments").rglob("*.yaml")}
    records = {ROOT / "experiments/results" / f"{name}-floors.json" for name in FLOORS}
    assert settings | records <= distributed


def test_ci_runs_the_test_command_of_the_readme_and_the_tests_of_records():
    """In one run: another would import and collect all of them again."""
    command = (ROOT / ".ci/run").read_text().splitlines()[-1]
    more = ' -m "not slow"'
    assert command.endswith(more)
    assert f"\n{command.removesuffix(more)}\n" in README.read_text()
    workflow = (ROOT / ".github/workflows/test.yml").read_text()
    assert '-m ""' in workflow  # every test
