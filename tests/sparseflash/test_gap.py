import random
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean, median

import pytest
import torch
from torch.utils.benchmark import Timer

import masks
import sparseflash
from sparseflash import timing
from sparseflash.gap import CHANGES, ROUNDS, SECONDS, Gap, split, variants
from sparseflash.timing import Turn, rested_turns
from tests.helpers.simulated_gpu import Kernel, SimulatedGpu

GLOBAL = masks.global_tokens(16) | masks.local(40)


def test_every_variant_leaves_one_cause_out():
    mask = GLOBAL(512, block_size=16)
    made = variants(mask)
    whole, contiguous, equal, longer = (
        made[name] for name in ("whole", "contiguous", "equal", "longer")
    )
    assert mask.partial_blocks > 0
    assert all(each.partial_blocks == 0 for each in made.values())
    assert whole.nnz_blocks == contiguous.nnz_blocks == equal.nnz_blocks == mask.nnz_blocks
    assert torch.equal(contiguous.blocks_per_row(), mask.blocks_per_row())
    for each in (equal, equal.T):
        counts = each.blocks_per_row()
        assert counts.max() - counts.min() <= 2
    assert torch.equal(longer.blocks_per_row(), (8 * equal.blocks_per_row()).clamp(max=32))
    # Side by side, but for the ends of the sequence: no more than two runs in a row.
    starts = contiguous.to_blocks().int().diff(dim=-1, prepend=torch.zeros(32, 1)) == 1
    assert starts.sum(-1).max() <= 2


def test_variants_of_a_full_mask_and_of_several_heads():
    assert variants(masks.full()(64, block_size=16))["longer"] == masks.full()(64, block_size=16)
    heads = masks.stack([masks.local(3), GLOBAL])(256, block_size=16)
    made = variants(heads)
    assert made["equal"].num_heads == 2
    assert made["equal"].head(0).nnz_blocks == heads.head(0).nnz_blocks
    clipped = variants(masks.random(0.4)((50, 90), block_size=16))["whole"]
    assert clipped.seq_len == (50, 90)


def planted(
    mask, host=0.0, partial=0.0, gather=0.0, imbalance=0.0, row=0.0, block=1e-3, least=0.0
):
    """Times of a device on which causes cost just so much; a row takes `least` or longer."""
    made = variants(mask)

    def of(each):
        return float((row + each.blocks_per_row().double() * block).clamp(min=least).sum())

    equal = of(made["equal"])
    contiguous = equal + imbalance
    whole = contiguous + gather
    times = {
        "device": whole + partial,
        "full": of(masks.full()(mask.seq_len, block_size=mask.block_size)),
        **{"whole": whole, "contiguous": contiguous, "equal": equal, "longer": of(made["longer"])},
    }
    return {name: [Turn(time, host)] for name, time in times.items()}, made


@pytest.mark.parametrize("filled", [1.0, 0.8])
def test_causes_are_found_and_add_up(filled):
    mask = masks.local(40)(512, block_size=16)
    costs = {"partial": 0.2, "gather": 0.4, "imbalance": 0.1, "row": 0.01}
    device = planted(mask, **costs)[0]["device"][0].device
    times, made = planted(mask, host=device + 0.3, **costs)
    found = split(times, made, mask.density, mask.density, filled, 1.0)
    parts = found.parts
    assert parts.keys() == CHANGES.keys()
    assert parts["launch and host"] == pytest.approx(0.3)
    assert parts["partial blocks"] == pytest.approx(0.2)
    assert parts["gather"] == pytest.approx(0.4)
    assert parts["load imbalance"] == pytest.approx(0.1)
    of_rows = 32 * 0.01 * filled  # the full mask has as many
    assert parts["prologue and epilogue"] == pytest.approx(of_rows * (1 - mask.density))
    assert parts["tail of the grid"] == pytest.approx(times["equal"][0].device * (1 - filled))
    assert parts["tiles of another size"] == pytest.approx(0)
    assert found.ideal == pytest.approx(mask.nnz_blocks * 1e-3 + 32 * 0.01 * mask.density)
    assert sum(parts.values()) == pytest.approx(found.measured - found.ideal)


