import sys

import pytest
from typer.testing import CliRunner

from experiments.language_model.books import build
from experiments.long_documents import floors
from experiments.long_documents.__main__ import app
from experiments.lra import seeds
from experiments.lra.command import ArenaCLI
from tests.experiments.long_documents.test_authors import short, write_authors  # noqa: F401


@pytest.fixture
def data(tmp_path):
    write_authors(tmp_path / "source")
    build(tmp_path / "source", tmp_path / "data" / "books")
    return tmp_path / "data"


def test_floors(data, tmp_path, monkeypatch):
    monkeypatch.setattr(floors, "PASSAGES", 5)
    monkeypatch.setattr(floors, "ITERATIONS", 2)
    path = tmp_path / "floors.json"
    given = ["floors", "--data-root", str(data), "--authors", "3", "--output", str(path)]
    assert "64 bytes: words" in CliRunner().invoke(app, [*given, "--length", "64"]).output
    assert path.exists()
    wrong = CliRunner().invoke(app, [*given[:-3], "9", *given[-2:]])
    assert (wrong.exit_code, "authors must be at most 3" in wrong.output) == (2, True)


@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
def test_training_has_the_options_of_the_arena_and_those_of_the_length(
    data, tmp_path, monkeypatch
):
    """What it runs is a command of the arena, which is parsed here and not run."""
    asked = []
    monkeypatch.setattr(seeds, "main", lambda given, **options: asked.append((given, options)))
    more = [
        "--seeds",
        "2",
        "--model.encoder.attention",
        "flash",
        "--authors=3",
        "--at-once=2",
    ]
    output = tmp_path / "runs"
    given = ["train", "128", "--data-root", str(data), "--output", str(output), *more]
    given += ["--tokens", "words"]
    assert CliRunner().invoke(app, given).exit_code == 0
    ((arguments, options),) = asked
    assert (options["seeds"], options["at_once"], options["output"]) == (2, 2, output / "128")
    monkeypatch.setattr(sys, "argv", ["experiments.lra", "fit", *arguments])
    monkeypatch.setattr(ArenaCLI, "_run_subcommand", lambda self, name: None)
    cli = ArenaCLI()
    assert (cli.datamodule.task.name, cli.datamodule.batch_size) == ("authors-128-words", 2048)
    assert cli.model.classifier.encoder.config.attention == "flash"
    assert (output / "128" / "data.json").exists()
    for options, message in (
        (["999999"], "length must be 1 to"),
        (["128", "--tokens", "letters"], "tokens must be bytes or words"),
    ):
        wrong = CliRunner().invoke(app, ["train", *options, "--data-root", str(data)])
        assert (wrong.exit_code, message in wrong.output) == (2, True)
