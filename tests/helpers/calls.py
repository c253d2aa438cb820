"""Calls made by hand, for tests of one backend: nothing selects it, and no more than score
tensors is checked.
"""

import math
from dataclasses import replace
from types import SimpleNamespace

import torch

from sparseflash.backends.hopper import configs
from sparseflash.dispatch.call import Call, Plan, empty_max_logits
from sparseflash.dispatch.plan import find_plan
from sparseflash.dispatch.spec import AttentionSpec, CallFacts
from sparseflash.options import OPTION_NAMES, AttentionOptions
from sparseflash.score import checked_score_tensors

# configs.MIN_FUSED_BLOCKS with which the fused backward kernel of `hopper` runs for every mask.
ALWAYS_FUSED = dict.fromkeys(configs.MIN_FUSED_BLOCKS, dict.fromkeys(configs.FUSED_CONFIGS, 0.0))
# configs.MIN_PLANNED_BLOCKS with which it adds to dQ in a planned order wherever it can.
ALWAYS_PLANNED = dict.fromkeys(configs.MIN_FUSED_BLOCKS, 0.0)


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
    # Not their sizes: score tensors of a compiled call may have few entries.
    call.score_tensors = checked_score_tensors(spec.score, score_tensors, query, (0, 0), False)
    return call


def gradients_in_memory(
    backend, query, key, value, grad_out, mask, needs=(True, True, True), **facts
) -> list[tuple]:
    """(gradient, the same where there is memory for it, whether the backend returned this memory),
    of query, key and value. The memory of that of query has more heads, and that of the others has
    a row for each token.
    """
    call = call_on(backend, query, key, mask, value, **facts)
    saved = (query, key, value, *call.forward(query, key, value))
    needs = (*needs, False, False, False)
    expected = call.backward(grad_out, None, saved, needs)
    sizes = [(len(x), x.shape[1], x.shape[3]) for x in (key, value)]
    memory = key.new_full((key.shape[2], sum(map(math.prod, sizes))), math.nan)
    parts = memory.split([math.prod(size) for size in sizes], 1)
    views = [
        x.unflatten(1, size).permute(1, 2, 0, 3) for x, size in zip(parts, sizes, strict=True)
    ]
    more_heads = query.new_full((len(query), query.shape[1] + 2, *query.shape[2:]), math.nan)
    views = (more_heads[:, 1:-1], *views)
    found = replace(call, gradients=views).backward(grad_out, None, saved, needs)
    assert all(x is None or x is view for x, view in zip(found, views, strict=False))
    for i in range(3 * all(needs[:3])):  # memory for one of them only
        alone = tuple(view if i == j else None for j, view in enumerate(views))
        again = replace(call, gradients=alone).backward(grad_out, None, saved, needs)
        for x, y in zip(again[:3], expected[:3], strict=True):
            assert x is y is None or torch.equal(x, y)
    of_backend = backend.backward(replace(call, gradients=views), grad_out, None, saved, needs)
    written = [any(x is view for view in views) for x in of_backend[:3]]
    return [*zip(expected[:3], found[:3], written, strict=True)]


def check_gradients_in_memory(*arguments, written=True, **facts):
    """Checks that gradients in given memory have the bits of others, with and without need.

    written: whether the backend writes there itself
    """
    for needs in ((True, True, True), (False, True, True), (True, False, True)):
        found = gradients_in_memory(*arguments, needs=needs, **facts)
        for i, (expected, gradient, by_backend) in enumerate(found):
            if not needs[i]:
                assert expected is gradient is None
                continue
            assert torch.equal(gradient, expected)
            assert by_backend == written


def mask_that_covers(large, small=1.0):
    """What a backend asks of a mask: how far its blocks cover tiles of 128, and of 64 tokens. Its
    rows have unequal lengths.
    """
    cover, counts = {(128, 128): large}, torch.tensor([[1, 3]])
    return SimpleNamespace(
        coverage=lambda tile: cover.get(tile, small), blocks_per_row=lambda: counts
    )