def test_larger_tiles_cost_their_empty_share():
    mask = masks.random(0.1, seed=0)(1024, block_size=16)
    read = mask.reblock((64, 64))
    times, made = planted(read)
    found = split(times, made, read.density, mask.density, 1.0, 1.0)
    wasted = made["equal"].nnz_blocks * 1e-3 * (1 - mask.density / read.density)
    assert found.parts["tiles of another size"] == pytest.approx(wasted)
    assert found.parts["remainder"] == pytest.approx(0)
    assert found.largest == "tiles of another size"


def test_a_full_mask_has_no_gap():
    mask = masks.full()(256, block_size=16)
    times, made = planted(mask)
    found = split(times, made, 1.0, 1.0, 1.0, 1.0)
    assert list(found.parts.values()) == pytest.approx([0] * len(found.parts))


def test_a_host_that_is_ahead_costs_nothing():
    times, made = planted(masks.local(40)(512, block_size=16), host=0.01)
    found = split(times, made, 1.0, 1.0, 1.0, 1.0)
    assert found.parts["launch and host"] == found.noise["launch and host"] == 0
    assert found.measured == times["device"][0].device


def test_report_says_which_change_gains_most():
    parts = dict.fromkeys(CHANGES, 0.0) | {"gather": 0.5, "load imbalance": 0.25}
    quiet = dict.fromkeys(CHANGES, 0.0)
    text = str(Gap(2.0, 1.25, parts, quiet))
    assert "2.000 ms, ideal 1.250, gap +0.750" in text
    assert "remainder" not in text
    assert f"largest part: gather (25%); {CHANGES['gather']}" in text
    none = "no part with a known change exceeds its noise"
    assert str(Gap(1.0, 1.0, quiet, quiet)).endswith(none)
    noisy = Gap(2.0, 1.25, parts, quiet | {"gather": 0.5})
    assert "gather      0 ± 0.500" in str(noisy)
    assert "load imbalance +0.250 ± 0.000" in str(noisy)
    assert "largest part: load imbalance" in str(noisy)
    negative = Gap(2.0, 2.1, quiet | {"gather": -0.1}, quiet | {"gather": 0.2})
    assert "gather      0 ± 0.200" in str(negative)
    unknown = Gap(2.0, 1.0, quiet | {"remainder": 1.0}, quiet)
    assert "remainder +1.000" in str(unknown)
    assert str(unknown).endswith(none)


def test_report_says_when_the_parts_do_not_explain_the_gap():
    parts, quiet = dict.fromkeys(CHANGES, 0.0), dict.fromkeys(CHANGES, 0.0)
    small = Gap(2.0, 1.9, parts | {"remainder": 0.1}, quiet)
    assert "of the measured time" not in str(small)
    large = Gap(2.0, 2.2, parts | {"remainder": -0.2}, quiet | {"remainder": 0.02})
    said = "the remainder is -10% ± 1% of the measured time, above 5%: the parts do not explain it"
    assert said in str(large)
    assert large.quiet
    noisy = Gap(2.0, 1.8, parts | {"remainder": 0.2}, quiet | {"remainder": 0.3})
    assert "+10% ± 15% of the measured time: it may be 0 or above 5%, so measure" in str(noisy)
    assert not noisy.quiet


def test_noise_is_the_confidence_interval_of_the_median_of_differences_in_rounds():
    times, made = planted(masks.local(40)(512, block_size=16), gather=0.4)
    times = {name: found * 5 for name, found in times.items()}
    apart = (-0.2, 0.0, 0.1, 0.3, -0.1)
    times["whole"] = [
        Turn(turn.device + off, 0.0) for turn, off in zip(times["whole"], apart, strict=True)
    ]
    found = split(times, made, 1.0, 1.0, 1.0, 1.0)
    assert found.parts["gather"] == pytest.approx(0.4)
    # 2.776 standard errors at 5 rounds, whose median deviation is 0.1.
    expected = 2.776 * 1.2533 * 1.4826 * 0.1 / 5**0.5
    noise = dict.fromkeys(CHANGES, 0.0) | {"gather": expected, "partial blocks": expected}
    assert found.noise == pytest.approx(noise, rel=1e-3)
    assert found.largest == "gather"
    # What slows a whole round slows both times of a difference.
    slow = {
        name: [Turn(turn.device + late, 0.0) for late, turn in enumerate(of)]
        for name, of in times.items()
    }
    assert split(slow, made, 1.0, 1.0, 1.0, 1.0).noise["gather"] == pytest.approx(expected, 1e-3)


