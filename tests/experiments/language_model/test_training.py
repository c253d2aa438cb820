import subprocess
import sys
from dataclasses import asdict, replace
from math import log
from time import time

import lightning as L
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from experiments.language_model import training
from experiments.language_model.__main__ import app
from experiments.language_model.books import SPLITS, Books
from experiments.language_model.model import LanguageModel
from experiments.language_model.settings import ModelConfig, Settings
from experiments.language_model.training import (
    CHECKPOINT,
    BookData,
    Learner,
    Sequences,
    load,
    octaves,
    train,
)
from tests.experiments.language_model.test_books import write_books
from tests.helpers import threads
from tests.helpers.lightning import TRAINS

pytestmark = TRAINS
TINY = ModelConfig(2, 32, 2, context=64, attention=("local(16)",), block_size=16, dropout=0.1)


def books_of():
    """The alphabet over and over: every byte but the first of a sequence can be known."""
    content = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz" * 40, np.uint8)
    return Books(dict.fromkeys(SPLITS, content), {"train": "t", "validation": "v"})


def settings_of(**options):
    common = {"steps": 12, "step_tokens": 256, "learning_rate": 1e-2, "warmup_steps": 2, "seed": 0}
    return Settings(**{"model": TINY, "data": {}, "precision": "32-true"} | common | options)


def run(folder, settings, **options):
    return train(settings, books_of(), folder, **{"progress": False, "every": 4} | options)


def weights_of(folder):
    return load(folder / CHECKPOINT).state_dict()


def test_a_run_learns_and_says_what_it_did(tmp_path):
    result = run(tmp_path, settings_of(steps=60, model=replace(TINY, dropout=0.0)), every=20)
    curve = [point["bits_per_byte"] for point in result["curve"]]
    assert [point["step"] for point in result["curve"]] == [20, 40, 60]
    assert curve[-1] == result["bits_per_byte"] < 1.0 < curve[0]
    by_position = result["curve"][-1]["by_position"]
    assert by_position[0] > 3  # nothing comes before it: log2(26) = 4.7 at best
    assert by_position[-1] < 0.5
    state = torch.load(tmp_path / CHECKPOINT, weights_only=True)["callbacks"]["Curve"]
    assert state["timed"][64][0] == 60 - training.UNTIMED
    assert result["bytes_per_second"] > 0 == result["short_bytes_per_second"]
    assert result["ended"]
    # Of the same bytes.
    assert result["test_bits_per_byte"] == pytest.approx(result["bits_per_byte"], rel=1e-5)


@pytest.mark.parametrize("given", [{}, {"short_context": 32, "short_steps": 6}])
def test_validations_and_checkpoints_are_no_time_of_steps(tmp_path, monkeypatch, given):
    """A step takes a second, a batch of validation 50 and a checkpoint 1,000."""
    clock = [0.0]

    def takes(seconds, method):
        def longer(*arguments, **options):
            result = method(*arguments, **options)
            clock[0] += seconds  # a checkpoint asks for the state first, and is written after that
            return result

        return longer

    monkeypatch.setattr(training, "now", lambda: clock[0])
    parts = ((Learner, "training_step", 1.0), (Learner, "validation_step", 50.0))
    for owner, name, seconds in (*parts, (L.Trainer, "save_checkpoint", 1000.0)):
        monkeypatch.setattr(owner, name, takes(seconds, getattr(owner, name)))
    result = run(tmp_path, settings_of(steps=13, **given), every=2)
    assert clock[0] > 7000
    speeds = [result[name] for name in ("bytes_per_second", "short_bytes_per_second")]
    assert speeds == [result["step_bytes"], result["step_bytes"] * bool(given)]


def test_the_progress_bar_shows_what_is_trained(tmp_path, capsys):
    run(tmp_path, settings_of(steps=21), every=21, progress=True)
    assert "train/bits_per_byte=" in "".join(capsys.readouterr())


SHORT = {"short_context": 32, "short_steps": 6}


