import pytest
import torch
from matplotlib.image import imread

import masks
from masks._parse import parse
from masks.analysis import receptive_field
from sparseflash import io_model
from sparseflash.advisor import Workload, block_sizes, measure, ordered_share, plot, search
from sparseflash.advisor.choices import _pareto_front, families

SMALL = Workload(1024, heads=2)


def test_block_sizes_have_the_density_and_overhead_of_their_masks():
    found = {choice.block_size: choice for choice in block_sizes("local(20)", SMALL)}
    assert [*found] != []
    assert set(found) == {16, 32, 64, 128, 256, 512}
    pairs = sum(min(i + 20, 1023) - max(i - 20, 0) + 1 for i in range(1024))
    for side, choice in found.items():
        mask = masks.local(20)(1024, side)
        assert choice.density == mask.density
        assert choice.useful == pytest.approx(pairs / (mask.nnz_blocks * side * side))
        cost = [
            io_model.attention(mask, 128, heads=2, direction=direction).seconds
            for direction in ("forward", "backward")
        ]
        assert choice.predicted_ms == pytest.approx(sum(cost) * 1e3)
    times = [choice.predicted_ms for choice in block_sizes("local(20)", SMALL)]
    assert times == sorted(times)


def test_search_finds_what_sees_far_enough_in_the_order_of_time():
    found = search(SMALL, layers=3, block_size=64)
    assert found != []
    for choice in found:
        field = receptive_field(parse(choice.pattern)(1024, 64), 3)
        assert field.full_after is not None
        assert choice.connected == 1
        assert choice.connected_interval == (1, 1)
    times = [choice.predicted_ms for choice in found]
    assert times == sorted(times)
    fastest = min(
        SMALL.predicted_ms(mask)
        for text in families(1024, 64)
        if receptive_field(mask := parse(text)(1024, 64), 3).full_after
    )
    assert times[0] == fastest


def test_search_returns_what_fails_where_it_is_wanted():
    patterns = ["local(16)", "full()", "butterfly()"]
    every = search(SMALL, layers=2, patterns=patterns, failing=True)
    assert {choice.pattern for choice in every} == set(patterns)
    assert [c for c in every if c.connected == 1] == search(SMALL, layers=2, patterns=patterns)
    assert {choice.connected == 1 for choice in every} == {True, False}


def test_search_keeps_to_the_budget_and_the_past():
    causal = Workload(1024, heads=2, causal=True)
    every = search(causal, layers=2, connected=0.5, block_size=64)
    budget = every[1].predicted_ms
    assert len(search(causal, layers=2, connected=0.5, block_size=64, most=1)) == 1
    within = search(causal, layers=2, connected=0.5, budget_ms=budget, block_size=64)
    assert within == [choice for choice in every if choice.predicted_ms <= budget]
    mask = causal.mask(every[0].pattern, 64)
    assert not mask.to_dense().triu(1).any()
    assert search(causal, layers=1, budget_ms=1e-9) == []


def test_candidates_of_ones_own_are_searched():
    steps = []
    patterns = ["local(16)", "full()"]
    found = search(SMALL, layers=1, patterns=patterns, progress=lambda *s: steps.append(s))
    assert [choice.pattern for choice in found] == ["full()"]
    assert steps[-1] == (2, 2)


@pytest.mark.parametrize("length", [100, 1024, 5000])
def test_families_can_be_built_at_any_length(length):
    texts = families(length, 64)
    assert len(texts) == len(set(texts))
    assert all(parse(text)(length, 64).density > 0 for text in texts)


def test_measured_choices_are_sorted_by_time():
    workload = Workload(512, head_dim=16, heads=1, dtype=torch.float32)
    patterns = ["full()", "local(16)"]
    found = search(workload, layers=1, connected=0.01, patterns=patterns, block_size=64)
    measured = measure(found, workload, "cpu")
    assert {choice.pattern for choice in measured} == set(patterns)
    times = [choice.measured_ms for choice in measured]
    assert 0 not in times
    assert times == sorted(times)


@pytest.mark.slow(20)
def test_order_on_a_cpu_is_right_for_nine_of_ten_pairs_that_differ_by_a_tenth():
    workload = Workload(4096, head_dim=64, heads=2, dtype=torch.float32)
    sizes = [block_sizes(text, workload, [128]) for text in families(4096, 128)[::2]]
    choices = [choice for (choice,) in sizes]
    assert len(choices) > 20

    def share() -> float:
        found = measure(choices, workload, "cpu")
        return ordered_share([(each.predicted_ms, each.measured_ms or 0.0) for each in found])

    # Other work on the machine may disturb the times once.
    assert share() >= 0.9 or share() >= 0.9


def test_ordered_share_counts_pairs_that_differ():
    times = [(1.0, 1.0), (2.0, 1.05), (1.5, 2.0), (3.0, 3.0)]
    # (1, 2) differ by 5 % and do not count; of the other five only (2, 3) is in the wrong order.
    assert ordered_share(times) == pytest.approx(4 / 5)
    assert ordered_share(times[:2]) == 1


def test_pareto_front_has_what_nothing_surpasses():
    assert _pareto_front([3, 1, 2, 2], [5, 4, 4, 6]) == [(1, 4), (2, 6)]
    assert _pareto_front([1, 2], [4, 4]) == [(1, 4)]


def test_plots_are_pictures(tmp_path):
    plot(block_sizes("local(20)", SMALL), tmp_path / "sizes.png")
    every = search(SMALL, layers=3, most=3, failing=True)
    plot(every, tmp_path / "found.png", title=str(SMALL), connected=0.5)
    assert imread(tmp_path / "sizes.png").std() > 0
    assert imread(tmp_path / "found.png").std() > 0


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: Workload(1024, device="H900"), "H200"),
        (lambda: search(SMALL, layers=2, connected=0), "connected"),
        (lambda: search(SMALL, layers=0), "layers"),
        (lambda: search(SMALL, layers=2, patterns=["locl(3)"]), "locl"),
        (lambda: block_sizes("local(3)", SMALL, sides=[48]), "block_size"),
        (lambda: Workload(0), "seq_len must be at least 1"),
        (lambda: Workload(1024.5), "seq_len must be an integer"),
        (lambda: search(SMALL, layers=2, patterns="local(3)"), "patterns must be a list"),
        (lambda: Workload(1024, dtype=torch.int8), "dtype must be a floating-point torch.dtype"),
        (lambda: search(SMALL, layers=2, connected="1"), "connected must be above 0 .* got '1'"),
        (lambda: search(SMALL, layers=2, most=0), "most must be at least 1, got 0"),
        (lambda: block_sizes("local(3)", SMALL, sides=64), "sides must be a sequence of integers"),
        (lambda: measure([], SMALL, "gpu"), "device must be one of torch, .* got 'gpu'"),
        (lambda: block_sizes("local(3)", 1024), "workload must be a Workload, got int"),
        (
            lambda: search(SMALL, layers=2, patterns=3),
            "patterns must be a list of patterns, got 3",
        ),
        (lambda: search(SMALL, layers=2, budget_ms="1"), "budget_ms must be a number or None"),
        (lambda: plot([], "x.png"), "choices must have at least 1 entry, got none"),
        (lambda: plot(block_sizes("local(3)", SMALL), "x.txt"), "path must end in .png"),
    ],
)
def test_bad_input_is_named(call, named):
    with pytest.raises((TypeError, ValueError), match=named):
        call()