def test_the_tail_of_the_full_mask_is_no_part_of_the_gap():
    """All take 1 / 0.8 of the time that whole waves would: so does the ideal."""
    mask = masks.local(40)(512, block_size=16)
    times, made = planted(mask, row=0.01)
    found = split(times, made, mask.density, mask.density, 0.8, 0.8)
    of_rows = 32 * 0.01 * (1 - mask.density)
    assert found.parts["prologue and epilogue"] == pytest.approx(0.8 * of_rows)
    assert found.parts["tail of the grid"] == pytest.approx(0.2 * of_rows)
    assert found.parts["remainder"] == pytest.approx(0, abs=1e-9)


def test_prologues_of_the_full_mask_are_no_part_of_the_gap():
    """Half of the rows' time would remain else, as a remainder with a minus."""
    mask = masks.causal()(512, block_size=16)
    times, made = planted(mask, row=0.01)
    found = split(times, made, mask.density, mask.density, 1.0, 1.0)
    assert found.parts["prologue and epilogue"] == pytest.approx(32 * 0.01 * (1 - mask.density))
    assert found.parts["remainder"] == pytest.approx(0, abs=1e-9)
    assert found.noise["remainder"] == pytest.approx(0, abs=1e-9)


def test_short_rows_whose_loads_take_longer_than_their_products_leave_little():
    """A row takes as long as 4 blocks at least, and has 3."""
    mask = masks.random(3 / 64, seed=0)(1024, block_size=16)
    times, made = planted(mask, least=4e-3)
    found = split(times, made, mask.density, mask.density, 1.0, 1.0)
    assert found.parts["prologue and epilogue"] == pytest.approx(0.25 * found.measured, rel=0.2)
    assert abs(found.remainder) < 0.05


@dataclass(frozen=True)
class Planted:
    """A mask on a simulated GPU, the kernel of each of its runs, and what a split must find."""

    made: dict
    density: float
    kernels: dict
    measured: float
    parts: dict

    @classmethod
    def at_random(cls, chance, mask):
        """Causes cost shares that chance has drawn; the host may take longer than the device."""
        made, rows = variants(mask), mask.grid.nq
        scale, host = chance.choice([0.02, 0.1, 0.47, 1.6]), chance.choice([0.03, 0.05, 0.13])
        row = chance.choice([0.005, 0.05, 0.12]) * scale / rows
        block = 0.8 * scale / made["equal"].nnz_blocks
        times, made = planted(
            *(mask, host),
            *(chance.choice([0, 0, 0.01, 0.03, 0.1]) * scale for _ in range(3)),
            *(row, block),
        )
        power = 1.4 if scale > 0.1 else 0.5
        kernels = {name: Kernel(turn.device, host, power) for name, (turn,) in times.items()}
        kernels["full"] = replace(kernels["full"], power=power + 0.1)
        truth = split(times, made, mask.density, mask.density, 1.0, 1.0)
        return cls(made, mask.density, kernels, truth.measured, truth.parts)

    def found(self, monkeypatch, seed):
        with monkeypatch.context() as patch:
            gpu = SimulatedGpu(patch, seed)
            runs = {name: partial(gpu.call, kernel) for name, kernel in self.kernels.items()}
            turns = rested_turns(runs, torch.device("cuda"), SECONDS, ROUNDS)
        return split(turns, self.made, self.density, self.density, 1.0, 1.0)


def splits(monkeypatch, count):
    """(what was planted, what was found) of masks whose causes chance has drawn."""
    patterns = (masks.local(64), GLOBAL, masks.random(1 / 16, seed=0) | masks.strided(16))
    compiled = [pattern(2048, block_size=16) for pattern in patterns]
    for seed in range(count):
        chance = random.Random(seed)
        case = Planted.at_random(chance, chance.choice(compiled))
        yield case, case.found(monkeypatch, seed)


