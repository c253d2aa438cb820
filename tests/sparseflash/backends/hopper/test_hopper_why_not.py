"""Which calls the Hopper kernels refuse, and what they say."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import masks
from sparseflash.backends import BACKENDS, hopper, select
from sparseflash.dispatch.spec import AttentionSpec

SPEC = AttentionSpec(
    *(1, 2, 2, 256, 256, 64, torch.bfloat16, torch.device("cuda", 0)),
    *((128, 128), 1, 0.125, 0.0, False),
)
CHOSEN = {"fill": None, "small_fill": None}  # by the device


@pytest.fixture(autouse=True)
def capability(monkeypatch):
    monkeypatch.setattr(hopper, "_capability", lambda device: (9, 0))


def test_serves_a_plain_call_and_one_with_dropout():
    assert hopper.why_not(SPEC) == hopper.why_not(replace(SPEC, dropout_p=0.5)) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": torch.float32}, ["dtype", "torch.float32", "torch.bfloat16"]),
        ({"head_dim": 80}, ["head_dim", "80", "(64, 96, 128, 192, 256)"]),
        ({"device": torch.device("cpu")}, ["device", "cpu", "cuda"]),
        (CHOSEN | {"block_size": (256, 128)}, ["block_size", "(256, 128)", "(128, 128)"]),
        (CHOSEN | {"block_size": (64, 128)}, ["block_size", "(64, 128)", "(64, 64)", "96, 128"]),
        (
            CHOSEN | {"block_size": (64, 64), "head_dim": 192},
            ["block_size", "(64, 64)", "96, 128"],
        ),
    ],
)
def test_says_what_came_and_what_is_allowed(change, words):
    (reason,) = hopper.why_not(replace(SPEC, **change))
    assert all(word in reason for word in words)


def test_auto_takes_the_first_backend_that_has_no_reason_against_it(monkeypatch):
    select.cache_clear()
    backends = [replace(b, why_not=lambda spec: []) for b in BACKENDS if b.name != "cpu"]
    monkeypatch.setattr("sparseflash.backends.BACKENDS", backends)
    scattered = replace(SPEC, block_size=(32, 32), fill=0.1, small_fill=0.3)
    assert [select("auto", spec).name for spec in (SPEC, scattered)] == ["hopper", "triton"]
    assert select("hopper", scattered).name == "hopper"
    select.cache_clear()


@pytest.mark.parametrize("block_size", [(64, 64), (128, 128)])
def test_serves_blocks_of_its_own_sizes_that_the_device_chooses(block_size):
    # as masks.DynamicMask.coverage has them
    fills = {"fill": None} if block_size == (64, 64) else {"small_fill": None}
    spec = replace(SPEC, block_size=block_size, **fills)
    assert hopper.why_not(spec) == hopper.pass_over(spec) == []
    assert hopper.tiling(spec) == block_size
    described = hopper.describe(*(torch.empty(0),) * 3, None, spec)
    assert ("tiles" in described) == (block_size == (64, 64))


@pytest.mark.parametrize("block_size", [(16, 16), (32, 64), (256, 32), (256, 64)])
@pytest.mark.parametrize(
    ("head_dim", "fill", "small_fill", "tile"),
    [
        *((64, 0.9, 1.0, 64), (64, 0.97, 1.0, 128), (64, 0.48, 0.51, 64), (64, 0.5, 0.51, 128)),
        *((96, 0.89, 1.0, 64), (128, 0.9, 1.0, 128), (128, 0.5, 0.6, 64), (128, 0.55, 0.6, 128)),
        (192, 0.25, 1.0, 128),
    ],
)
def test_reads_small_tiles_where_larger_ones_are_filled_less(
    head_dim, fill, small_fill, tile, block_size
):
    spec = replace(
        SPEC, head_dim=head_dim, block_size=block_size, fill=fill, small_fill=small_fill
    )
    assert hopper.why_not(spec) == []
    assert hopper.tiling(spec) == (tile, tile)
    described = hopper.describe(*(torch.empty(0),) * 3, None, spec)["tiles"]
    covered = f"{small_fill if tile == 64 else fill:.0%} of them covered by blocks of {block_size}"
    assert described.startswith(f"{(tile, tile)}, {covered}")
    assert ("share a multiprocessor" in described) == (tile == 64)


@pytest.mark.parametrize("block_size", [(128, 128), (256, 128), (256, 256)])
def test_reads_large_tiles_of_large_blocks(block_size):
    spec = replace(SPEC, block_size=block_size)
    assert hopper.tiling(spec) == (128, 128)
    assert hopper.pass_over(spec) == []


@pytest.mark.parametrize(("head_dim", "words"), [(64, None), (128, None), (192, "25%")])
def test_auto_takes_scattered_blocks_of_64_where_they_need_not_be_put_together(head_dim, words):
    spec = replace(SPEC, head_dim=head_dim, block_size=(64, 64), fill=0.25, deterministic=False)
    reasons = hopper.pass_over(spec)
    assert [words in reason for reason in reasons] == [True] * (words is not None)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"fill": 0.4, "small_fill": 0.42}, None),
        ({"fill": 0.39, "small_fill": 0.41}, ("39%", "(128, 128)", "40%")),
        ({"fill": 0.1, "small_fill": 0.35}, None),
        ({"fill": 0.1, "small_fill": 0.34}, ("34%", "(64, 64)", "35%")),
        ({"fill": 0.1, "small_fill": 0.35, "head_dim": 64}, ("35%", "(64, 64)", "40%")),
        ({"fill": 0.3, "small_fill": 0.55, "block_size": (32, 32)}, None),
        ({"fill": 0.3, "small_fill": 0.5, "block_size": (32, 32)}, ("(32, 32)", "50%", "52%")),
    ],
)
def test_auto_passes_over_tiles_that_are_hardly_filled(change, words):
    spec = replace(SPEC, **({"head_dim": 128, "block_size": (16, 256)} | change))
    reasons = hopper.pass_over(spec)
    assert [all(word in reason for word in words) for reason in reasons] == [True] * bool(words)


def test_one_kernel_of_all_gradients_is_taken_where_it_pays_and_is_allowed():
    allowed = replace(SPEC, deterministic=False)
    assert hopper.pass_over(allowed) == []
    many, few = (masks.full()(128 * blocks).table() for blocks in (7, 6))
    assert hopper.fuses(many, allowed)
    assert "no fixed order" in hopper.describe(*(torch.empty(0),) * 3, many, allowed)["backward"]
    assert not hopper.fuses(few, allowed)
    assert not hopper.fuses(masks.full()(128 * 7, block_size=64).table(), allowed)
    assert not hopper.fuses(many, SPEC)
    assert hopper.fuses(many, replace(allowed, head_dim=128))
    assert not hopper.fuses(many, replace(allowed, head_dim=256))
    assert hopper.fuses(many, replace(allowed, dropout_p=0.1))
    assert not hopper.fuses(many, replace(allowed, dropout_p=0.1, head_dim=128))


def test_refuses_other_architectures(monkeypatch):
    monkeypatch.setattr(hopper, "_capability", lambda device: (10, 0))
    (reason,) = hopper.why_not(SPEC)
    assert "10.0" in reason
    assert "9.0" in reason


def test_lists_every_reason():
    change = {"dtype": torch.float64, "head_dim": 7, "device": torch.device("cpu")}
    assert len(hopper.why_not(replace(SPEC, **change))) == 3


def test_imports_without_triton():
    program = """
import sys
sys.modules["triton"] = None
import torch
import masks
from sparseflash.backends import BACKENDS, hopper, select
from sparseflash.dispatch.spec import AttentionSpec
device = torch.device("cuda")
spec = AttentionSpec(1, 1, 1, 8, 8, 8, torch.float16, device, (16, 16), 1, 1.0, 0.0, False)
assert hopper.why_not(spec) == ["triton is not installed"]
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_blocks_that_count_for_one_kernel_are_those_of_a_row_of_keys():
    allowed = replace(SPEC, deterministic=False)
    tall, wide = (masks.full()(n, 128).table() for n in ((3072, 768), (768, 3072)))
    assert hopper.fuses(tall, allowed)
    assert not hopper.fuses(wide, allowed)
    chosen_there = masks.DynamicMask.from_blocks(torch.ones(24, 24) > 0).table()
    assert not hopper.fuses(chosen_there, allowed)


def test_auto_passes_over_few_queries():
    wide = replace(SPEC, head_dim=128)
    (reason,) = hopper.pass_over(replace(wide, q_len=16))
    assert "q_len is 16" in reason
    assert hopper.pass_over(replace(wide, q_len=17)) == []
