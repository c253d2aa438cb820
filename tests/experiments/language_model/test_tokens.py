import json
from math import log

import lightning as L
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from typer.testing import CliRunner

from experiments.language_model.__main__ import app
from experiments.language_model.books import Books, build
from experiments.language_model.settings import ModelConfig, Settings
from experiments.language_model.tokens import TOKENIZER, Reader, encode
from experiments.language_model.training import BookData, Learner
from tests.experiments.language_model.test_books import write_books

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*isinstance.*LeafSpec.*is deprecated"),
]
VOCABULARY = 300


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("books")
    write_books(folder / "source")
    (folder / "source" / "marks.md").write_text("Abbé Prévost — “Manon” … naïve\n" * 9)
    build(folder / "source", folder / "bytes")
    encode(folder / "bytes", folder / "tokens", VOCABULARY, progress=False)
    return folder


def test_tokens_say_the_same_as_the_bytes(folders):
    as_bytes, books = Books.read(folders / "bytes"), Books.read(folders / "tokens")
    tokenizer = Tokenizer.from_file(str(folders / "tokens" / TOKENIZER))
    assert len(books.token_bytes) == VOCABULARY
    sizes = np.array(books.token_bytes)
    for split, tokens in books.splits.items():
        assert tokens.dtype == np.uint16
        assert len(tokens) < len(as_bytes.splits[split])
        texts = np.split(tokens, np.flatnonzero(tokens == 0))[1:]
        read = b"".join(b"\0" + tokenizer.decode(text[1:]).encode() for text in texts)
        assert read == as_bytes.splits[split].tobytes()
        assert sizes[tokens].sum() == len(read)
    mean = len(as_bytes.splits["train"]) / len(books.splits["train"])
    assert books.bytes_per_token == pytest.approx(mean)
    assert not books.books


def test_bits_are_counted_by_the_bytes_of_tokens(folders):
    books = Books.read(folders / "tokens")
    model = ModelConfig(1, 32, 2, context=64, block_size=16, vocabulary=VOCABULARY)
    settings = Settings(
        model=model, steps=1, step_tokens=256, learning_rate=1e-2, warmup_steps=0, data={},
        precision="32-true",
    )  # fmt: skip
    torch.manual_seed(0)
    learner = Learner(settings, books.token_bytes)
    data = BookData(books, settings)
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    (found,) = trainer.validate(learner, datamodule=data, verbose=False)
    batches = list(data.val_dataloader())
    with torch.inference_mode():
        nats = torch.cat([learner.losses(batch) for batch in batches]).sum()
    size = np.array(books.token_bytes)[torch.cat([b.long() for b in batches]).numpy()].sum()
    wanted = float(nats) / log(2) / size
    assert found["validation/bits_per_byte"] == pytest.approx(wanted, rel=1e-5)
    for batch in batches:  # those of training, too
        learner.training_step(batch, 0)
        size = np.array(books.token_bytes)[batch.long().numpy()].sum()
        wanted = learner.losses(batch).sum().item() / log(2) / size
        assert float(learner.measured["train/bits_per_byte"]) == pytest.approx(wanted, rel=1e-5)


def test_commands(folders, tmp_path):
    invoke, run, data = CliRunner().invoke, str(tmp_path / "run"), str(tmp_path / "tokens")
    given = ["tokenize", "--data", str(folders / "bytes"), "--output", data]
    assert "tokens of" in invoke(app, [*given, "--vocabulary", "280"]).output
    small = [
        "--step-tokens",
        "1024",
        "--precision",
        "32-true",
        "--steps",
        "1",
        "--warmup-steps",
        "1",
    ]
    trained = invoke(app, ["train", "tiny-1k", "--output", run, "--data", data, *small])
    assert "step 1 of 1" in trained.output
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["model"]["vocabulary"] == 280
    assert result["step_bytes"] > result["step_tokens"] == 1024
    sampled = invoke(app, ["sample", run, "--prompt", "Bé", "--length", "9"])
    assert sampled.stdout_bytes.decode().startswith("Bé")
    wrong = invoke(app, [*given[:-1], str(tmp_path / "other"), "--vocabulary", "9"])
    assert (wrong.exit_code, "vocabulary must be 258" in wrong.output) == (2, True)
    assert not (tmp_path / "other").exists()


def test_text_of_tokens_is_that_of_the_tokenizer(folders):
    reader = Reader(folders / "tokens")
    text = "Abbé — “naïve”"
    assert b"".join(reader.text(token) for token in reader.tokens(text)).decode() == text
    reader = Reader(folders)
    assert b"".join(reader.text(token) for token in reader.tokens(text)).decode() == text


def test_wrong_input(folders, tmp_path):
    with pytest.raises(ValueError, match="books as bytes, not as tokens"):
        encode(folders / "tokens", tmp_path, VOCABULARY)
    write_books(tmp_path / "source")
    for path in (tmp_path / "source").rglob("*.md"):
        path.write_bytes(path.read_bytes() + b"\xff.")
    build(tmp_path / "source", tmp_path / "bytes")
    with pytest.raises(ValueError, match=r"\.md must be UTF-8"):
        encode(tmp_path / "bytes", tmp_path / "tokens", VOCABULARY)
