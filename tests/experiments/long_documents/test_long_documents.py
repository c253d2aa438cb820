import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from experiments.files import write_json
from experiments.language_model.books import Books, build
from experiments.long_documents import floors
from experiments.long_documents.__main__ import app
from experiments.long_documents.authors import by_author, identity
from experiments.lra import command, seeds
from experiments.lra.command import ArenaCLI
from tests.experiments.long_documents.test_authors import short, write_authors  # noqa: F401
from tests.helpers.lightning import TRAINS

pytestmark = TRAINS
TINY = """--model.encoder.dim=16 --model.encoder.heads=1 --model.encoder.layers=1
    --model.encoder.attention=flash --model.encoder.positions=learned --data.batch_size=2
    --data.workers=0 --model.optimizer.warmup_steps=0 --trainer.max_steps=1
    --trainer.val_check_interval=1 --trainer.limit_val_batches=1 --trainer.limit_test_batches=1
    --trainer.enable_progress_bar=false --trainer.accelerator=cpu --trainer.precision=32-true"""


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


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of how Lightning calls jsonargparse
@pytest.mark.filterwarnings("ignore:Starting from v1.9.0, `tensorboardX`")
def test_encoders_of_a_length_start_from_those_of_another(data, tmp_path, monkeypatch):
    def in_this_process(arguments, check):
        monkeypatch.setattr(sys, "argv", ["lra", *arguments[len(seeds.FIT) - 1 :]])
        command.main()

    errors = {"CalledProcessError": subprocess.CalledProcessError}
    monkeypatch.setattr(seeds, "subprocess", SimpleNamespace(run=in_this_process, **errors))
    monkeypatch.chdir(tmp_path)
    given = ["--data-root", str(data), "--authors=3", "--tokens=words", *TINY.split()]

    def train(length, start=None, *more, rate=0.0, seeds=2):
        more = [*more, f"--model.optimizer.learning_rate={rate}", f"--seeds={seeds}"]
        more += [] if start is None else ["--init-from", f"runs/authors-words/{start}"]
        found = CliRunner().invoke(app, ["train", str(length), *given, *more])
        assert found.exception is None, found.output
        return [
            json.loads((tmp_path / f"runs/authors-words/{length}/seed{n}/result.json").read_text())
            for n in range(seeds)
        ]

    def weights(length, seed):
        path = tmp_path / f"runs/authors-words/{length}/seed{seed}/checkpoints/best.ckpt"
        return torch.load(path, weights_only=True)["state_dict"]

    assert [run["init_from"] for run in train(64, rate=1e-2)] == [None, None]
    first = {"task": "authors-64-words", "labels": True, "steps": 1, "init_from": None}
    assert [run["init_from"] for run in train(128, 64)] == [first | {"seed": n} for n in (0, 1)]
    second = {"task": "authors-128-words", "labels": True, "steps": 1, "seed": 0}
    (run,) = train(256, 128, "--trainer.accumulate_grad_batches=2", seeds=1)
    assert (run["steps"], run["batch_size"], run["accumulate_grad_batches"]) == (1, 2, 2)
    assert run["init_from"] == second | {"init_from": first | {"seed": 0}}
    # Results of runs from other weights are not taken for those of this command.
    for length, start, from_random in ((64, 128, True), (128, 256, False)):
        more = ["--init-from", f"runs/authors-words/{start}", "--seeds=1"]
        found = CliRunner().invoke(app, ["train", str(length), *given, *more])
        shown = " ".join(found.output.replace("│", "").split())
        assert found.exit_code == 2
        assert "output must have no runs that started from other weights than" in shown
        assert ("seed0 started from None" in shown) == from_random
    train(128, 64)
    # Without learning, weights remain those of the start, with positions repeated.
    positions = "classifier.encoder.positions.learned.weight"
    for seed in (0, 1):
        start, longer = weights(64, seed), weights(128, seed)
        assert torch.equal(longer.pop(positions), start.pop(positions).repeat(2, 1))
        assert all(torch.equal(longer[name], value) for name, value in start.items())
    assert not torch.equal(weights(64, 0)[positions], weights(64, 1)[positions])


def test_a_start_without_weights_or_of_other_books_is_refused(data, tmp_path):
    given = ["train", "128", "--data-root", str(data), "--output", str(tmp_path / "runs")]
    start = tmp_path / "start" / "64"
    start.mkdir(parents=True)

    def error(*more):
        found = CliRunner().invoke(app, [*given, "--init-from", str(start), *more])
        assert found.exit_code == 2
        return " ".join(found.output.replace("│", "").split())

    assert "must be written by `experiments.long_documents train`, got no" in error("--authors=3")
    assert not (tmp_path / "runs").exists()
    (start / "data.json").write_text('{"authors": "others"}')
    assert "init_from must have runs on the same books, got" in error("--authors=3")
    books = Books.read(data / "books")
    write_json(start / "data.json", identity(books, by_author(books, 3)))
    (start / "seed0" / "checkpoints").mkdir(parents=True)
    (start / "seed0" / "checkpoints" / "best.ckpt").touch()
    assert "init_from must have weights of every seed, but" in error("--authors=3")
    write_json(start / "seed0" / "result.json", {"stuck": True})
    stuck = "init_from must have runs above chance, but seed0 was stuck"
    assert stuck in error("--authors=3", "--seeds=1")


def test_runs_on_other_books_are_not_overwritten(data, tmp_path):
    folder = tmp_path / "runs" / "128"
    write_json(folder / "data.json", {"authors": "others"})
    (folder / "seed0").mkdir()
    given = ["--data-root", str(data), "--output", str(tmp_path / "runs"), "--authors=3"]
    found = CliRunner().invoke(app, ["train", "128", *given])
    assert found.exit_code == 2
    shown = " ".join(found.output.replace("│", "").split())
    assert "output must have runs on the same books and authors, but" in shown
    assert json.loads((folder / "data.json").read_text()) == {"authors": "others"}
