"""What builders cost, and what they refuse."""

import os
import time

import numpy as np
import pytest
import torch

import masks

MILLION = 1 << 20


def takes_less(seconds: float, build) -> bool:
    """CPU time on one thread, which waits for no other, in one of two runs."""

    def once() -> float:
        began = time.process_time()
        build()
        return time.process_time() - began

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return any(once() < seconds for _ in range(2))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("pattern", "seq_len", "limit"),
    [
        (masks.global_tokens(list(range(0, 1 << 16, 800))), 1 << 16, 2),
        (masks.local(64), 128 * MILLION, 3),
        (masks.causal(), 128 * MILLION, 3),
        (masks.global_tokens(128), 16 * MILLION, 2),
        (masks.neighborhood2d(4, 1000), MILLION, 0.5),
        (masks.documents([10] * 3000, pattern=masks.causal()), 30_000, 3),
        (masks.dilated(4, 1 << 16), MILLION, 2),
        (masks.random(0.5), 1 << 18, 5),
        (masks.random(0.99), 1 << 18, 5),
        (masks.strided(2), 1 << 18, 5),
        (masks.neighborhood2d(1, 10_000), 1000, 1),
        (masks.strided(2, window=10**10), 1 << 16, 2),
    ],
    ids=repr,
)
def test_costs_are_in_proportion_to_what_is_built(pattern, seq_len, limit):
    assert takes_less(limit, lambda: pattern(seq_len, 128))


@masks.pattern
def near_in_a_plane(q, k):
    return (q // 256 - k // 256) ** 2 + (q % 256 - k % 256) ** 2 <= 64**2


@pytest.mark.slow
def test_costs_of_a_rule_with_many_partial_blocks():
    made = []
    assert takes_less(6, lambda: made.append(near_in_a_plane(1 << 16, 128)))  # 3 of two cores
    assert made[0].partial_blocks > 0.4 * 512**2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pattern", "limit"),
    [
        (masks.global_tokens(np.random.default_rng(0).choice(MILLION, 1000, replace=False)), 4),
        (masks.dilated(1000, 1000), 6),
        (masks.dilated(2800, 100), 8),
        (masks.dilated(1 << 16, 4), 6),
        (masks.random(0.5), 5),
    ],
    ids=["global_tokens", "far dilated", "dilated", "wide dilated", "random"],
)
def test_costs_at_a_million_tokens(pattern, limit, request):
    made = []
    assert takes_less(limit, lambda: made.append(pattern(MILLION, 128)))
    if request.node.callspec.id in ("global_tokens", "dilated"):  # that has the most blocks
        began = time.process_time()
        made[0].table()
        assert time.process_time() - began < 16  # 8 seconds of two cores


@pytest.mark.parametrize(
    "pattern",
    [
        masks.strided(2),
        masks.random(0.3),
        masks.random(0.6),
        masks.dilated(1 << 16, 2),
        masks.dilated(1 << 11, 64),
        masks.global_tokens(range(0, 1 << 17, 50)),
    ],
    ids=lambda pattern: pattern.name[:20],
)
def test_masks_larger_than_the_machine_are_refused(pattern, monkeypatch):
    monkeypatch.setattr(os, "sysconf", lambda _: 2**14)
    assert pattern(4096, 16).density > 0.2
    with pytest.raises(ValueError, match=r"would take .* GiB at this length"):
        pattern(1 << 17, 16)


@pytest.mark.parametrize("block_size", [16, (16, 32), (64, 16)])
@pytest.mark.parametrize("tokens", [[3], [0, 5, 6, 40, 41, 99, 10**6], list(range(100)), range(2)])
def test_scattered_global_tokens(tokens, block_size):
    q, k = (torch.isin(torch.arange(n), torch.tensor(list(tokens))) for n in (100, 75))
    mask = masks.global_tokens(tokens)((100, 75), block_size)
    assert torch.equal(mask.to_dense(), q[:, None] | k)


@pytest.mark.parametrize("block_size", [16, (16, 32), (64, 16)])
@pytest.mark.parametrize(("window", "dilation"), [(2, 100), (4, 33), (3, 250), (1, 10**6)])
def test_dilations_longer_than_a_block(window, dilation, block_size):
    offset = torch.arange(500) - torch.arange(600)[:, None]
    expected = (offset.abs() <= window * dilation) & (offset % dilation == 0)
    mask = masks.dilated(window, dilation, align="top-left")((600, 500), block_size)
    assert torch.equal(mask.to_dense(), expected)


HUGE = 2**63 - 1


@pytest.mark.parametrize(
    ("huge", "same"),
    [
        (masks.local(HUGE), masks.full()),
        (masks.local((0, HUGE)), ~masks.local((HUGE, 0)) | masks.local(0)),
        (masks.local((HUGE, 0)), masks.causal()),
        (masks.dilated(HUGE, 1), masks.full()),
        (masks.dilated(HUGE, HUGE), masks.local(0)),
        (masks.dilated(2**62, 4), masks.dilated(1000, 4)),
        (masks.global_tokens(HUGE), masks.full()),
        (masks.global_tokens([3, HUGE]), masks.global_tokens([3])),
        (masks.strided(HUGE), masks.strided(1000)),
        (masks.strided(3, window=HUGE), masks.full()),
        (masks.neighborhood2d(HUGE, 2), masks.neighborhood2d(1000, 2)),
        (masks.neighborhood2d(3, HUGE), masks.full()),
        (masks.butterfly(2**62), masks.butterfly()),
        (masks.bigbird(HUGE, 0, 0), masks.full()),
        (masks.bigbird(1, HUGE, 0), masks.full()),
        (masks.bigbird(1, 0, HUGE), masks.full()),
        (masks.longformer(HUGE, HUGE), masks.full()),
    ],
    ids=repr,
)
def test_arguments_up_to_63_bits_are_right(huge, same):
    assert huge(300, 16) == same(300, 16)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (masks.local, "window"),
        (masks.strided, "stride"),
        (masks.global_tokens, "tokens"),
        (masks.butterfly, "max_stride"),
        (lambda n: masks.dilated(1, n), "dilation"),
        (lambda n: masks.global_tokens([n]), "tokens"),
        (lambda n: masks.random(0.5, seed=n), "seed"),
        (lambda n: masks.full()(n), "seq_len"),
        (lambda n: masks.tree([-1], n), "prefix_len"),
        (lambda n: masks.documents([n]), "lengths"),
    ],
)
def test_larger_arguments_are_refused_by_name(make, named):
    with pytest.raises(ValueError, match=rf"^{named}(\[0\])? must be at most"):
        make(2**63)


def test_lengths_that_kernels_cannot_number_are_refused():
    with pytest.raises(ValueError, match="seq_len must be at most 2147483647 tokens"):
        masks.full()(2**31)
