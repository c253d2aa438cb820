import itertools
import json
from dataclasses import replace

import pytest
import torch

from sparseflash.lab import Profile, suggest


def profile_of(times: list[float], recall: torch.Tensor) -> Profile:
    recall, ms = recall.double(), torch.tensor(times, dtype=torch.float64)
    names = ("full()", *(f"local({i})" for i in range(1, len(times))))
    return Profile(
        seq_len=100,
        layers=tuple(f"layer {i}" for i in range(len(recall))),
        patterns=names,
        density=ms / ms[0],
        recall=recall,
        error=1 - recall,
        loss=None,
        measured_ms=ms,
        predicted_ms=ms,
    )


def test_every_head_gets_what_it_needs():
    recall = torch.tensor([[[1, 0.99, 0.9], [1, 0.5, 0.1]]])
    chosen = suggest(profile_of([10, 5, 1], recall), 0.6)
    assert chosen.layers == (("local(2)", "full()"),)
    assert chosen.time_share == pytest.approx(11 / 20)
    assert chosen.recall == pytest.approx(0.95)


def test_suggestions_are_within_a_head_of_the_optimum():
    times = [8.0, 5.0, 3.0, 1.0]
    recall = torch.rand(2, 2, 4).sort(-1, descending=True).values
    recall[..., 0] = 1
    found = profile_of(times, recall)
    for budget in (0.15, 0.3, 0.5, 0.8, 1.0):
        allowed = budget * 8 * 4
        best = max(
            sum(float(recall[i // 2, i % 2, p]) for i, p in enumerate(choice))
            for choice in itertools.product(range(4), repeat=4)
            if sum(times[p] for p in choice) <= allowed + 1e-9
        )
        chosen = suggest(found, budget)
        assert chosen.time_share <= budget + 1e-9
        one_head = float((1 - recall[..., 3]).max())
        assert best - one_head - 1e-9 <= 4 * chosen.recall <= best + 1e-6
    assert suggest(found, 1.0).recall == 1


def test_a_pattern_that_is_slower_and_worse_is_never_chosen():
    recall = torch.tensor([[[1, 0.5, 0.9]]])
    assert suggest(profile_of([10, 5, 4], recall), 0.7).layers == (("local(2)",),)


def test_file_is_what_sparsify_reads(tmp_path):
    chosen = suggest(profile_of([10, 1], torch.rand(2, 3, 2)), 0.5)
    chosen.save(tmp_path / "suggestion.json")
    read = json.loads((tmp_path / "suggestion.json").read_text())
    assert [layer["heads"] for layer in read["layers"]] == [list(h) for h in chosen.layers]
    assert read["seq_len"] == 100
    unread = replace(chosen, layers=(("my_rule",),))
    with pytest.raises(ValueError, match="my_rule"):
        unread.save(tmp_path / "suggestion.json")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"budget": 0}, "budget must be above 0"),
        ({"budget": 1.5}, "budget must be above 0"),
        ({"budget": "1"}, "budget must be above 0 and at most 1, got '1'"),
        ({"budget": 0.05}, "at least 0.1,"),
        ({"budget": 0.5, "by": "loss"}, "profile has no loss"),
        ({"budget": 0.5, "by": "speed"}, "by must be one of"),
    ],
)
def test_bad_input_is_named(arguments, named):
    with pytest.raises(ValueError, match=named):
        suggest(profile_of([10, 1], torch.rand(1, 1, 2)), **arguments)


def test_something_else_than_a_profile_is_refused():
    with pytest.raises(TypeError, match="profile must be a Profile, got int"):
        suggest(3, 1.0)
