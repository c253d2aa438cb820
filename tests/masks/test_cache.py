"""What others keep of a mask for as long as it lives."""

import masks
from masks import cache


def test_a_full_store_begins_anew(monkeypatch):
    monkeypatch.setattr(cache, "MOST", 3)
    store = masks.full()(64, block_size=64).cache
    for n in range(4):
        store[n] = n
    assert store == {3: 3}
