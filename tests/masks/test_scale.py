"""What compiling a mask costs, in seconds and bytes, at lengths where N x N would not do.

Seconds of a machine of two cores are two seconds of processor time: those do not depend on what
else the machine does.
"""

import time
from collections.abc import Callable

import pytest

import masks

MILLION = 1_048_576
CORES = 2


def processor_seconds(call: Callable[[], object], runs: int) -> float:
    def once() -> float:
        begin = time.process_time()
        call()
        return time.process_time() - begin

    return min(once() for _ in range(runs))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pattern", "seconds", "megabytes"),
    [
        (masks.butterfly(), 1, 2),
        (masks.causal(), 1, 1),
        (masks.full(), 1, 1),
        (masks.local(256), 1, 1),
        (masks.strided(1024), 10, 80),
    ],
    ids=str,
)
def test_a_million_tokens(pattern, seconds, megabytes):
    assert pattern(MILLION, block_size=128).table().nbytes < megabytes * 1e6
    used = processor_seconds(lambda: pattern(MILLION, block_size=128).table(), runs=3)
    assert used < CORES * seconds


@pytest.mark.slow
def test_a_predicate_of_tokens():
    @masks.pattern
    def rings(q, k):
        return (q - k).abs() % 1000 < 10

    assert processor_seconds(lambda: rings(16_384), runs=1) < CORES * 10
