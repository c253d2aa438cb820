"""AttentionOptions: one list of options, which every function takes and nothing escapes."""

import inspect
from typing import get_type_hints

import pytest
import torch

import sparseflash
from sparseflash import AttentionOptions, ScoreFunction
from sparseflash.dispatch.spec import AttentionSpec
from sparseflash.nn import SparseAttention
from sparseflash.options import OPTION_NAMES, OptionKeywords

HALVED = ScoreFunction("halved, as an option", lambda s, b, h, q, k: (s / 2, 0.5))


def test_keywords_fields_and_operators_are_one_list():
    hints = {name: get_type_hints(AttentionOptions)[name] for name in OPTION_NAMES}
    assert get_type_hints(OptionKeywords) == hints
    schema = torch.ops.sparseflash.attention.default._schema
    assert tuple(a.name for a in schema.arguments[-len(OPTION_NAMES) :]) == OPTION_NAMES
    assert set(OPTION_NAMES) <= set(AttentionSpec.__dataclass_fields__)


@pytest.mark.parametrize(
    "function",
    [sparseflash.attention, sparseflash.attention_varlen, sparseflash.explain, SparseAttention],
)
def test_functions_take_them_all(function):
    (options,) = [
        p
        for p in inspect.signature(function).parameters.values()
        if p.kind == inspect.Parameter.VAR_KEYWORD
    ]
    assert options.annotation.__args__ == (OptionKeywords,)


def test_equal_options_are_one_key():
    one, other = (AttentionOptions(scale=1, score=score) for score in (HALVED, HALVED.name))
    assert one == other
    assert hash(one) == hash(other)
    assert one != AttentionOptions(scale=1)
    assert AttentionOptions(**one.as_dict()) == one
    with pytest.raises(AttributeError):
        one.scale = 2.0  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("option", "error", "message"),
    [
        ({"scale": 0.0}, ValueError, "scale must be positive and finite, got 0.0"),
        ({"scale": torch.ones(())}, TypeError, "scale must be a number, got Tensor"),
        ({"softcap": float("inf")}, ValueError, "softcap must be positive and finite"),
        ({"score": 3}, TypeError, "score must be a ScoreFunction or the name of one"),
        ({"score": "no such"}, ValueError, "score must be .* got 'no such'"),
        ({"dropout_p": 1.0}, ValueError, r"dropout_p must be in \[0, 1\), got 1.0"),
        ({"precision": "half"}, ValueError, r"precision must be one of \('ieee', 'tf32'\)"),
        ({"deterministic": 1}, TypeError, "deterministic must be a bool, got 1"),
        ({"planned_order": 1}, TypeError, "planned_order must be a bool, got 1"),
        ({"backend": None}, TypeError, "backend must be 'auto' or the name of a backend"),
        ({"scal": 1}, TypeError, r"options must be some of scale, .*, got scal; did .* scale\?$"),
        ({"key_length": 1}, TypeError, r"got key_length; did you mean key_lengths\?$"),
        ({"unlike_any": 1}, TypeError, "got unlike_any$"),
        ({"is_causal": True}, TypeError, r"got is_causal; give the mask as mask, .*causal\(\)$"),
        (
            {"attn_mask": None, "causal": True, "softmax_scale": 1.0},
            TypeError,
            r"got attn_mask, causal, softmax_scale; give the mask .*\(\); it is scale here$",
        ),
    ],
)
def test_what_is_wrong_is_named(option, error, message):
    with pytest.raises(error, match=message):
        AttentionOptions(**option)
    query = torch.randn(1, 1, 16, 8)
    with pytest.raises(error, match=message):
        sparseflash.attention(query, query, query, **option)


def test_arguments_that_only_attention_takes_are_not_spelling_mistakes():
    message = "got return_max_logits; it is an argument of sparseflash.attention, which this call"
    with pytest.raises(TypeError, match=message):
        AttentionOptions(return_max_logits=True)  # pyright: ignore[reportCallIssue]
