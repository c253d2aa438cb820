"""What the command lines share: quick help, and results beside the shipped records."""

import subprocess
import sys
from importlib import import_module

import pytest
import torch
import typer
from typer.testing import CliRunner

from experiments import cli

FOLDERS = ("masks", "sparseflash", "experiments")
SLOW = {"torch", "numba", "lightning", "scipy", "matplotlib"}
PROGRAMS = (
    *("bench", "speedup", "report"),
    *("instruments.counters", "instruments.power", "instruments.host_time"),
    "instruments.first_call",
    *(
        "instruments.lab",
        "instruments.tune",
        "io_complexity",
        "language_model.__main__",
        "long_context.scaling",
        "long_context.train",
    ),
    *("long_documents.__main__", "lra.floors", "lra.results", "lra.seeds", "lra.speed"),
    "pretraining",
)


def programs() -> list[str]:
    """All that `python -m` runs."""
    files = (path for folder in FOLDERS for path in (cli.ROOT / folder).rglob("*.py"))
    runs = (path for path in files if '\nif __name__ == "__main__":' in path.read_text())
    names = (".".join(path.relative_to(cli.ROOT).with_suffix("").parts) for path in runs)
    return sorted(name.removesuffix(".__main__") for name in names)


def test_help_needs_no_torch():
    """It takes seconds to import. In one process: the first program that imports it is named."""
    code = f"""
import runpy, sys
sys.argv[1:] = ["--help"]
for program in {programs()}:
    try:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit:
        pass
    if slow := {SLOW} & sys.modules.keys():
        sys.exit(f"{{program}} imports {{slow}}")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("--help") >= len(programs())


def test_records_that_the_package_ships_are_replaced_on_demand_alone(tmp_path):
    for folder in (cli.SHIPPED, cli.SHIPPED.parent, cli.SHIPPED / "new"):
        with pytest.raises(typer.BadParameter, match="--overwrite to replace them"):
            cli.output_file(folder, "speedup", "cpu", overwrite=False)
    assert cli.output_file(cli.SHIPPED, "speedup", "cpu", True) == cli.SHIPPED / "speedup-cpu.json"
    path = cli.output_file(tmp_path / "a" / "b", "speedup", "cpu", overwrite=False)
    assert path.parent.is_dir()


def test_results_go_into_the_current_folder_by_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = cli.output_file(cli.RESULTS, "speedup", "cpu", overwrite=False)
    assert path.resolve() == tmp_path / "results/speedup-cpu.json"


def app_of(program: str) -> typer.Typer:
    module = import_module(f"experiments.{program}")
    if hasattr(module, "app"):
        return module.app
    app = typer.Typer()
    app.command()(module.main)
    return app


@pytest.mark.parametrize(
    ("program", "arguments", "output"),
    [
        ("bench", ["speedup"], cli.SHIPPED),
        ("io_complexity", [], cli.SHIPPED),
        ("long_documents.__main__", ["floors"], cli.SHIPPED / "long-documents-floors.json"),
        ("long_context.train", [], cli.SHIPPED),
        ("lra.results", ["image", "."], cli.SHIPPED),
        ("lra.speed", [], cli.SHIPPED),
        ("lra.floors", [], cli.SHIPPED / "lra-floors.json"),
    ],
)
def test_no_program_writes_into_the_package(program, arguments, output):
    done = CliRunner().invoke(app_of(program), [*arguments, "--output", str(output)])
    assert done.exit_code == 2
    assert "is a folder of the package" in " ".join(done.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        ("language_model.__main__", ["record", "a/b", "."]),
        ("long_documents.__main__", ["record", "a/b", "."]),
        ("lra.results", ["a/b", "."]),
    ],
)
def test_a_record_has_a_name_that_a_file_may_have(program, arguments):
    done = CliRunner().invoke(app_of(program), arguments)
    assert done.exit_code == 2
    assert "must be small letters, digits and hyphens" in " ".join(done.output.split())
    assert "'a/b'" in done.output


@pytest.mark.parametrize("program", PROGRAMS)
def test_nothing_goes_into_the_package_by_default(program):
    command = typer.main.get_command(app_of(program))
    commands = (command, *getattr(command, "commands", {}).values())
    outputs = [p for each in commands for p in each.params if "--output" in p.opts]
    assert outputs
    for output in outputs:
        if output.default is not None:
            assert not (cli.ROOT / str(output.default)).is_relative_to(cli.SHIPPED.parent)


@pytest.mark.parametrize("there", [False, True])
def test_a_folder_that_is_not_completed_leaves_nothing(there, tmp_path):
    root = tmp_path / "data" / "more"
    if there:
        root.parent.mkdir()
    with pytest.raises(FileNotFoundError), cli.building(root, "books") as draft:
        (draft / "no folder" / "file").touch()
    assert list(tmp_path.rglob("*")) == [root.parent] * there
    with cli.building(root, "books") as draft:
        draft.mkdir()
    assert (root / "books").is_dir()


def test_a_missing_extra_is_named_with_the_command_that_installs_it(monkeypatch):
    cli.needs_extra("lra", "typer")
    monkeypatch.setattr(cli, "find_spec", lambda name: None)
    with pytest.raises(typer.BadParameter, match=r"needs lightning: pip install -e '\.\[lra\]'"):
        cli.needs_extra("lra", "lightning")


@pytest.mark.parametrize("number", [1, 2])
def test_the_precision_of_products_that_a_command_sets_ends_with_its_test(number):
    assert torch.get_float32_matmul_precision() == "highest"
    torch.set_float32_matmul_precision("high")
