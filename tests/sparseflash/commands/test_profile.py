import json

import pytest
import torch
from typer.testing import CliRunner

from sparseflash.__main__ import app


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a small causal model whose tokens are characters, and a text."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    words = Tokenizer(models.WordLevel({c: i for i, c in enumerate("abcdefgh")}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "text.txt").write_text("abcdefgh" * 20)
    return folder


def invoke(folder, *arguments):
    text = ("--text", folder / "text.txt", "--tokens", 128, "--pattern", "local(16)")
    return CliRunner().invoke(app, list(map(str, ("profile", folder, *text, *arguments))))


def test_command_profiles_suggests_and_draws(model, tmp_path):
    output, plot = tmp_path / "suggestion.json", tmp_path / "pareto.svg"
    options = ("--budget", 1, "--loss", "--output", output, "--plot", plot, "--json")
    result = invoke(model, *options)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["profile"]["patterns"] == ["causal()", "local(16)"]
    assert found["profile"]["loss"] is not None
    assert found["suggestion"] == json.loads(output.read_text())
    assert found["suggestion"]["layers"] == [{"heads": ["causal()"] * 2}] * 2
    assert plot.read_text().startswith("<?xml")


def test_command_prints_a_table(model):
    result = invoke(model, "--budget", 1)
    assert result.exit_code == 0, result.output
    assert "local(16)" in result.output
    assert "layer 1: 2 x causal()" in result.output


def test_a_budget_that_no_pattern_keeps_loses_no_profile(model):
    result = invoke(model, "--budget", 1e-9)
    assert result.exit_code == 2
    assert "density" in result.stdout
    assert "budget must be at least" in " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--tokens", 200), "200 tokens"),
        (("--pattern", "locl(3)"), "locl"),
        (("--budget", 2), "--budget must be above 0"),
        (("--budget", 1, "--by", "loss"), "--by loss needs --loss"),
        (("--by", "speed"), "'recall', 'error', 'loss'"),
        (("--output", "x.json"), "--budget"),
        (("--plot", "x.doc"), "--plot must end in .png, .svg, .pdf, got x.doc"),
    ],
)
def test_bad_input_is_named(model, arguments, named):
    result = invoke(model, *arguments)
    assert result.exit_code == 2
    assert named in " ".join(result.output.replace("│", " ").split())


def test_a_model_without_tokenizer_is_named(model, tmp_path):
    for name in ("config.json", "text.txt"):
        (tmp_path / name).write_text((model / name).read_text())
    result = invoke(tmp_path)
    assert result.exit_code == 2
    assert "model must be a folder with a tokenizer" in result.output
