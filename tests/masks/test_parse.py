"""Expressions that name no pattern."""

import pytest

import masks


@pytest.mark.parametrize(
    "text",
    [
        "~" * 3000 + "full",
        "~" * 200_000 + "full",
        "full" + "|full" * 3000,
        "(" * 500 + "full" + ")" * 500,
        "local(" * 500,
        "full\0",
        "\ud800",
        "local(1e999)",
        "local((1,) * 10**9)",
        "1 is 1",
        "local(window=3, window=4)",
    ],
    ids=lambda text: text[:8].encode("unicode_escape"),
)
def test_texts_that_cannot_be_read(text):
    with pytest.raises(ValueError, match=r"^pattern .{1,260} cannot be read: "):
        masks.parse(text)


def test_keywords_between_patterns_are_refused_with_the_operators_that_are_known():
    with pytest.raises(ValueError, match=r"read: 'local\(3\) and full\(\)' must be .* with & \|"):
        masks.parse("(local(3) and full()) & causal()")


@pytest.mark.parametrize("text", ["", "local(3) && causal()", "local(3"])
def test_texts_with_other_syntax_are_told_what_is_known(text):
    with pytest.raises(ValueError, match=r"cannot be read: .*; it must be .*'local'.* with & \|"):
        masks.parse(text)


def test_a_file_without_a_name_is_answered_with_how_to_name_a_pattern():
    with pytest.raises(ValueError, match=r"'own\.py' must name .* as own\.py:NAME$"):
        masks.parse("own.py")


def test_long_chains_are_compared_and_built():
    chains = [masks.local(3), masks.local(3)]
    for _ in range(600):  # twice as many operators, more than Python has frames
        chains = [~(chain | masks.global_tokens(2)) for chain in chains]
    first, second = chains
    assert first == second
    assert first != ~second
    assert first(64, 16).density > 0


def test_the_block_size_of_a_pattern_is_shown():
    assert repr(masks.local(3)) == repr(masks.local(3).with_block_size(128)) == "local(3)"
    assert repr(masks.local(3).with_block_size(16)) == "local(3).with_block_size((16, 16))"
