import gc
import json
import weakref
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from experiments import pictures, pretraining
from experiments.cli import SHIPPED
from experiments.language_model.books import SPLITS, Books, build
from experiments.pretraining import IGNORED, Case, app, batches, draw, measure_all, table_of, train
from tests.experiments.language_model.test_books import write_books

pytestmark = pytest.mark.usefixtures("one_thread")
CASE = Case("gpt2-tiny", "eager", 64, steps=6, step_tokens=256, dropout=0.0)
SPARSE = "local(16)"


def books_of(size=5000):
    content = np.random.default_rng(0).integers(1, 256, size).astype(np.uint8)
    return Books(dict.fromkeys(SPLITS, content), {"train": "t"})


@pytest.mark.parametrize("model", ["gpt2-tiny", "bert-tiny"])
@pytest.mark.parametrize("padding", [0.0, 0.5])
def test_exact_attentions_learn_equally_and_a_pattern_does_not(model, padding):
    case = replace(CASE, model=model, padding=padding, learning_rate=1e-2)
    rows = {a: train(replace(case, attention=a), books_of(), "cpu") for a in ("eager", "ours")}
    eager, ours = (np.array(row["losses"]) for row in rows.values())
    np.testing.assert_allclose(ours, eager, atol=0.02)
    assert rows["ours"]["tokens_per_second"] > 0
    sparse = train(replace(case, attention=SPARSE), books_of(), "cpu")
    assert sparse["losses"] != rows["ours"]["losses"]


def test_batches_are_functions_of_seed_and_step_and_pad_their_labels():
    case = replace(CASE, padding=0.5)
    one, same, other = (list(batches(c, books_of())) for c in (case, case, replace(case, seed=1)))
    assert all(torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(one, same, strict=True))
    assert not torch.equal(one[0]["input_ids"], one[1]["input_ids"])
    assert not torch.equal(one[0]["input_ids"], other[0]["input_ids"])
    there = one[0]["attention_mask"].bool()
    assert (one[0]["labels"] == IGNORED).equal(~there)
    assert not there.all()
    assert there.sum(1).min() >= 32


def test_bert_guesses_masked_tokens_alone():
    (batch,) = list(batches(replace(CASE, model="bert-tiny", padding=0.3), books_of()))[:1]
    guessed = batch["labels"] != IGNORED
    assert (batch["input_ids"] == pretraining.TINY - 1).equal(guessed)
    assert 0.05 < guessed.float().mean() < 0.3
    assert not (guessed & ~batch["attention_mask"].bool()).any()


def test_dropout_is_that_of_the_attention_too():
    model = pretraining.build_model(replace(CASE, dropout=0.3))
    assert model.config.attn_pdrop == 0.3
    model = pretraining.build_model(replace(CASE, model="bert-tiny", dropout=0.3))
    assert model.config.attention_probs_dropout_prob == 0.3


def test_models_have_the_size_of_their_name():
    for name, millions in (("gpt2", 124), ("gpt2-medium", 355), ("bert-large", 335)):
        with torch.device("meta"):
            model = pretraining.build_model(Case(name, "eager", 1024 if "gpt2" in name else 512))
        size = sum(p.numel() for p in model.parameters())
        assert size == pytest.approx(millions * 1e6, rel=0.01)


