"""A tiny encoder with random weights on longer documents than its positions."""

import json
import signal
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForMaskedLM,
)
from typer.testing import CliRunner

from experiments.long_documents.__main__ import app
from experiments.long_documents.labelled import ARTICLES, Document, Labelled
from experiments.long_documents.pretrained import (
    POSITIONS,
    Batches,
    Run,
    Settings,
    gather,
    lengthened,
)
from tests.experiments.long_documents.test_labelled import write_ecthr

pytestmark = pytest.mark.usefixtures("one_thread")
WORDS = ["<s>", "<pad>", "</s>", "<unk>", *"abcdefgh"]
SIZES = {
    "vocab_size": len(WORDS),
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
SHORT = 16  # positions that are trained


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    """A RoBERTa of 16 positions after its 2 special ones, and a tokenizer of letters."""
    folder = tmp_path_factory.mktemp("encoder")
    torch.manual_seed(0)
    config = RobertaConfig(max_position_embeddings=SHORT + 2, pad_token_id=1, **SIZES)
    RobertaForMaskedLM(config).save_pretrained(folder)
    vocabulary = {word: n for n, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>").save_pretrained(folder)
    return folder


def documents(number, filler=20):
    """The label is the letter that stands behind so many others."""
    return [
        Document(" ".join(["c"] * filler + ["ab"[n % 2]] * 9 + ["d"]), (n % 2,))
        for n in range(number)
    ]


DATA = Labelled(
    "ecthr", ("a", "b"), {"train": documents(16), "validation": documents(4), "test": documents(8)}
)


def settings(encoder, **options):
    small = {"steps": 40, "batch_size": 8, "every": 10, "learning_rate": 1e-2, "warmup_steps": 2}
    return Settings(str(encoder), **{"tokens": 48} | small | options)


def positions_of(model: nn.Module) -> torch.Tensor:
    (found,) = (w for name, w in model.state_dict().items() if name.endswith(POSITIONS))
    return found


def test_positions_are_repeated_after_the_special_ones(encoder):
    short = positions_of(RobertaForMaskedLM.from_pretrained(encoder))
    model = lengthened(encoder, 2, 40)
    weight = positions_of(model)
    assert len(weight) == 42
    torch.testing.assert_close(weight[:18], short)
    torch.testing.assert_close(weight[18:34], short[2:])
    torch.testing.assert_close(weight[34:], short[2:10])
    tokens = torch.randint(4, 12, (1, 40))
    hidden = model.base_model(tokens).last_hidden_state
    assert hidden.shape == (1, 40, 16)


def test_an_encoder_without_special_positions(tmp_path):
    BertForMaskedLM(BertConfig(max_position_embeddings=SHORT, **SIZES)).save_pretrained(tmp_path)
    weight = positions_of(lengthened(tmp_path, 2, 20))
    torch.testing.assert_close(weight[16:], weight[:4])


def test_other_folders_are_refused(tmp_path, encoder):
    with pytest.raises(ValueError, match="has no encoder of transformers"):
        lengthened(tmp_path, 2, 20)
    GPT2LMHeadModel(GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=1)).save_pretrained(
        tmp_path
    )
    with pytest.raises(ValueError, match="must have an encoder with learned positions"):
        lengthened(tmp_path, 2, 20)
    with pytest.raises(ValueError, match=r"must have tokenizer\.json, a fast tokenizer"):
        Batches(settings(tmp_path), DATA)
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        settings(encoder, steps=0)
    with pytest.raises(ValueError, match=r"warmup_steps must be 0 to the 7 steps .* got 200"):
        settings(encoder, steps=7, warmup_steps=200)


def test_batches_are_cut_and_padded(encoder):
    batch = Batches(settings(encoder, tokens=32), DATA).of(
        [Document("a b", (1,)), *documents(1, 60)]
    )
    assert batch["input_ids"].shape == (2, 32)
    assert batch["attention_mask"].sum(1).tolist() == [4, 32]
    assert batch["input_ids"][0, :5].tolist() == [0, 4, 5, 2, 1]
    assert batch["targets"].tolist() == [[0.0, 1.0], [1.0, 0.0]]


def test_what_stands_late_is_learned_by_who_reads_it(encoder, tmp_path):
    found = {}
    for tokens in (16, 48):  # the letters that count stand behind 20 others
        asked = settings(encoder, tokens=tokens, steps=20, every=5)
        result = Run(asked, DATA, tmp_path / f"{tokens}").train()
        assert result is not None
        found[tokens] = result["micro_f1"]
        assert result == json.loads((tmp_path / f"{tokens}" / "result.json").read_text())
    assert found[48] == 1.0
    assert found[16] < 0.7  # as who guesses both labels, or one
    record = gather([tmp_path / "16", tmp_path / "48"])
    assert {n: group["micro_f1"] for n, group in record["lengths"].items()} == {
        str(n): value for n, value in found.items()
    }
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match=r"none has no result\.json"):
        gather([tmp_path / "none"])