def off_by(case, found):
    """(how far each part that was measured is off, its noise), over the time of the call."""
    return [
        (abs(found.parts[name] - cost) / case.measured, found.noise[name] / case.measured)
        for name, cost in case.parts.items()
        if found.noise[name]
    ]


def test_planted_causes_come_back_within_their_noise(monkeypatch):
    pairs = list(splits(monkeypatch, 40))
    off = [of_part for case, found in pairs for of_part in off_by(case, found)]
    assert mean(error <= noise for error, noise in off) >= 0.9
    assert median(noise for _, noise in off) < 0.01
    for case, found in pairs:
        assert found.measured == pytest.approx(case.measured, rel=0.06)  # the clock drifts, too
        assert found.ideal + sum(found.parts.values()) == pytest.approx(found.measured)
        changed = {name: cost for name, cost in case.parts.items() if name != "remainder"}
        if max(changed.values()) > 0.03 * case.measured:
            assert changed[found.largest] > max(changed.values()) - 0.01 * case.measured


def test_long_turns_without_rests_would_find_noise(monkeypatch):
    """What a GPU that power slows does to calls that follow one another for 30 ms."""
    monkeypatch.setattr(timing, "MAX_PAUSE_MS", 0.0)
    monkeypatch.setattr(timing, "WARM_UP_MS", 10.0)
    monkeypatch.setattr(timing, "COUNTED_MS", 20.0)
    pairs = [pair for pair in splits(monkeypatch, 40) if pair[0].kernels["device"].power > 1]
    off = [of_part for case, found in pairs for of_part in off_by(case, found)]
    assert median(noise for _, noise in off) > 0.02
    assert median(found.measured / case.measured for case, found in pairs) > 1.05


def test_explain_splits_the_gap(monkeypatch):
    monkeypatch.setattr("sparseflash._explain.SECONDS", 0.0)
    query, key, value = torch.randn(3, 1, 2, 256, 16).unbind()
    found = sparseflash.explain(query, key, value, GLOBAL(256, block_size=16), measure=True)
    for each in (found.forward_gap, found.backward_gap):
        assert each.measured > 0
        assert sum(each.parts.values()) == pytest.approx(each.measured - each.ideal)
        assert each.parts["launch and host"] == each.noise["launch and host"] == 0
    assert found.forward_gap.measured == found.measured.forward
    assert found.backward_gap.measured == found.measured.backward
    assert found.forward_gap.ideal == found.predicted.forward  # on a CPU
    assert f"forward: {found.forward_gap}" in str(found)
    assert sparseflash.explain(query, key, value).forward_gap is None
    dynamic = masks.DynamicMask.from_blocks(torch.ones(16, 16).bool(), 16)
    assert sparseflash.explain(query, key, value, dynamic, measure=True).forward_gap is None


def timer_ms(run):
    timer = Timer("run()", globals={"run": run})
    timer.timeit(500)  # the clock settles
    return timer.timeit(500).mean * 1e3  # it waits for the device once, not after every run


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "pattern", "cause"),
    [
        ((1, 4, 1024, 128), masks.local(128), "launch and host"),
        ((2, 16, 16_384, 128), masks.local(100), "partial blocks"),
        ((1, 1, 17_024, 128), masks.strided(16), "tail of the grid"),
        ((2, 16, 16_384, 128), masks.global_tokens(128) | masks.local(64), "load imbalance"),
    ],
)
def test_causes_on_a_gpu(shape, pattern, cause):
    query, key, value = torch.randn(3, *shape, dtype=torch.bfloat16, device="cuda").unbind()
    found = sparseflash.explain(query, key, value, pattern, measure=True)
    forward = found.forward_gap
    assert forward.parts[cause] > forward.noise[cause]
    assert sum(forward.parts.values()) == pytest.approx(forward.measured - forward.ideal)
    # That under continuous load is what a loop takes.
    with torch.no_grad():
        independent = timer_ms(lambda: sparseflash.attention(query, key, value, pattern))
    assert found.sustained.forward == pytest.approx(independent, rel=0.05, abs=0.005)
    assert forward.measured <= 1.05 * independent + 0.005
