from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import masks
import sparseflash
from sparseflash import _explain, backends, io_model
from sparseflash.gap import ROUNDS
from sparseflash.io_model.device import DEVICES
from sparseflash.timing import Turn

HAS_GPU = torch.cuda.is_available()


def tensors(seq_len=100, kv_heads=2, head_dim=16):
    device = "cuda" if HAS_GPU else "cpu"
    query = torch.randn(1, 2, seq_len, head_dim, device=device)
    return query, *torch.randn(2, 1, kv_heads, seq_len, head_dim, device=device).unbind()


def test_backend_configuration_and_reasons():
    found = sparseflash.explain(*tensors(), masks.causal(), backend="triton")
    assert found.backend == "triton"
    assert set(found.configuration) == {"forward", "dq", "dkdv"}
    assert found.measured is found.predicted is found.dense_is_faster is None
    assert "forward: Config(bm=" in str(found)


@pytest.mark.parametrize(
    ("pattern", "better"),
    [(masks.local(16), 64), (masks.local(16).with_block_size(64), None), (masks.causal(), None)],
    ids=repr,
)
def test_better_blocks_on_a_device_that_is_modelled(pattern, better, monkeypatch):
    monkeypatch.setattr(io_model, "device_like", lambda _: DEVICES["H200"])
    found = sparseflash.explain(*tensors(4096, head_dim=64), pattern, backend="triton")
    if better is None:
        assert found.better_blocks is None
        assert "may be faster" not in str(found)
    else:
        side, share = found.better_blocks
        assert side == better
        assert 0.3 < share < 0.9
        assert f"blocks of {side} may be faster" in str(found)


def test_no_better_blocks_where_calls_choose_them_or_no_model_knows():
    assert sparseflash.explain(*tensors(4096), masks.local(16)).better_blocks is None or HAS_GPU
    assert (
        sparseflash.explain(*tensors(4), masks.local(16), backend="triton").better_blocks is None
    )


@pytest.mark.parametrize("recorded", [True, False])
def test_a_gradient_of_blocks_is_a_fact_only_where_autograd_records(recorded):
    query, key, value = tensors(64)
    scores = torch.randn(1, 2, 4, 4, device=query.device, requires_grad=True)
    mask = masks.DynamicMask.from_topk(scores, 2, 16, 64)
    with torch.set_grad_enabled(recorded):
        found = sparseflash.explain(query, key, value, mask)
    assert found.spec.differentiates_blocks is recorded


@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_a_planned_order_that_a_backend_does_not_have_is_reported(backend):
    query = torch.empty(1, 2, 64, 16)
    plain, found = (
        sparseflash.explain(query, query, query, backend=backend, planned_order=planned)
        for planned in (False, True)
    )
    assert "planned order" not in plain.configuration
    assert f"planned order: not used by the backend {backend}" in str(found)


def test_no_backend_is_no_error():
    found = sparseflash.explain(*tensors(head_dim=512), backend="triton")
    assert found.backend is None
    assert "head_dim is 512" in found.why_not["triton"][0]
    assert "not triton: head_dim is 512" in str(found)


def test_times(monkeypatch):
    monkeypatch.setattr(_explain, "SECONDS", 0.0)
    tensors_ = tensors(kv_heads=1)
    mask = masks.causal()(100, 16, tensors_[0].device)
    sinks = torch.zeros(2, device=tensors_[0].device)
    done = []
    found = sparseflash.explain(
        *tensors_,
        mask,
        dropout_p=0.1,
        sinks=sinks,
        measure=True,
        progress=lambda steps, total: done.append((steps, total)),
    )
    least = 2 * 7 * (1 + 2 * ROUNDS)  # of both passes of seven functions
    assert done == [(steps, least) for steps in range(1, least + 1)]
    assert found.density == mask.density
    for times in (found.measured, found.full, found.dense):
        assert times.forward > 0
        assert times.backward > 0
    assert found.predicted.forward == pytest.approx(found.full.forward * mask.density)
    total = found.measured.forward + found.measured.backward
    assert found.dense_is_faster == (found.dense.forward + found.dense.backward < total)
    assert ("dense attention is faster here" in str(found)) == found.dense_is_faster