def test_a_record_goes_on_and_has_a_table_and_a_picture(tmp_path, monkeypatch):
    write_books(tmp_path / "source")
    build(tmp_path / "source", tmp_path / "books")
    path, said = tmp_path / "record.json", []
    cases = [replace(CASE, attention=a) for a in ("eager", SPARSE)]
    measure_all(cases[:1], tmp_path / "books", path, "cpu", said.append)

    def full(case, *_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(pretraining, "train", full)
    record = measure_all(cases, tmp_path / "books", path, "cpu", said.append)
    assert record == json.loads(path.read_text())
    assert [line.rpartition(": ")[0] for line in said] == [
        "gpt2-tiny, 64 tokens, eager",
        "gpt2-tiny, 64 tokens, local(16)",
    ]
    columns = [list(column.cells) for column in table_of(record).columns]
    assert columns[6] == ["1.00", ""]
    assert columns[5][1] == "out of memory"
    assert draw(record, tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_case_begins_without_the_model_of_the_case_before(monkeypatch):
    """A model of transformers can be in a reference cycle, which only garbage collection frees."""
    models, alive = [], []

    def build(case):
        alive.append([found() is not None for found in models])
        model = build_model(case)
        model.__dict__["own"] = model
        models.append(weakref.ref(model))
        return model

    build_model = pretraining.build_model
    monkeypatch.setattr(pretraining, "build_model", build)
    gc.disable()
    try:
        for _ in range(2):
            train(CASE, books_of(), "cpu")
    finally:
        gc.enable()
    assert alive == [[], [False]]


def test_a_picture_has_a_row_of_panels_for_each_dropout_and_padding(tmp_path, monkeypatch):
    drawn = []

    def save(figure, picture):
        drawn.append([axis.get_title() for axis in figure.axes])
        return (picture, picture)

    monkeypatch.setattr(pictures, "save", save)
    figures = {"tokens_per_second": 1.0, "losses": [1.0, 2.0]}
    cases = [replace(CASE, dropout=p, padding=q) for p, q in ((0.1, 0), (0.0, 0), (0.1, 0.3))]
    lost = asdict(CASE) | {"reason": "out of memory"}
    draw({"rows": [lost, *(asdict(case) | figures for case in cases)]}, tmp_path / "a.png")
    names = [f"gpt2-tiny, dropout {name}" for name in ("0.1", "0.1, padding 0.3", "0")]
    assert drawn == [[title for name in names for title in (name, f"{name}, 64 tokens")]]


def test_rows_are_shown_by_size_and_compared_with_the_first_attention_of_theirs():
    sizes = (("bert-tiny", 0.1, 64), ("gpt2-tiny", 0.0, 64), ("gpt2-tiny", 0.1, 128))
    sizes += (("gpt2-tiny", 0.1, 64),)
    rows = [
        asdict(replace(CASE, model=m, dropout=p, seq_len=n, attention=attention))
        for attention in ("sdpa", "eager")
        for m, p, n in sizes
    ]
    shown = list(pretraining.with_baselines(rows))
    names = ("model", "dropout", "seq_len")
    found = [tuple(row[name] for name in names) for row, _ in shown]
    expected = [("gpt2-tiny", 0.1, 64), ("gpt2-tiny", 0.1, 128), *sizes[1::-1]]
    assert found == [size for size in expected for _ in range(2)]
    assert [row["attention"] for row, _ in shown] == ["sdpa", "eager"] * 4
    assert all(base["attention"] == "sdpa" for _, base in shown)


def test_exact_attentions_of_one_size_are_compared_in_pairs():
    rows = [
        asdict(replace(CASE, attention=attention, dropout=p)) | {"losses": losses}
        for attention, p, losses in (
            ("eager", 0.0, [3.0, 2.0, 1.0]),
            ("sdpa", 0.0, [3.0, 2.5, 2.0]),
            (SPARSE, 0.0, [3.0, 2.0, 1.0]),
            ("ours", 0.1, [3.0, 2.0, 1.0]),
        )
    ]
    rows.append(asdict(replace(CASE, attention="ours")) | {"reason": "out of memory"})
    (pair,) = pretraining.exact_pairs(rows)
    assert pair == (rows[0], rows[1])
    found = [pretraining.largest_difference(*pair, steps) for steps in (1, 2, None)]
    assert found == [0.0, 0.5, 1.0]


def test_commands(tmp_path):
    write_books(tmp_path / "source")
    build(tmp_path / "source", tmp_path / "books")
    given = ["measure", "gpt2-tiny", "--data", str(tmp_path / "books"), "--output", str(tmp_path)]
    small = ["--length", "64", "--steps", "6", "--step-tokens", "64", "--attention", "ours"]
    said = CliRunner().invoke(app, [*given, *small])
    assert "pretraining-cpu.png" in said.output.replace("\n", "")
    record = tmp_path / "pretraining-cpu.json"
    measured = json.loads(record.read_text())["rows"]
    shown = CliRunner().invoke(app, ["show", str(record), "--output", str(tmp_path / "shown")])
    assert (tmp_path / "shown/pretraining-cpu.png").exists(), shown.output
    # A pattern that cannot be read ends the command before the first training.
    unread = [*given, *small, "--attention", "sdpa", "--attention", "nothing"]
    assert CliRunner().invoke(app, unread).exit_code == 2
    assert json.loads(record.read_text())["rows"] == measured
    other, half = tmp_path / "other.json", tmp_path / "half.json"
    other.write_text('{"data": {}, "rows": [{"problem": "full"}]}')
    half.write_text(record.read_text()[:-9])
    for wrong, message in (
        (["show", str(other)], "whose rows have attention, dropout,"),
        (["show", str(half)], "must be JSON"),
        (
            ["show", str(record), "--output", str(SHIPPED)],
            "is a folder of the package, which has records",
        ),
        ([*given, *small, "--padding", "1"], "padding must be at least 0"),
        ([*given, *small[:-1], "nothing"], "nothing"),
        (["measure", "gpt3", *given[2:]], "model must be one of gpt2"),
        ([*given, "--length", "100"], "step_tokens must be a multiple"),
        ([*given, "--length", "64", "--steps", "2"], "steps must be more than 5"),
        (
            [*given, "--length", "131072", "--step-tokens", "131072", "--attention", "sdpa"],
            "131072 in the train split",
        ),
    ):
        result = CliRunner().invoke(app, wrong)
        assert result.exit_code == 2, wrong
        assert message in " ".join(result.output.replace("│", " ").split())
