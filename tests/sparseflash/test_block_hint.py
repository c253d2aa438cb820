"""The hint that blocks of another size are predicted to be faster."""

from itertools import count

import pytest
import torch

import masks
from sparseflash import block_hint, io_model
from sparseflash.dispatch.plan import find_plan
from sparseflash.dispatch.spec import CallFacts
from sparseflash.io_model.device import DEVICES

NARROW = masks.local(16)


def plan_for(mask, tokens=4096, heads=2):
    """Makes the plan of a call on a backend whose device is modelled."""
    query = torch.randn(1, heads, tokens, 64)
    find_plan(query, query, query, mask, {"backend": "triton"}, tuple(CallFacts()))


@pytest.fixture
def hints(monkeypatch, caplog):
    monkeypatch.setattr(io_model, "device_like", lambda _: DEVICES["H200"])
    monkeypatch.setattr(block_hint, "_examined", count())
    caplog.set_level("WARNING", logger="sparseflash")
    return caplog


def test_a_mask_of_the_default_block_size_gets_one_hint(hints):
    mask = NARROW(4096)
    plan_for(mask)
    assert "blocks of 64 may be faster than the default (128, 128)" in hints.messages[0]
    plan_for(mask)
    plan_for(mask, heads=4)
    assert len(hints.messages) == 1
    plan_for(NARROW & masks.local(17), 2048)  # a pattern, which is compiled for the call
    assert len(hints.messages) == 2
    plan_for(NARROW & masks.causal(), 2048)
    assert len(hints.messages) == 3


@pytest.mark.parametrize(
    "mask",
    [
        NARROW.with_block_size(128),
        NARROW.with_block_size(64),
        NARROW(4096, 128),
        NARROW.with_block_size(128) & masks.causal(),
        masks.full() - ~NARROW.with_block_size(128),
        masks.stack([NARROW.with_block_size(128), NARROW]),
        masks.causal(),
        masks.butterfly(),
        masks.DynamicMask.from_blocks(torch.ones(32, 32).bool(), 128, 4096),
    ],
    ids=[
        *("chosen by the pattern", "64", "chosen by the call"),
        *("chosen by an operand", "by an inner operand", "by a head"),
        *("causal", "no partial", "dynamic"),
    ],
)
def test_no_hint_where_the_size_was_chosen_or_no_other_is_faster(mask, hints):
    plan_for(mask)
    assert not hints.messages


def test_no_hint_for_a_device_that_is_not_modelled_or_a_mask_that_takes_long(hints, monkeypatch):
    monkeypatch.setattr(block_hint, "MAX_BLOCKS", 10)
    plan_for(NARROW(4096))
    monkeypatch.setattr(block_hint, "MAX_BLOCKS", 2**14)
    monkeypatch.setattr(io_model, "device_like", lambda _: None)
    mask = NARROW(4096)
    plan_for(mask)
    assert not hints.messages
    monkeypatch.setattr(io_model, "device_like", lambda _: DEVICES["H200"])
    plan_for(mask, heads=4)
    assert len(hints.messages) == 1


def test_the_model_is_not_asked_about_masks_that_get_no_hint(hints, monkeypatch):
    monkeypatch.setattr(block_hint, "cost_model", None)
    plan_for(masks.causal()(4096))
    monkeypatch.setattr(block_hint, "MAX_BLOCKS", 10)
    plan_for(NARROW(4096))


def test_only_the_first_masks_of_a_process_are_examined(hints):
    for tokens in range(2048, 2048 + 128 * 8, 128):
        plan_for(NARROW(tokens), tokens)
    assert len(hints.messages) == block_hint.MAX_MASKS
