"""Which calls the Hopper kernels refuse, and what they say."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import masks
from sparseflash.backends import BACKENDS, hopper, select
from sparseflash.spec import AttentionSpec

SPEC = AttentionSpec(
    *(1, 2, 2, 256, 256, 64, torch.bfloat16, torch.device("cuda", 0)),
    *((128, 128), 1, 0.125, 0.0, False),
)


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
        ({"block_size": (64, 64), "fill": None}, ["block_size", "(64, 64)", "(128, 128)"]),
    ],
)
def test_says_what_came_and_what_is_allowed(change, words):
    (reason,) = hopper.why_not(replace(SPEC, **change))
    assert all(word in reason for word in words)


def test_auto_takes_the_first_backend_that_has_no_reason_against_it(monkeypatch):
    select.cache_clear()
    backends = [replace(b, why_not=lambda spec: []) for b in BACKENDS if b.name != "cpu"]
    monkeypatch.setattr("sparseflash.backends.BACKENDS", backends)
    scattered = replace(SPEC, block_size=(32, 32), fill=0.1)
    assert [select("auto", spec).name for spec in (SPEC, scattered)] == ["hopper", "triton"]
    assert select("hopper", scattered).name == "hopper"
    select.cache_clear()


@pytest.mark.parametrize("block_size", [(16, 16), (32, 64), (256, 32), (256, 256)])
def test_reads_tables_of_its_own_blocks(block_size):
    spec = replace(SPEC, block_size=block_size, fill=0.25)
    assert hopper.why_not(spec) == []
    assert hopper.tiling(spec) == (128, 128)
    described = hopper.describe(*(torch.empty(0),) * 3, None, spec)
    assert "25%" in described["tiles"]
    assert str(block_size) in described["tiles"]


@pytest.mark.parametrize("block_size", [(64, 64), (64, 128), (256, 64)])
@pytest.mark.parametrize(
    ("head_dim", "fill", "tile"),
    [(64, 0.25, 64), (96, 0.25, 64), (128, 0.89, 64), (128, 0.9, 128), (192, 0.25, 128)],
)
def test_reads_blocks_of_64_where_they_fill_little_of_larger_ones(
    head_dim, fill, tile, block_size
):
    spec = replace(SPEC, head_dim=head_dim, block_size=block_size, fill=fill)
    assert hopper.why_not(spec) == []
    assert hopper.tiling(spec) == (tile, tile)
    described = hopper.describe(*(torch.empty(0),) * 3, None, spec)
    assert str((tile, tile)) in described["tiles"]


@pytest.mark.parametrize(("head_dim", "words"), [(64, None), (128, None), (192, "25%")])
def test_auto_takes_scattered_blocks_of_64_where_they_need_not_be_put_together(head_dim, words):
    spec = replace(SPEC, head_dim=head_dim, block_size=(64, 64), fill=0.25, deterministic=False)
    reasons = hopper.pass_over(spec)
    assert [words in reason for reason in reasons] == [True] * (words is not None)


def test_auto_passes_over_tiles_that_are_hardly_filled():
    wide = replace(SPEC, head_dim=128)
    assert hopper.pass_over(replace(wide, block_size=(16, 16), fill=0.95)) == []
    assert hopper.pass_over(replace(wide, block_size=(256, 256))) == []
    (reason,) = hopper.pass_over(replace(wide, block_size=(16, 256), fill=0.1))
    assert all(words in reason for words in ("(16, 256)", "10%", "(128, 128)", "40%"))


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
from sparseflash.spec import AttentionSpec
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
    chosen_there = masks.BlockMask.from_blocks(torch.ones(24, 24) > 0).table()
    assert not hopper.fuses(chosen_there, allowed)


def test_auto_passes_over_few_queries_and_takes_tiles_that_are_just_filled():
    wide = replace(SPEC, head_dim=128)
    (reason,) = hopper.pass_over(replace(wide, q_len=16))
    assert "q_len is 16" in reason
    assert hopper.pass_over(replace(wide, q_len=17)) == []
    assert hopper.pass_over(replace(wide, block_size=(16, 16), fill=0.4)) == []
