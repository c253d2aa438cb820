import pytest
import torch

from sparseflash.dropout import keep_mask, keep_mask_of_quads, philox

ONES = 0xFFFFFFFF
# (counter, key, words), from the known-answer tests of Random123.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter, key, words):
    assert tuple(int(w) for w in philox(key, tuple(torch.tensor(c) for c in counter))) == words


def indices(bh: int, q: int, k: int) -> tuple[torch.Tensor, ...]:
    return torch.arange(bh).view(-1, 1, 1), torch.arange(q).view(-1, 1), torch.arange(k)


def test_pair_uses_word_of_its_quad():
    seed = -(2**40) + 12345
    key = (seed % 2**32, (seed >> 32) % 2**32)
    bh, q, k, p = 3, 5, 7, 0.4
    words = philox(key, tuple(torch.tensor(c) for c in (k // 4, q, bh, 0)))
    kept = keep_mask(seed, *(torch.tensor(i) for i in (bh, q, k)), p)
    assert bool(kept) == (int(words[k % 4]) >= int(p * 2**32))


@pytest.mark.parametrize("k", range(8))
def test_a_pair_is_kept_from_the_floor_of_its_threshold_on(k):
    bh, q, k = (torch.tensor(i) for i in (1, 2, k))
    word = int(philox((9, 0), (k // 4, q, bh, torch.tensor(0)))[k % 4])
    for threshold, kept in ((word, True), (word + 0.75, True), (word + 1, False)):
        p = threshold / 2**32
        assert bool(keep_mask(9, bh, q, k, p)) == kept
        assert bool(keep_mask_of_quads(9, bh, q, k[None] // 4, p)[k % 4]) == kept


def test_quads_are_four_keys_each():
    bh, q, k = indices(2, 9, 32)
    expected = keep_mask(7, bh, q, k, 0.3)
    assert expected.shape == (2, 9, 32)
    assert torch.equal(keep_mask_of_quads(7, bh, q, torch.arange(8), 0.3), expected)


@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.9])
def test_frequency(dropout_p):
    kept = keep_mask(1, *indices(4, 256, 256), dropout_p)
    spread = (dropout_p * (1 - dropout_p) / kept.numel()) ** 0.5
    assert abs(float(kept.double().mean()) - (1 - dropout_p)) < 5 * spread


def test_depends_on_seed_head_query_and_key():
    kept = keep_mask(1, *indices(2, 64, 64), 0.5)
    assert not torch.equal(kept, keep_mask(2, *indices(2, 64, 64), 0.5))
    assert not torch.equal(kept, keep_mask(1 + 2**32, *indices(2, 64, 64), 0.5))
    assert not torch.equal(kept[0], kept[1])
    assert not torch.equal(kept[0], kept[0].T)


def test_nothing_is_dropped_at_zero():
    assert keep_mask(1, *indices(2, 8, 8), 0.0).all()