@pytest.mark.parametrize(
    ("stop", "pieces", "given"),
    [
        (6, False, {}),
        (4, False, {}),
        (6, True, {}),
        (4, False, SHORT),
        (6, True, SHORT),
        (7, False, SHORT),
    ],
)
def test_a_run_that_was_stopped_goes_on_to_the_same_bits(
    tmp_path, monkeypatch, stop, pieces, given
):
    whole, parts, other = tmp_path / "whole", tmp_path / "parts", tmp_path / "other"
    expected = run(whole, settings_of(**given))
    monkeypatch.setattr(training.Deadline, "__init__", stops_at(stop))
    first = run(parts, settings_of(**given), export_to=tmp_path / "pieces")
    monkeypatch.undo()
    assert (first["trained"], first["ended"]) == (stop, False)
    folder, options = (other, {"resume": tmp_path / "pieces"}) if pieces else (parts, {})
    result = run(folder, settings_of(**given), **options)
    # A run is also validated where its time ends.
    assert [p for p in result["curve"] if p["step"] % 4 == 0] == expected["curve"]
    wanted = weights_of(whole)
    assert all(torch.equal(w, wanted[name]) for name, w in weights_of(folder).items())


def stops_at(step):
    """Deadline.__init__ whose time is over at this step."""

    def init(self, at=None, every=10):
        self.at, self.every = 0.0, step

    return init


@pytest.mark.parametrize(("moved", "speed"), [(False, 1.2), (True, 1.0)])
def test_a_run_that_goes_on_on_another_device_has_the_speed_of_this_one(
    tmp_path, monkeypatch, moved, speed
):
    """Eight steps of half a second, then eleven of a second; five of each are not timed."""
    clock, took = [0.0], [0.5]
    step = Learner.training_step

    def timed(self, batch, batch_idx):
        clock[0] += took[0]
        return step(self, batch, batch_idx)

    monkeypatch.setattr(Learner, "training_step", timed)
    monkeypatch.setattr(training, "now", lambda: clock[0])
    monkeypatch.setattr(training, "device_name", lambda device: "one")
    deadline = training.Deadline.__init__
    monkeypatch.setattr(training.Deadline, "__init__", stops_at(8))
    run(tmp_path, settings_of(steps=19))
    monkeypatch.setattr(training.Deadline, "__init__", deadline)
    monkeypatch.setattr(training, "device_name", lambda device: "other" if moved else "one")
    took[0] = 1.0
    result = run(tmp_path, settings_of(steps=19))
    assert result["bytes_per_second"] == pytest.approx(speed * result["step_bytes"])


def test_a_run_that_was_killed_goes_on_to_the_same_bits(tmp_path, monkeypatch):
    expected = run(tmp_path / "whole", settings_of())
    step = Learner.training_step

    def killed(self, batch, batch_idx):
        if self.trainer.global_step == 5:
            raise SystemExit
        return step(self, batch, batch_idx)

    monkeypatch.setattr(Learner, "training_step", killed)
    with pytest.raises(SystemExit):
        run(tmp_path / "parts", settings_of())
    monkeypatch.undo()
    assert run(tmp_path / "parts", settings_of())["curve"] == expected["curve"]


def test_time_ends_a_run(tmp_path):
    begin = time()
    result = run(tmp_path, settings_of(steps=100_000), seconds=training.EVALUATION_SECONDS + 1)
    assert 0 < result["trained"] < 100_000
    assert (result["trained"] % 10, time() - begin < 15) == (0, True)
    assert (tmp_path / CHECKPOINT).exists()


def test_other_settings_do_not_go_on(tmp_path):
    run(tmp_path, settings_of(steps=2))
    with pytest.raises(ValueError, match="other settings: seed 0, not 1"):
        run(tmp_path, settings_of(steps=2, seed=1))


def test_steps_read_different_sequences_and_the_same_again():
    content = np.arange(10_000, dtype=np.uint8)
    first, second = (next(iter(Sequences(content, settings_of(), step))) for step in (0, 1))
    later = iter(Sequences(content, settings_of(), 0))
    next(later)
    assert torch.equal(next(later), second)
    assert not torch.equal(first, second)
    assert first.shape == (4, 64)


