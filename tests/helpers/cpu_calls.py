"""Calls of the backend "cpu", checked against float64, and what they start and copy."""

import torch
from torch.profiler import ProfilerActivity, profile

from masks import BlockMask
from sparseflash.backends import cpu
from sparseflash.dispatch.autograd import run
from sparseflash.testing import check_attention, poisoned_empty
from tests.helpers.calls import call_on

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PATTERNS = {
    "full": lambda q, k: q >= 0,
    "causal": lambda q, k: q >= k,
    "local": lambda q, k: (q - k).abs() <= 20,
    "butterfly": lambda q, k: ((q // 16) ^ (k // 16)).bitwise_and((q // 16 ^ k // 16) - 1) == 0,
    "documents": lambda q, k: q // 50 == k // 50,
    "scattered": lambda q, k: (q * 7919 + k * 104729) % 11 < 3,
    "no keys": lambda q, k: (k < 40) & (q % 48 >= 24),
    "nothing": lambda q, k: q < 0,
}


def dense_mask(pattern: str, q_len: int, k_len: int) -> torch.Tensor:
    pairs = PATTERNS[pattern](torch.arange(q_len).view(-1, 1), torch.arange(k_len))
    return pairs.expand(q_len, k_len)


def mask_of(dense: torch.Tensor, block_size=16) -> BlockMask:
    return BlockMask.from_dense(dense, block_size)


def attention_with(mask, seed=0, **options):
    """fn(query, key, value) -> (out, lse) on the cpu backend."""

    def attention(query, key, value):
        return run(call_on(cpu, query, key, mask, seed=seed, **options), query, key, value)

    return attention


def check(dense, inputs, block_size=16, **options):
    query, key, value, grad_out = inputs
    attention = attention_with(mask_of(dense, block_size), **options)
    with poisoned_empty():
        return check_attention(attention, query, key, value, dense, grad_out=grad_out, **options)


def results_of(attention, query, key, value, grad_out):
    inputs = [x.detach().clone().requires_grad_() for x in (query, key, value)]
    out, lse = attention(*inputs)
    return out, lse, *torch.autograd.grad((out, lse), inputs, (grad_out, torch.ones_like(lse)))


def refuse_keys(take):
    def taken(workspace, name, shape, dtype):
        assert name not in ("key", "value")
        return take(workspace, name, shape, dtype)

    return taken


def operations(function):
    """How many operations of torch a function starts, those within others counted too."""
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as recorded:
        function()
    events = recorded.events()
    assert events
    return sum(event.name.startswith("aten::") for event in events)
