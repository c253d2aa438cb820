"""The fixture of all fuzzers: many cases, each of a seed of its own."""

import random
from collections.abc import Callable

import pytest


@pytest.fixture
def fuzz(request) -> Callable[[Callable[[random.Random], None], int], None]:
    """fuzz(check, cases): calls `check` with a generator of random numbers for every case.

    Case i has the seed `--seed` + i; `--fuzz-cases` sets how many there are. A case that fails
    says which command runs it alone.
    """
    first, wanted = request.config.option.seed, request.config.option.fuzz_cases

    def run(check: Callable[[random.Random], None], cases: int) -> None:
        for seed in range(first, first + (wanted or cases)):
            try:
                check(random.Random(seed))
            except Exception as error:
                error.add_note(f'pytest "{request.node.nodeid}" --seed {seed} --fuzz-cases 1')
                raise

    return run
