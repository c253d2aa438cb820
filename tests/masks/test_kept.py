"""What others keep of a mask for as long as it lives."""

import masks
from masks import kept


def test_a_full_store_begins_anew(monkeypatch):
    monkeypatch.setattr(kept, "MOST", 3)
    store = masks.full()(64, block_size=64).kept
    for n in range(4):
        store[n] = n
    assert store == {3: 3}