def test_first_steps_have_shorter_sequences_and_as_many_tokens(tmp_path):
    settings = settings_of(**SHORT)
    steps = zip(range(8), Sequences(np.arange(10_000, dtype=np.uint8), settings, 0), strict=False)
    assert [tuple(batch.shape) for _, batch in steps] == 6 * [(8, 32)] + 2 * [(4, 64)]
    result = run(tmp_path, settings, every=3)
    assert [point["context"] for point in result["curve"]] == [32, 32, 64, 64]
    octaves_of = [len(point["by_position"]) for point in result["curve"]]
    assert octaves_of == [6, 6, 7, 7]
    assert result["positions"] == octaves(64)
    state = torch.load(tmp_path / CHECKPOINT, weights_only=True)["callbacks"]["Curve"]
    assert {context: steps for context, (steps, _) in state["timed"].items()} == {32: 1, 64: 1}
    assert result["short_bytes_per_second"] > 0 < result["bytes_per_second"]


def test_a_run_that_ends_among_short_steps_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(training.Deadline, "__init__", stops_at(4))
    result = run(tmp_path, settings_of(**SHORT))
    assert (result["trained"], result["positions"]) == (4, octaves(32))


def test_short_sequences_are_validated_as_those_of_a_short_context():
    """The same bits per byte as of a model of that context with these weights."""
    content = np.random.default_rng(0).integers(1, 256, 70_000).astype(np.uint8)
    books, found = Books(dict.fromkeys(SPLITS, content), {}), []
    short = settings_of(model=replace(TINY, context=32), step_tokens=2048)
    for settings in (settings_of(**SHORT, step_tokens=2048), short):
        torch.manual_seed(0)
        learner = Learner(settings, books.token_bytes)
        trainer = L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
        trainer.validate(learner, datamodule=BookData(books, settings), verbose=False)
        found.append(learner.by_position)
    assert len(found[0]) == 6
    assert found[0] == pytest.approx(found[1], rel=1e-6)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"short_context": 32}, "must be given together, got 32 and 0"),
        ({"short_steps": 3}, "must be given together, got None and 3"),
        ({"short_context": 48, "short_steps": 3}, "divide the context of 64 tokens .* got 48"),
        ({"short_context": 64, "short_steps": 3}, "be shorter, got 64"),
        ({"short_context": 8, "short_steps": 3}, "multiple of the block_size of 16 tokens, got 8"),
        ({"short_context": 32, "short_steps": 12}, "short_steps must be 1 to 11, .* got 12"),
        ({"warmup_steps": 13}, "warmup_steps must be 0 to the 12 steps of the run, got 13"),
    ],
)
def test_steps_that_do_not_fit_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        settings_of(**given)


def test_every_context_is_validated_on_the_same_bytes():
    content = np.random.default_rng(0).integers(1, 256, 200_000).astype(np.uint8)
    books = Books(dict.fromkeys(SPLITS, content), {})
    read = []
    for context in (64, 1024):
        settings = settings_of(model=replace(TINY, context=context), step_tokens=4096)
        read.append(torch.cat(list(BookData(books, settings).val_dataloader())).flatten())
    assert len(read[0]) == 3 * 65_536
    assert torch.equal(read[0], read[1])


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads as Linux does")
def test_batches_of_training_take_one_thread(is_pinned, monkeypatch):
    content = np.random.default_rng(0).integers(1, 256, 70_000).astype(np.uint8)
    # Torch splits operations on 32,768 elements or more.
    data = BookData(Books(dict.fromkeys(SPLITS, content), {}), settings_of(step_tokens=65_536))
    data.trainer = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    batches = iter(data.train_dataloader())
    assert is_pinned(next(batches))
    assert threads.started_by(lambda: next(batches)) == 0