def test_slow_calls_are_measured_in_few_rounds_with_a_bar(monkeypatch, capsys):
    """The bar is on the standard error, so that it is in no result."""
    rounds = []
    original = _explain.split
    monkeypatch.setattr(
        _explain, "split", lambda turns, *facts: (rounds.append(turns), original(turns, *facts))[1]
    )
    monkeypatch.setattr(_explain, "MAX_SECONDS", 0.0)
    monkeypatch.setattr("masks.progress.SECONDS_UNTIL_BAR", 0.0)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as if the standard error were a terminal
    sparseflash.explain(*tensors(), masks.local(20), measure=True)
    assert {len(turns["device"]) for turns in rounds} == {2}
    shown = capsys.readouterr()
    assert "measuring" in shown.err
    assert not shown.out


@pytest.fixture
def timed(monkeypatch):
    """What is timed, in order; the n-th takes n ms forward and 10 n backward."""
    found = []

    def measured(runs_of, progress, gap_of, *tensors):
        found.extend(runs_of["forward"].values())
        passes = [
            {name: [Turn(ms * n, 0.0)] * 5 for n, name in enumerate(runs, 1)}
            for ms, runs in zip((1, 10), runs_of.values(), strict=True)
        ]
        return passes, [1.125, 11.0]

    monkeypatch.setattr(_explain, "_measured", measured)
    return found


def test_the_call_the_full_mask_and_dense_attention_are_timed(timed):
    tensors_ = tensors(kv_heads=1)
    mask = masks.local(3)(100, 16, tensors_[0].device)
    sinks = torch.zeros(2, device=tensors_[0].device)
    found = sparseflash.explain(
        *tensors_, mask, scale=0.3, dropout_p=0.1, sinks=sinks, measure=True
    )
    ours, full, dense = timed[:3]
    assert ours.keywords["mask"] is mask
    assert ours.keywords["sinks"] is full.keywords["sinks"] is sinks
    assert full.keywords["mask"] == masks.full()(100, 16, tensors_[0].device)
    assert ours.keywords["backend"] == full.keywords["backend"] == found.backend
    assert dense.func is torch.nn.functional.scaled_dot_product_attention
    assert dense.keywords == {"scale": 0.3, "dropout_p": 0.1, "enable_gqa": True}
    assert (found.measured.forward, found.full.forward, found.dense.forward) == (1, 2, 3)
    assert found.predicted == _explain.Times(2 * mask.density, 20 * mask.density)
    assert "full mask: forward 2.000 ms, backward 20.000 ms" in str(found)
    assert "(rested, in short turns with pauses): forward 1.000 ms, backward 10.000" in str(found)
    assert found.sustained == _explain.Times(1.125, 11.0)
    under_load = "sustained (under continuous load): forward 1.125 ms"
    assert f"{under_load}, backward 11.000 ms; +12% and +10%" in str(found)
    assert "continuous load" not in str(replace(found, sustained=None))
    for dense, faster in (((3, 30), False), ((2, 8), True), ((0.5, 12), False)):
        other = replace(found, dense=_explain.Times(*dense))
        assert other.dense_is_faster == faster
        assert ("dense attention is faster here" in str(other)) == faster


def test_a_pass_is_measured_until_its_remainder_has_little_noise(monkeypatch):
    asked = []

    def turns(runs, device, seconds, least_rounds, progress, enough, most_seconds):
        quiet = {name: [Turn(1.0, 0.0)] * 6 for name in runs}
        noisy = quiet | {"full": [Turn(1.0 + n % 3, 0.0) for n in range(6)]}
        asked.append((enough(quiet), enough(noisy)))
        return quiet

    monkeypatch.setattr(_explain, "rested_turns", turns)
    sparseflash.explain(*tensors(), masks.local(3), measure=True)
    assert asked == [(True, False)] * 2
    asked.clear()
    dynamic = masks.DynamicMask.from_blocks(torch.ones(7, 7).bool(), 16, 100)
    sparseflash.explain(*tensors(), dynamic, measure=True)  # it has no gap
    assert asked == [(True, True)] * 2


