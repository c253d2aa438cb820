import pytest
import torch

import masks
from experiments.pattern_families import (
    CAUSAL,
    FAMILIES,
    TOLERANCE,
    Size,
    fading_memory,
    parse_family,
)

SIZE = Size(2048, 64, torch.device("cpu"))


@pytest.mark.parametrize("name", FAMILIES)
def test_chosen_members_have_about_the_requested_densities(name):
    densities = (0.5, 0.25, 0.125)
    candidates, missed = FAMILIES[name].choose(SIZE, densities)
    assert len({problem.label for problem in candidates}) == len(candidates)
    assert len(candidates) + len(missed) <= len(densities)
    for density in set(densities) - set(missed):
        nearest = min(max(m.density / density, density / m.density) for m in candidates)
        assert nearest <= TOLERANCE
    assert candidates


@pytest.mark.parametrize("window", [10, 64, 100])
def test_fading_memory_is_what_its_docstring_says(window):
    n = 700
    dense = fading_memory(window)(n, block_size=32).to_dense().reshape(n, n)
    for q, k in [(5, 5), (5, 6), (600, 0), (600, 64), (600, 300), (699, 640), (699, 128)]:
        every, reach = 1, window
        while q - k > reach:
            every, reach = 2 * every, 2 * reach
        assert dense[q, k].item() == (k <= q and k // 64 % every == 0), (q, k)


@pytest.mark.parametrize(
    "family", [CAUSAL, FAMILIES["local"], FAMILIES["fading_memory"]], ids=lambda f: f.name
)
def test_what_flex_attention_is_told_is_the_mask(family):
    (problem,), _ = family.choose(SIZE, (0.25,))
    token = torch.arange(SIZE.seq_len)
    dense = problem.mask.to_dense().reshape(SIZE.seq_len, SIZE.seq_len)
    assert torch.equal(dense, problem.predicate(token[:, None], token))


def test_a_density_that_no_member_has_is_reported():
    _, missed = FAMILIES["butterfly"].choose(SIZE, (0.9, 0.001))
    assert missed == [0.9, 0.001]


def test_an_expression_is_one_member():
    family = parse_family("local(256) & causal()")
    (problem,), missed = family.choose(SIZE, (0.5,))
    assert problem.mask == (masks.local(256) & masks.causal())(2048, block_size=64)
    assert missed == []


def test_patterns_of_a_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import masks\n"
        "def banded(window):\n    return masks.local(window)\n"
        "fixed = masks.local(64)\n"
        "wrong = 3\n"
    )
    assert len(parse_family(f"{file}:banded").choose(SIZE, (0.5, 0.25))[0]) == 2
    assert parse_family(f"{file}:fixed").choose(SIZE, ())[0][0].label == "fixed"
    for name, message in [("wrong", "got int"), ("missing", "defines no 'missing'")]:
        with pytest.raises(ValueError, match=message):
            parse_family(f"{file}:{name}")
    with pytest.raises(ValueError, match="does not exist"):
        parse_family("nowhere.py:fixed")