def test_bits_per_byte_are_those_of_the_logits():
    torch.manual_seed(0)
    learner = Learner(settings_of(), [1] * 256).eval()
    batch = torch.randint(1, 256, (2, 64), dtype=torch.uint8)
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    losses = learner.losses(batch).detach()
    logits = learner.model(torch.cat([torch.zeros(2, 1, dtype=torch.long), batch[:, :-1]], 1))
    wanted = -logits.detach().log_softmax(-1).gather(-1, batch.long()[..., None])[..., 0]
    torch.testing.assert_close(losses, wanted)
    data = torch.utils.data.DataLoader(batch, batch_size=1)
    (found,) = trainer.validate(learner, data, verbose=False)
    bits = wanted / log(2)
    assert found["validation/bits_per_byte"] == pytest.approx(float(bits.mean()), rel=1e-5)
    assert learner.by_position[3] == pytest.approx(float(bits[:, 4:8].mean()), rel=1e-5)


def test_octaves():
    assert octaves(1024) == [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
    assert octaves(96) == [0, 1, 2, 4, 8, 16, 32, 64, 96]


def test_commands(tmp_path):
    write_books(tmp_path / "source")
    invoke = CliRunner().invoke
    built, folder = str(tmp_path / "built"), str(tmp_path / "run")
    assert "SHA-256" in invoke(app, ["data", str(tmp_path / "source"), "--output", built]).output
    given = ["train", "tiny-1k", "--output", folder, "--data", built, "--steps", "2"]
    small = ["--step-tokens", "1024", "--precision", "32-true", "--attention", "local(64)"]
    small += ["--warmup-steps", "1"]
    assert "step 2 of 2" in invoke(app, [*given, *small]).output
    sampled = invoke(app, ["sample", folder, "--prompt", "It was", "--length", "4"])
    assert sampled.stdout_bytes.startswith(b"It was")
    assert len(sampled.stdout_bytes) == len(b"It was" + b"1234" + b"\n")
    long = invoke(app, ["sample", folder, "--prompt", "It was " * 150])
    assert (long.exit_code, long.stdout) == (2, "")
    assert "prompt must be shorter than the context of 1024 tokens" in long.stderr
    for wrong, message in (
        (["train", "small", "--output", folder], "unknown preset"),
        ([*given, "--step-tokens", "1000"], "multiple of the context"),
        ([*given, *small, "--attention", "nothing"], "nothing"),
        ([*given, "--learning-rate", "0"], "learning_rate must be positive and finite, got 0.0"),
        (given, "warmup_steps must be 0 to the 2 steps of the run, got 200"),
        (
            [*given, *small, "--short-context", "512"],
            "short_context and short_steps must be given",
        ),
        (
            [*given, "--data", folder],
            "no books that `python -m experiments.language_model data` wrote",
        ),
        (["sample", str(tmp_path)], "cannot be read as a checkpoint"),
    ):
        result = invoke(app, wrong)
        assert result.exit_code == 2
        assert message in " ".join(result.output.replace("│", " ").split())


def test_the_command_has_the_defaults_of_its_settings(tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(training, "train", lambda *arguments: given.append(arguments) or {})
    monkeypatch.setattr(Books, "read", lambda folder: books_of())
    CliRunner().invoke(app, ["train", "tiny-1k", "--output", str(tmp_path)])
    model = ModelConfig(2, 64, 2, context=1024)
    data = {"train": "t", "validation": "v"}
    assert given[0][0] == Settings(model=model, learning_rate=3e-3, data=data)


def test_a_checkpoint_that_names_a_file_runs_nothing(tmp_path):
    hostile = f"{tmp_path / 'own.py'}:near"
    config = replace(TINY, attention=("local(3)",))
    facts = asdict(config) | {"attention": [hostile]}
    weights = {f"model.{name}": w for name, w in LanguageModel(config).state_dict().items()}
    torch.save({"settings": {"model": facts}, "state_dict": weights}, tmp_path / "last.ckpt")
    (tmp_path / "own.py").write_text("raise SystemExit('it was run')")
    with pytest.raises(ValueError, match="a checkpoint must not run a file"):
        load(tmp_path / "last.ckpt")
    assert load(tmp_path / "last.ckpt", ["local(3)"]).config == config


def test_help_is_answered_without_the_imports_of_training():
    code = (
        "import sys; from experiments.language_model.__main__ import app;"
        "app(['--help'], standalone_mode=False);"
        "assert not {'torch', 'lightning'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
