"""Attention over a sequence that four processes share, of any semantics, against one process."""

from tests.helpers import context_parallel as cases


def test_ranks_compute_what_one_process_does(fuzz, four_ranks):
    """Ragged lengths, grouped heads, masks of heads, dropout, key lengths, biases, sinks, soft
    caps, LSE, blocks that each rank selects, in every split and with shared rows.
    """

    def check(rng) -> None:
        for answer in four_ranks.run(cases.fuzzed, rng.randrange(2**31)):
            assert isinstance(answer, dict), answer
            assert max(answer.values()) < 1e-12, answer

    fuzz(check, 12)
