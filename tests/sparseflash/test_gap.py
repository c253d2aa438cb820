import time
from contextlib import nullcontext

import pytest
import torch
from torch.utils.benchmark import Timer

import masks
import sparseflash
from sparseflash import gap
from sparseflash.gap import CHANGES, Gap, split, variants

GLOBAL = masks.global_tokens(16) | masks.local(40)


def test_every_variant_leaves_one_cause_out():
    mask = GLOBAL(512, block_size=16)
    made = variants(mask)
    whole, contiguous, equal, twice = (
        made[name] for name in ("whole", "contiguous", "equal", "twice")
    )
    assert mask.partial_blocks > 0
    assert all(each.partial_blocks == 0 for each in made.values())
    assert whole.nnz_blocks == contiguous.nnz_blocks == equal.nnz_blocks == mask.nnz_blocks
    assert torch.equal(contiguous.blocks_per_row(), mask.blocks_per_row())
    for each in (equal, equal.T):
        counts = each.blocks_per_row()
        assert counts.max() - counts.min() <= 2
    assert torch.equal(twice.blocks_per_row(), 2 * equal.blocks_per_row())
    # Side by side, but for the ends of the sequence: no more than two runs in a row.
    starts = contiguous.to_blocks().int().diff(dim=-1, prepend=torch.zeros(32, 1)) == 1
    assert starts.sum(-1).max() <= 2


def test_variants_of_a_full_mask_and_of_several_heads():
    assert variants(masks.full()(64, block_size=16))["twice"] == masks.full()(64, block_size=16)
    heads = masks.stack([masks.local(3), GLOBAL])(256, block_size=16)
    made = variants(heads)
    assert made["equal"].num_heads == 2
    assert made["equal"].head(0).nnz_blocks == heads.head(0).nnz_blocks
    clipped = variants(masks.random(0.4)((50, 90), block_size=16))["whole"]
    assert clipped.seq_len == (50, 90)


def planted(mask, launch=0.0, partial=0.0, gather=0.0, imbalance=0.0, row=0.0, block=1e-3):
    """Times of a device on which causes cost just so much; the full mask has `block` alone."""
    made = variants(mask)
    rows = mask.grid.nq
    twice = rows * row + made["twice"].nnz_blocks * block
    equal = rows * row + made["equal"].nnz_blocks * block
    contiguous = equal + imbalance
    whole = contiguous + gather
    device = whole + partial
    times = {
        "called": device + launch,
        "device": device,
        "full": rows**2 * block,
        **{"whole": whole, "contiguous": contiguous, "equal": equal, "twice": twice},
    }
    return {name: [time] for name, time in times.items()}, made


@pytest.mark.parametrize("filled", [1.0, 0.8])
def test_causes_are_found_and_add_up(filled):
    mask = masks.local(40)(512, block_size=16)
    costs = {"launch": 0.3, "partial": 0.2, "gather": 0.4, "imbalance": 0.1, "row": 0.01}
    times, made = planted(mask, **costs)
    found = split(times, made, mask.density, mask.density, filled, 1.0)
    parts = found.parts
    assert parts.keys() == CHANGES.keys()
    assert parts["launch and host"] == pytest.approx(0.3)
    assert parts["partial blocks"] == pytest.approx(0.2)
    assert parts["gather"] == pytest.approx(0.4)
    assert parts["load imbalance"] == pytest.approx(0.1)
    assert parts["prologue and epilogue"] == pytest.approx(32 * 0.01 * filled)
    assert parts["tail of the grid"] == pytest.approx(times["equal"][0] * (1 - filled))
    assert parts["larger tiles"] == pytest.approx(0)
    assert found.ideal == pytest.approx(mask.nnz_blocks * 1e-3)
    assert sum(parts.values()) == pytest.approx(found.measured - found.ideal)


def test_larger_tiles_cost_their_empty_share():
    mask = masks.random(0.1, seed=0)(1024, block_size=16)
    read = mask.reblock((64, 64))
    times, made = planted(read)
    found = split(times, made, read.density, mask.density, 1.0, 1.0)
    wasted = made["equal"].nnz_blocks * 1e-3 * (1 - mask.density / read.density)
    assert found.parts["larger tiles"] == pytest.approx(wasted)
    assert found.parts["remainder"] == pytest.approx(0)
    assert found.largest == "larger tiles"


def test_a_full_mask_has_no_gap():
    mask = masks.full()(256, block_size=16)
    times, made = planted(mask)
    found = split(times, made, 1.0, 1.0, 1.0, 1.0)
    assert list(found.parts.values()) == pytest.approx([0] * len(found.parts))


def test_report_says_which_change_gains_most():
    parts = dict.fromkeys(CHANGES, 0.0) | {"gather": 0.5, "load imbalance": 0.25}
    quiet = dict.fromkeys(CHANGES, 0.0)
    text = str(Gap(2.0, 1.25, parts, quiet))
    assert "2.000 ms, ideal 1.250, gap +0.750" in text
    assert "remainder" not in text
    assert f"most by gather (25%): {CHANGES['gather']}" in text
    assert str(Gap(1.0, 1.0, quiet, quiet)).endswith("no part is above its noise")
    noisy = Gap(2.0, 1.25, parts, quiet | {"gather": 0.5})
    assert "gather +0.500 ± 0.500" in str(noisy)
    assert "most by load imbalance" in str(noisy)


