"""Which calls the Hopper kernels refuse, and what they say."""

import math
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import triton.language as tl
from triton.runtime import JITFunction

import masks
from sparseflash import backends
from sparseflash.backends import hopper, triton
from sparseflash.backends.base import BackendError
from sparseflash.backends.hopper import configs
from sparseflash.backends.hopper import select as hopper_select
from sparseflash.backends.hopper.select import uses_fused_backward
from sparseflash.backends.select import select
from sparseflash.dispatch.call import Call, Plan
from sparseflash.dispatch.plan import make_plan
from sparseflash.score import ScoreFunction
from tests.helpers.calls import mask_that_covers, spec_of

QUERY = torch.empty(1, 2, 256, 64, dtype=torch.bfloat16)
MASK = masks.full()(256)
SPEC = replace(spec_of(QUERY, QUERY, MASK), device=torch.device("cuda", 0))
DYNAMIC = mask_that_covers(None, None)


def spec_like(**change):
    """SPEC with other facts, whose values are as wide as its queries."""
    widths = {"value_dim": change["head_dim"]} if "head_dim" in change else {}
    return replace(SPEC, **widths | change)


@pytest.fixture(autouse=True)
def capability(monkeypatch):
    monkeypatch.setattr(hopper_select, "_capability", lambda device: (9, 0))


def test_serves_a_plain_call_and_one_with_dropout():
    assert hopper.why_not(SPEC, MASK) == hopper.why_not(spec_like(dropout_p=0.5), MASK) == []


@pytest.mark.parametrize("head_dim", [8, 80, 256])
def test_serves_head_dims_in_tiles_that_are_as_wide_or_wider(head_dim):
    assert hopper.why_not(spec_like(head_dim=head_dim), MASK) == []


@pytest.mark.parametrize(
    ("head_dim", "value_dim"), [(192, 128), (128, 64), (64, 128), (8, 128), (136, 256), (256, 8)]
)
def test_serves_values_of_other_dims(head_dim, value_dim):
    spec = replace(SPEC, head_dim=head_dim, value_dim=value_dim, deterministic=False)
    assert hopper.why_not(spec, MASK) == []
    table = masks.full()(128 * 8).table()
    assert not uses_fused_backward(table, spec)
    assert uses_fused_backward(table, replace(spec, head_dim=96, value_dim=128))


@pytest.mark.parametrize(
    ("head_dim", "blocks", "gpu", "fused"),
    [
        (64, 4, "H200", False),
        (64, 5, "H200", True),
        (64, 5, "H100", False),
        (64, 6, "H100", True),
        (128, 7, "H200", False),
        (128, 8, "H200", True),
        (128, 13, "H100", False),
        (128, 14, "H100", True),
    ],
)
def test_rows_with_few_blocks_have_two_backward_kernels(head_dim, blocks, gpu, fused, monkeypatch):
    monkeypatch.setattr(hopper_select, "_gpu", lambda device: gpu)
    spec = spec_like(head_dim=head_dim, deterministic=False)
    assert uses_fused_backward(masks.full()(128 * blocks).table(), spec) == fused


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GH200 480GB", "H200"),
        ("NVIDIA H20", "H200"),
    ],
)
def test_the_name_of_a_gpu_chooses_the_thresholds(name, gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert hopper_select._gpu.__wrapped__(torch.device("cuda", 0)) == gpu
    assert hopper_select._gpu.__wrapped__(torch.device("cpu")) == "H200"


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "words"),
    [
        (128, 136, "value_dim is 136, needs at most 128, or a head_dim above 128"),
        (64, 84, "value_dim is 84, needs a multiple of 8 up to 256"),
        (192, 264, "value_dim is 264, needs a multiple of 8 up to 256"),
    ],
)
def test_says_which_dims_values_may_have(head_dim, value_dim, words):
    assert hopper.why_not(replace(SPEC, head_dim=head_dim, value_dim=value_dim), MASK) == [words]