HIGH = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 1, 1], [0, 1, 1]]).bool()  # of 192 x 128 tokens


def test_variants_are_timed_in_the_tiles_of_the_call(monkeypatch):
    """Whatever tiles would be chosen for them, as where those of a backend depend on the mask."""
    rows = HIGH.repeat_interleave(3, 0)[:11]  # the last block is clipped
    mask = masks.BlockMask.from_blocks(rows, (64, 128), seq_len=(700, 384))
    cpu, read, timed, split_by = backends.cpu, [], {}, []

    def forward(call, *tensors):
        read.append(call.table.block_size)
        return cpu.forward(call, *tensors)

    def backward(call, *arguments):
        read.append(call.table.block_size)
        return cpu.backward(call, *arguments)

    def measured(runs_of, progress, gap_of, *tensors):
        timed.update(runs_of)
        turns = [{name: [Turn(1.0, 0.0)] * 2 for name in runs} for runs in runs_of.values()]
        return turns, [None, None]

    functions = {
        "forward": forward,
        "backward": backward,
        "forward_block_size_for": lambda spec, each: (192, 128) if each is mask else (128, 128),
        "block_size_for": lambda spec, each: (64, 128) if each is mask else (128, 128),
    }
    monkeypatch.setattr(backends, "BACKENDS", (SimpleNamespace(**vars(cpu) | functions),))
    monkeypatch.setattr(_explain, "_measured", measured)
    original = _explain.split
    monkeypatch.setattr(
        _explain, "split", lambda *facts: (split_by.append(facts[1:3]), original(*facts))[1]
    )
    query = torch.randn(1, 1, 700, 8)
    key, value = torch.randn(2, 1, 1, 384, 8).unbind()
    sparseflash.explain(query, key, value, mask, measure=True)
    leaf = query.requires_grad_()
    for direction, (masks_of, tile_density) in zip(timed, split_by, strict=True):
        assert {"device", "full", "dense", *masks_of} == timed[direction].keys()
        assert tile_density == mask.density
        assert masks_of["whole"] == mask
        for name in ("device", *masks_of):
            read.clear()
            timed[direction][name](leaf, key, value).sum().backward()
            assert read == [(192, 128), (64, 128)]
    of_tiles = split_by[0][0]["equal"].to_blocks()[:9].unflatten(0, (-1, 3))
    assert (of_tiles.all(1) == of_tiles.any(1)).all()
    assert split_by[0][0]["equal"].nnz_blocks == mask.nnz_blocks


def test_reasons_are_those_of_the_call_that_was_asked_for(monkeypatch):
    first = backends.BACKENDS[0 if not HAS_GPU else -1]
    slow = SimpleNamespace(**vars(first) | {"name": "slow", "auto_skip": lambda *call: ["slower"]})
    monkeypatch.setattr(backends, "BACKENDS", (slow, first))
    explain = partial(sparseflash.explain, *tensors())
    assert (explain().backend, explain().why_not) == (first.name, {"slow": ["slower"]})
    named = explain(backend="slow")
    assert (named.backend, named.why_not) == ("slow", {})


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="precision must be"):
        sparseflash.explain(*tensors(), precision="half")
    with pytest.raises(ValueError, match="bias must have shape"):
        sparseflash.explain(*tensors(), bias=torch.zeros(1, 3))
    with pytest.raises(ValueError, match="sinks must have shape"):
        sparseflash.explain(*tensors(), sinks=torch.zeros(3))
    with pytest.raises(TypeError, match="seed must be"):
        sparseflash.explain(*tensors(), seed=2.0, return_lse=True)
    with pytest.raises(
        TypeError, match=r"query must have one of the dtypes .*, got torch\.float8_e5m2"
    ):
        sparseflash.explain(*(x.to(torch.float8_e5m2) for x in tensors()))


def test_no_random_number_is_drawn():
    call = tensors()
    before = torch.get_rng_state()
    sparseflash.explain(*call, dropout_p=0.1)
    assert torch.equal(torch.get_rng_state(), before)
