"""Calls made by hand, for tests of one backend: nothing selects it, and no more than score
tensors is checked.
"""

from types import SimpleNamespace

import torch

from sparseflash.dispatch.call import Call, Plan, empty_max_logits
from sparseflash.dispatch.plan import find_plan
from sparseflash.dispatch.spec import AttentionSpec, CallFacts
from sparseflash.options import OPTION_NAMES, AttentionOptions
from sparseflash.score import checked_score_tensors


def spec_of(query, key, mask, *, value=None, **facts) -> AttentionSpec:
    """value: like key if None; facts: options, and CallFacts."""
    options = AttentionOptions(**{n: facts.pop(n) for n in OPTION_NAMES if n in facts})
    value = key if value is None else value
    return AttentionSpec.from_call(query, key, value, mask, options, CallFacts(**facts))


def plan_of(query, key, value, mask) -> Plan:
    """The plan of a call without options."""
    return find_plan(query, key, value, mask, {}, CallFacts())


def call_on(
    backend, query, key, mask, value=None, *, key_lengths=None, seed=0, bias=None,
    score_tensors=(), forward_tile=None, **facts,
) -> Call:  # fmt: skip
    """The call of a mask in its own blocks; facts: see spec_of.

    forward_tile: block size of the table that the forward pass reads, if it is another
    """
    spec = spec_of(
        *(query, key, mask),
        value=value,
        has_key_lengths=key_lengths is not None,
        bias=bias is not None,
        **facts,
    )
    table = mask.table(query.device).for_groups(spec.mask_group)
    forward = None
    if forward_tile is not None:
        forward_table = mask.table(query.device, forward_tile).for_groups(spec.mask_group)
        forward = Plan(spec, backend, forward_table)
    call = Call(Plan(spec, backend, table, forward=forward), key_lengths, seed, bias)
    call.max_logits = empty_max_logits(query) if spec.max_logits else None
    call.score_tensors = checked_score_tensors(spec.score, score_tensors, query)
    return call


def mask_that_covers(large, small=1.0):
    """What a backend asks of a mask: how far its blocks cover tiles of 128, and of 64 tokens. Its
    rows are uneven.
    """
    cover, counts = {(128, 128): large}, torch.tensor([[1, 3]])
    return SimpleNamespace(
        coverage=lambda tile: cover.get(tile, small), blocks_per_row=lambda: counts
    )