def test_reads_no_small_tiles_of_wide_values_or_keys():
    spec = replace(SPEC, head_dim=192, value_dim=128, block_size=(64, 64))
    for wide in (spec, replace(spec, value_dim=192)):
        assert hopper.block_size_for(wide, mask_that_covers(0.25)) == (128, 128)
    narrow = replace(spec, head_dim=64)
    assert hopper.block_size_for(narrow, mask_that_covers(0.25)) == (64, 64)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": torch.float32}, ["dtype", "torch.float32", "torch.bfloat16"]),
        ({"head_dim": 84}, ["head_dim", "84", "multiple of 8", "256"]),
        ({"head_dim": 264}, ["head_dim", "264", "256"]),
        ({"device": torch.device("cpu")}, ["device", "cpu", "cuda"]),
    ],
)
def test_says_what_came_and_what_is_allowed(change, words):
    (reason,) = hopper.why_not(spec_like(**change), MASK)
    assert all(word in reason for word in words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"block_size": (256, 128)}, ["(256, 128)", "(128, 128)"]),
        ({"block_size": (64, 128)}, ["(64, 128)", "(64, 64)", "at most 128"]),
        ({"block_size": (64, 64), "head_dim": 136}, ["(64, 64)", "at most 128"]),
    ],
)
def test_says_which_blocks_a_device_may_select(change, words):
    (reason,) = hopper.why_not(spec_like(**change), DYNAMIC)
    assert all(word in reason for word in ("block_size", *words))


def test_auto_takes_the_first_backend_that_has_no_reason_against_it(monkeypatch):
    for backend in (hopper, triton):
        monkeypatch.setattr(backend, "why_not", lambda spec, mask: [])
    monkeypatch.setattr(backends, "BACKENDS", (hopper, triton))
    scattered, mask = spec_like(block_size=(32, 32)), mask_that_covers(0.1, 0.3)
    assert [select(SPEC, MASK), select(scattered, mask)] == [hopper, triton]
    assert select(replace(scattered, backend="hopper"), mask) == hopper


