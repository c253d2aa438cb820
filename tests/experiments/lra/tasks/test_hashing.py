import numpy as np
import pytest

from experiments.lra.tasks.hashing import shuffled, split_by_hash, stream_of


@pytest.mark.parametrize("n", [1, 2, 10, 257])
def test_shuffled_is_a_permutation(n):
    order = shuffled(np.arange(n), n, stream_of("a")).tolist()
    assert sorted(order) == list(range(n))
    assert n < 10 or order != list(range(n))


def test_split_by_hash_keeps_every_index_once():
    parts = split_by_hash(100, (80, 10, 10), "a")
    assert [len(part) for part in parts] == [80, 10, 10]
    assert sorted(np.concatenate(parts)) == list(range(100))
    assert parts[0].tolist() != list(range(80))
    assert parts[0].tolist() != split_by_hash(100, (80, 10, 10), "b")[0].tolist()
    with pytest.raises(ValueError, match="sizes must sum to the 100 samples"):
        split_by_hash(100, (80, 10), "a")