@pytest.mark.parametrize("attention", ["sdpa", "local(8) | global_tokens(8)"])
def test_a_run_goes_on_with_the_same_weights(attention, encoder, tmp_path):
    asked = settings(encoder, attention=attention, steps=6, every=3)
    whole = Run(asked, DATA, tmp_path / "whole")
    whole.train()
    stopped = Run(asked, DATA, tmp_path / "part")
    assert stopped.train(seconds=0) is None
    assert stopped.step == 1
    again = Run(asked, DATA, tmp_path / "part")
    assert again.step == 1
    assert again.train() is not None
    assert again.curve == whole.curve
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, again.model.state_dict()[name]), name
    with pytest.raises(ValueError, match=r"last\.ckpt is of a run with other settings"):
        Run(replace(asked, learning_rate=1e-4), DATA, tmp_path / "part")


def test_ctrl_c_saves_the_step_that_is_being_made(encoder, tmp_path, monkeypatch):
    asked = settings(encoder, steps=6, every=10)
    train_step, before = Run._train_step, signal.getsignal(signal.SIGINT)

    def interrupted(run, batch):
        if run.step == 1:
            signal.raise_signal(signal.SIGINT)
        train_step(run, batch)

    with monkeypatch.context() as patched:
        patched.setattr(Run, "_train_step", interrupted)
        run = Run(asked, DATA, tmp_path)
        with pytest.raises(KeyboardInterrupt):
            run.train()
    assert signal.getsignal(signal.SIGINT) is before
    again = Run(asked, DATA, tmp_path)
    assert again.step == 2
    assert again.train() is not None


def test_micro_f1_counts_labels_of_all_documents_at_once(encoder, tmp_path):
    run = Run(settings(encoder), DATA, tmp_path)

    class Always(nn.Module):
        """The first label always, the second never."""

        def forward(self, input_ids, attention_mask):
            class Out:
                logits = torch.tensor([[1.0, -1.0]]).expand(len(input_ids), 2)

            return Out

    run.model = Always()
    # Of 8 documents 4 have each label: 4 of 8 guesses are right, and 4 of 8 labels are found.
    assert run.micro_f1("test") == pytest.approx(0.5)


def test_commands(encoder, tmp_path):
    cases = {
        name: [([text], [ARTICLES[n] for n in own]) for text, own in documents(4)]
        for name in ("train", "dev", "test")
    }
    data = write_ecthr(tmp_path / "data", cases)
    runs, results = tmp_path / "runs", tmp_path / "results"
    given = ["tune", "ecthr", str(data), str(encoder), "--output", str(runs), "--tokens", "32"]
    small = ["--steps", "2", "--warmup-steps", "1", "--batch-size", "2", "--every", "1"]
    said = CliRunner().invoke(app, [*given, *small])
    assert "32 tokens, seed 0: micro F1" in said.output
    said = CliRunner().invoke(
        app, ["record-tuned", str(runs / "ecthr/32/seed0"), "--output", str(results)]
    )
    assert "32 tokens, 1 runs" in said.output
    assert len(list(results.glob("long-documents-ecthr-*.json"))) == 1
    for wrong, message in (
        (["tune", "x", *given[2:]], "source must be one of ecthr, mimic, got 'x'"),
        (["tune", "mimic", *given[2:]], "train_50_hadm_ids.csv is missing"),
        ([*given, *small, "--seed", "1", "--attention", "nothing"], "nothing"),
    ):
        done = CliRunner().invoke(app, wrong)
        assert done.exit_code == 2, wrong
        assert message in " ".join(done.output.replace("│", " ").split())