@pytest.mark.parametrize("block_size", [(64, 64), (128, 128)])
def test_serves_blocks_of_its_own_sizes_that_the_device_chooses(block_size):
    mask = masks.full()(256, block_size).select(
        torch.ones(256 // block_size[0], 256 // block_size[1]) > 0
    )
    spec = spec_like(block_size=block_size)
    assert hopper.why_not(spec, mask) == hopper.auto_skip(spec, mask) == []
    assert hopper.block_size_for(spec, mask) == block_size
    assert ("tiles" in described(spec, mask)) == (block_size == (64, 64))


def described(spec, mask):
    """What describe says of a call that reads the tables that the backend asks for."""
    sizes = (hopper.block_size_for(spec, mask), hopper.forward_block_size_for(spec, mask))
    table, forward_table = (SimpleNamespace(block_size=size) for size in sizes)
    forward = None if sizes[0] == sizes[1] else SimpleNamespace(table=forward_table)
    call = SimpleNamespace(spec=spec, table=table, plan=SimpleNamespace(forward=forward))
    return hopper.describe(call, mask, *[torch.empty(0)] * 3)


def test_describes_the_tables_of_the_call_whatever_would_be_chosen_now(monkeypatch):
    query = torch.empty(1, 2, 384, 64, dtype=torch.float16)
    for limit, later, tiles in ((math.inf, 0.0, "(192, 128)"), (0.0, math.inf, None)):
        monkeypatch.setattr(configs, "MAX_TIME_RATIO_OF_192", limit)
        mask = masks.full()(384)
        call = Call(make_plan(spec_of(query, query, mask), hopper, None, mask))
        monkeypatch.setattr(configs, "MAX_TIME_RATIO_OF_192", later)
        notes = hopper.describe(call, mask, query, query, query)
        assert notes.get("tiles of the forward pass") == tiles


@pytest.mark.parametrize("block_size", [(16, 16), (32, 64), (256, 32), (256, 64)])
@pytest.mark.parametrize(
    ("head_dim", "large", "small", "tile"),
    [
        *((64, 0.9, 1.0, 64), (64, 0.97, 1.0, 128), (64, 0.48, 0.51, 64), (64, 0.5, 0.51, 128)),
        *((32, 0.9, 1.0, 64), (72, 0.89, 1.0, 64), (72, 0.9, 1.0, 128)),
        *((96, 0.89, 1.0, 64), (128, 0.9, 1.0, 128), (128, 0.5, 0.6, 64), (128, 0.55, 0.6, 128)),
        (192, 0.25, 1.0, 128),
    ],
)
def test_reads_small_tiles_where_larger_ones_are_filled_less(
    head_dim, large, small, tile, block_size
):
    spec = spec_like(head_dim=head_dim, block_size=block_size)
    mask = mask_that_covers(large, small)
    assert hopper.why_not(spec, mask) == []
    assert hopper.block_size_for(spec, mask) == (tile, tile)
    tiles = described(spec, mask)["tiles"]
    covered = f"{small if tile == 64 else large:.0%} of them covered by blocks of {block_size}"
    assert tiles.startswith(f"{(tile, tile)}, {covered}")
    assert ("share a multiprocessor" in tiles) == (tile == 64)


GROUPED = {"batch": 1, "heads": 8, "kv_heads": 2, "q_len": 64 * 132, "block_size": (64, 64)}


@pytest.mark.parametrize(
    ("change", "block", "packed"),
    [
        *(({}, 64, 2), ({}, 128, 1), ({}, 192, 1), ({"kv_heads": 4}, 64, 2)),
        *(({"kv_heads": 8}, 64, 1), ({"heads": 6}, 64, 1), ({"kv_heads": 1}, 64, 2)),
        *(({"mask_heads": 8, "mask_group": 4}, 64, 2), ({"mask_heads": 8}, 64, 1)),
        *(({"heads": 6, "mask_heads": 6, "mask_group": 3}, 64, 1), ({"head_dim": 40}, 64, 1)),
        *(({"head_dim": 72}, 64, 2), ({"value_dim": 128, "head_dim": 64}, 64, 2)),
        *(({"q_len": 64 * 66}, 64, 2), ({"q_len": 64 * 65}, 64, 1), ({"batch": 0}, 64, 1)),
        ({"dropout_p": 0.1, "has_key_lengths": True, "max_logits": True}, 64, 2),
    ],
)
def test_query_heads_that_share_a_key_head_and_its_mask_are_packed(change, block, packed):
    spec = spec_like(**GROUPED | {"head_dim": 128} | change)
    assert hopper_select.packed_heads(spec, block) == packed
    if block == 64:
        assert ("forward" in described(spec, mask_that_covers(0.1))) == (packed == 2)


LONG = {"batch": 4, "heads": 32, "q_len": 8192}


@pytest.mark.parametrize(
    ("change", "filled", "tile"),
    [
        *(({}, 0.96, 192), ({}, 0.94, 128), ({"head_dim": 40}, 1.0, 192), ({}, None, 128)),
        *(({"head_dim": 72}, 1.0, 128), ({"value_dim": 72}, 1.0, 128), ({"batch": 0}, 1.0, 128)),
        *(({"batch": 1}, 0.98, 192), ({"batch": 1, "heads": 8}, 0.98, 128)),  # 10 and 3 waves
        *(({"dropout_p": 0.1}, 1.0, 128), ({"softcap": 5.0}, 1.0, 128), ({"bias": True}, 1, 128)),
        ({"block_size": (64, 64)}, 1.0, 64),
    ],
)
def test_the_forward_pass_reads_higher_tiles_at_64_dims(change, filled, tile):
    full = 0.5 if "block_size" in change else 1.0
    coverage = {(192, 128): filled, (128, 128): full, (64, 64): 1.0}
    unequal = torch.tensor([[1, 3]])
    mask = SimpleNamespace(coverage=coverage.get, blocks_per_row=lambda: unequal)
    spec = spec_like(**LONG | change)
    assert hopper.forward_block_size_for(spec, mask) == (tile, min(tile, 128))
    assert ("tiles of the forward pass" in described(spec, mask)) == (tile == 192)


@pytest.mark.parametrize(
    ("seq_len", "heads", "measured"),
    [
        *((8192, 128, 0.925), (8192, 32, 0.966), (8192, 12, 0.924), (8192, 8, 1.041)),
        *((4096, 16, 1.044), (2048, 512, 0.960), (16384, 6, 0.911), (1024, 768, 1.039)),
    ],
)
def test_the_predicted_gain_of_higher_tiles_on_full_masks_is_the_measured_one(
    seq_len, heads, measured
):
    """The measurements are those of the notebook, of an H100."""
    spec = spec_like(batch=1, heads=heads, q_len=seq_len)
    ratio = hopper_select.time_ratio_of_high_tiles(spec, masks.full()(seq_len))
    assert ratio == pytest.approx(measured, rel=0.025)


ONE_MISSING = masks.full() - masks.block_pattern(lambda q, k: (q == 10) & (k == 20))


@pytest.mark.parametrize(
    ("seq_len", "heads", "pattern", "tile"),
    [
        *((8192, 16, each, 128) for each in (masks.full(), ONE_MISSING, masks.local(2000))),
        *((8192, 16, masks.local(1500), 128), (16_384, 8, masks.local(3000), 128)),
        *((8192, 12, each, 192) for each in (masks.full(), ONE_MISSING, masks.local(2000))),
    ],
)
def test_balanced_masks_leave_as_much_of_the_last_wave_idle_as_the_full_mask(
    seq_len, heads, pattern, tile
):
    spec = spec_like(batch=1, heads=heads, q_len=seq_len)
    mask, ratio = pattern(seq_len), hopper_select.time_ratio_of_high_tiles
    assert ratio(spec, mask) == pytest.approx(ratio(spec, masks.full()(seq_len)), rel=0.035)
    assert hopper.forward_block_size_for(spec, mask) == (tile, 128)
    batch = masks.MaskBatch.from_masks([mask, mask])
    assert ratio(replace(spec, batch=2, heads=heads // 2), batch) == ratio(spec, mask)


@pytest.mark.parametrize("pattern", [masks.causal(), masks.random(0.5)])
def test_coverage_of_higher_tiles_is_not_computed_where_the_last_wave_rules_them_out(pattern):
    mask = pattern(8192)
    for heads, computed in ((4, False), (128, True)):
        hopper.forward_block_size_for(spec_like(batch=1, heads=heads, q_len=8192), mask)
        assert (("coverage", (192, 128)) in mask.tables) == computed


def test_an_empty_batch_with_a_full_mask_has_a_plan():
    spec = spec_like(batch=0, device=torch.device("cpu"))
    plan = make_plan(spec, hopper, None, MASK)
    assert (plan.table.block_size, plan.forward) == ((128, 128), None)


@pytest.mark.parametrize("seq_len", [8192, 16384])
def test_full_and_causal_masks_fill_higher_tiles_and_scattered_blocks_do_not(seq_len):
    spec = spec_like(**LONG)
    found = {
        pattern: hopper.forward_block_size_for(spec, masks.parse(pattern)(seq_len))
        for pattern in ("full()", "causal()", "random(0.25)", "local(500)")
    }
    higher = {"full()": True, "causal()": True, "random(0.25)": False, "local(500)": False}
    assert {pattern: tile == (192, 128) for pattern, tile in found.items()} == higher


@pytest.mark.parametrize("block_size", [(128, 128), (256, 128), (512, 512)])
def test_reads_large_tiles_of_large_blocks(block_size):
    spec = spec_like(block_size=block_size)
    assert hopper.block_size_for(spec, MASK) == (128, 128)
    assert hopper.auto_skip(spec, MASK) == []


@pytest.mark.parametrize(("head_dim", "words"), [(64, None), (128, None), (192, "25%")])
def test_auto_takes_scattered_blocks_of_64_where_they_need_not_be_put_together(head_dim, words):
    spec = spec_like(head_dim=head_dim, block_size=(64, 64), deterministic=False)
    reasons = hopper.auto_skip(spec, mask_that_covers(0.25))
    assert [words in reason for reason in reasons] == [True] * (words is not None)


@pytest.mark.parametrize(
    ("large", "small", "change", "words"),
    [
        (0.4, 0.42, {}, None),
        (0.39, 0.41, {}, ("39%", "(128, 128)", "40%")),
        (0.1, 0.35, {}, None),
        (0.1, 0.34, {}, ("34%", "(64, 64)", "35%")),
        (0.1, 0.35, {"head_dim": 64}, ("35%", "(64, 64)", "40%")),
        (0.3, 0.55, {"block_size": (32, 32)}, None),
        (0.3, 0.5, {"block_size": (32, 32)}, ("(32, 32)", "50%", "52%")),
    ],
)
def test_auto_skips_tiles_that_are_hardly_covered(large, small, change, words):
    spec = spec_like(**({"head_dim": 128, "block_size": (16, 256)} | change))
    reasons = hopper.auto_skip(spec, mask_that_covers(large, small))
    assert [all(word in reason for word in words) for reason in reasons] == [True] * bool(words)


def test_one_kernel_of_all_gradients_is_taken_where_it_pays_and_is_allowed():
    allowed = spec_like(deterministic=False)
    assert hopper.auto_skip(allowed, MASK) == []
    many, few = (masks.full()(128 * blocks).table() for blocks in (8, 4))
    assert uses_fused_backward(many, allowed)
    call = Call(Plan(allowed, hopper, many))
    assert "no fixed order" in hopper.describe(call, MASK, QUERY, QUERY, QUERY)["backward"]
    assert not uses_fused_backward(few, allowed)
    assert not uses_fused_backward(masks.full()(128 * 7, block_size=64).table(), allowed)
    assert not uses_fused_backward(many, SPEC)
    assert uses_fused_backward(many, replace(allowed, head_dim=128, value_dim=128))
    assert uses_fused_backward(many, replace(allowed, head_dim=40, value_dim=40))
    assert not uses_fused_backward(many, replace(allowed, head_dim=136, value_dim=136))
    assert uses_fused_backward(many, replace(allowed, dropout_p=0.1))
    wide = replace(allowed, dropout_p=0.1, head_dim=128, value_dim=128)
    assert not uses_fused_backward(many, wide)


def test_serves_changes_of_scores_and_masks_of_each_batch_element(monkeypatch):
    monkeypatch.setattr(backends, "BACKENDS", (hopper,))
    for_torch = ScoreFunction("for torch alone", lambda score, *_: (score, 1.0))
    both = ScoreFunction("for Triton too", for_torch.torch, for_torch.torch)
    reading = ScoreFunction("of a tensor", both.torch, both.torch, ((float, 1),))
    table, as_before = masks.full()(128 * 7).table(), {"mask_batch": 2, "max_logits": True}
    for change in ("softcap", 5.0), ("bias", True), ("score", both), ("score", reading):
        spec = spec_like(deterministic=False, **dict([change]))
        assert select(spec, MASK) == hopper
        assert not uses_fused_backward(table, spec)
    for change in as_before.items():
        spec = spec_like(deterministic=False, **dict([change]))
        assert select(spec, MASK) == hopper
        assert uses_fused_backward(table, spec)
    for name in ("differentiates_bias", "differentiates_blocks"):
        with pytest.raises(BackendError, match="gradient of b"):
            select(spec_like(bias=True, **{name: True}), MASK)
    with pytest.raises(BackendError, match="'for torch alone'"):
        select(spec_like(score=for_torch), MASK)


def with_a_tile_of_its_own(score, batch, head, query, key):
    return score, tl.zeros_like(score) + 1.0


def test_refuses_score_functions_that_make_tiles():
    ScoreFunction("zeros", lambda score, *_: (score, 1.0), JITFunction(with_a_tile_of_its_own))
    (reason,) = hopper.why_not(spec_like(score="zeros"), MASK)
    assert "'zeros', which calls zeros_like" in reason


def test_refuses_other_architectures(monkeypatch):
    monkeypatch.setattr(hopper_select, "_capability", lambda device: (10, 0))
    (reason,) = hopper.why_not(SPEC, MASK)
    assert "10.0" in reason
    assert "9.0" in reason


def test_lists_every_reason():
    change = {"dtype": torch.float64, "head_dim": 7, "device": torch.device("cpu")}
    assert len(hopper.why_not(spec_like(**change), MASK)) == 3


def test_imports_without_triton():
    program = """
import sys
sys.modules["triton"] = None
import torch
from sparseflash.backends import hopper
assert hopper.why_not(None, None) == ["triton is not installed"]
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_blocks_that_count_for_one_kernel_are_those_of_a_row_of_keys():
    allowed = spec_like(deterministic=False)
    tall, wide = (masks.full()(n, 128).table() for n in ((3072, 512), (512, 3072)))
    assert uses_fused_backward(tall, allowed)
    assert not uses_fused_backward(wide, allowed)
    chosen_there = masks.DynamicMask.from_blocks(torch.ones(24, 24) > 0).table()
    assert not uses_fused_backward(chosen_there, allowed)


def test_auto_skips_narrow_heads():
    (reason,) = hopper.auto_skip(spec_like(head_dim=32), MASK)
    assert "head_dim is 32" in reason
    assert hopper.why_not(spec_like(head_dim=32), MASK) == []
    assert hopper.auto_skip(spec_like(head_dim=40), MASK) == []


def test_auto_skips_few_queries():
    wide = spec_like(head_dim=128)
    (reason,) = hopper.auto_skip(replace(wide, q_len=16), MASK)
    assert "q_len is 16" in reason
    assert hopper.auto_skip(replace(wide, q_len=17), MASK) == []