def test_noise_of_a_part_is_how_far_it_was_off_in_a_round():
    times, made = planted(masks.local(40)(512, block_size=16), gather=0.4)
    times = {name: found * 5 for name, found in times.items()}
    times["whole"] = [times["whole"][0] + noise for noise in (-0.2, 0.0, 0.1, 0.3, -0.1)]
    found = split(times, made, 1.0, 1.0, 1.0, 1.0)
    assert found.parts["gather"] == pytest.approx(0.4)
    noise = dict.fromkeys(CHANGES, 0.0) | {"gather": 0.3, "partial blocks": 0.3}
    assert found.noise == pytest.approx(noise)
    assert found.largest == "gather"
    # What slows a whole round slows both times of a difference.
    slow = {name: [t + turn for turn, t in enumerate(of)] for name, of in times.items()}
    assert split(slow, made, 1.0, 1.0, 1.0, 1.0).noise["gather"] == pytest.approx(0.3)


def test_the_tail_of_the_full_mask_is_no_part_of_the_gap():
    """All take 1 / 0.8 of the time that whole waves would: so does the ideal."""
    mask = masks.local(40)(512, block_size=16)
    times, made = planted(mask, row=0.01)
    found = split(times, made, mask.density, mask.density, 0.8, 0.8)
    assert found.parts["prologue and epilogue"] == pytest.approx(0.8 * 32 * 0.01)
    assert found.parts["tail of the grid"] == pytest.approx(0.2 * 32 * 0.01)
    assert found.parts["remainder"] == pytest.approx(0, abs=1e-9)


def test_times_alternate_within_a_budget(monkeypatch):
    order = []

    def run(name, seconds):
        order.append(name)
        time.sleep(seconds)

    monkeypatch.setattr(gap, "CPU_MS", 0.0)
    runs = {"called": lambda: run("a", 0.002), "b": lambda: run("b", 0.006)}
    found = gap.alternating(runs, torch.device("cpu"), {"called"})
    planned = 1 + gap.ESTIMATES
    assert order == ["a"] * planned + ["b"] * planned + ["a", "b"] * gap.ROUNDS
    assert len(found["called"]) == gap.ROUNDS
    assert min(found["b"]) >= 6
    order.clear()
    monkeypatch.setattr(gap, "BUDGET_SECONDS", 0.0)
    gap.alternating(runs, torch.device("cpu"), {"called"})
    assert order[2 * planned :] == ["a", "b"] * gap.MIN_ROUNDS


class SimulatedGpu:
    """Clocks in milliseconds: the device works off what the host enqueues.

    After a pause it is 20 % faster for `boost` ms, begins `wakes` ms late, and so does the host
    after it has waited.
    """

    boost, wakes = 6.0, 0.3

    def __init__(self, monkeypatch):
        self.host = self.device = self.busy = 0.0
        monkeypatch.setattr(gap.time, "perf_counter", lambda: self.host / 1e3)
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr(torch.cuda, "_sleep", self.pause)
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: SimulatedEvent(self))

    def synchronize(self, _=None):
        self.host = max(self.host, self.device) + self.wakes

    def pause(self, cycles):
        self.device, self.busy = max(self.host, self.device) + cycles / gap.CYCLES * 1e3, 0.0

    def call(self, host, device):
        self.host += host
        if self.device < self.host:
            self.device = self.host
        self.device += device * (0.8 if self.busy < self.boost else 1.0)
        self.busy += device


class SimulatedEvent:
    def __init__(self, gpu):
        self.gpu, self.at = gpu, 0.0

    def record(self):
        self.at = max(self.gpu.host, self.gpu.device)

    def synchronize(self):
        self.gpu.synchronize()

    def elapsed_time(self, other):
        return other.at - self.at


@pytest.mark.parametrize(
    ("host", "device"), [(0.03, 0.5), (0.13, 1.9), (0.2, 25.0), (0.19, 0.02), (0.5, 0.4)]
)
def test_launch_and_host_are_what_the_host_adds_to_calls_in_a_row(monkeypatch, host, device):
    gpu = SimulatedGpu(monkeypatch)
    runs = dict.fromkeys(("called", "device"), lambda: gpu.call(host, device))
    found = gap.alternating(runs, torch.device("cuda"), {"called"})
    # Calls that are host-bound rest the device, which a warm-up of so few does not heat.
    boosted = 0.8 if gap.MOST_CALLS * device < gpu.boost else 1.0
    assert found["device"] == pytest.approx([device * boosted] * len(found["device"]), rel=0.01)
    assert found["called"] == pytest.approx([max(host, device)] * len(found["called"]), rel=0.01)


def test_explain_splits_the_gap():
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
    with torch.no_grad():
        timer = Timer(
            "attention(*tensors, pattern)",
            globals={
                "attention": sparseflash.attention,
                "tensors": (query, key, value),
                "pattern": pattern,
            },
        )
        independent = timer.blocked_autorange(min_run_time=0.2).median * 1e3
    assert forward.measured == pytest.approx(independent, rel=0.05, abs=0.005)
