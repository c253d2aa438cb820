import pytest
import torch

import masks
from sparseflash import AttentionOptions
from sparseflash.dropout import (
    DIGITS,
    keep_mask,
    keep_mask_of_spans,
    keep_probability,
    keep_words,
    philox,
    threshold,
)
from sparseflash.nn import SparseAttention

ONES = 0xFFFFFFFF
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
# (rounds, counter, key, words), from the known-answer tests of Random123.
KNOWN = [
    (7, (0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    (7, (ONES,) * 4, (ONES,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (7, *PI, (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A)),
    (10, (0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (10, (ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (10, *PI, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]


@pytest.mark.parametrize(("rounds", "counter", "key", "words"), KNOWN)
def test_known_answers(rounds, counter, key, words):
    drawn = philox(key, tuple(torch.tensor(c) for c in counter), rounds)
    assert tuple(int(w) for w in drawn) == words


def indices(bh: int, q: int, k: int) -> tuple[torch.Tensor, ...]:
    return torch.arange(bh).view(-1, 1, 1), torch.arange(q).view(-1, 1), torch.arange(k)


def number(seed: int, bh: int, q: int, k: int) -> int:
    """The random number of a pair, digit by digit."""
    word, bit = k // 64 * 2 + k // 4 % 2, k // 8 % 8 * 4 + k % 4
    key = (seed % 2**32, (seed >> 32) % 2**32)
    counters = [tuple(torch.tensor(c) for c in (word, q, bh, j)) for j in range(DIGITS // 4)]
    digits = [int(w) >> bit & 1 for counter in counters for w in philox(key, counter)]
    return sum(digit << i for i, digit in enumerate(digits))


@pytest.mark.parametrize("k", [0, 3, 4, 13, 31, 32, 63, 64, 70, 200])
def test_a_pair_is_kept_from_its_threshold_on(k):
    seed, bh, q = -(2**40) + 12345, 3, 5
    drawn = number(seed, bh, q, k)
    for least, kept in ((drawn, True), (drawn + 1, False)):
        p = least / 2**DIGITS
        assert bool(keep_mask(seed, *(torch.tensor(i) for i in (bh, q, k)), p)) == kept


@pytest.mark.parametrize("span", [8, 16, 32, 64])
@pytest.mark.parametrize("p", [0.3, 0.5, 2**-16, 1 - 2**-16])
def test_spans_are_neighbouring_keys(span, p):
    bh, q, k = indices(2, 9, 192)
    expected = keep_mask(7, bh, q, k, p)
    assert expected.shape == (2, 9, 192)
    first = k[::span].view(1, 1, -1)
    assert torch.equal(keep_mask_of_spans(7, bh, q, first, span, p), expected)
    shuffled = first.flip(-1)[..., : 128 // span]
    got = keep_mask_of_spans(7, bh, q, shuffled, span, p)
    assert torch.equal(
        got, expected.unflatten(-1, (-1, span)).flip(2)[:, :, : 128 // span].flatten(2)
    )


@pytest.mark.parametrize("dropout_p", [1 / 256, 0.1, 0.5, 0.9])
def test_kept_pairs_are_as_many_as_if_independent(dropout_p):
    kept = keep_mask(1, *indices(4, 256, 256), dropout_p).double() - keep_probability(dropout_p)
    variance = keep_probability(dropout_p) * (1 - keep_probability(dropout_p))
    assert abs(float(kept.mean())) < 5 * (variance / kept.numel()) ** 0.5
    # Sums of rows, of columns, of tiles and of the keys of a word are spread as if independent.
    tiles = kept.view(4, 16, 16, 16, 16).sum((2, 4))
    words = kept.view(4, 256, 4, 8, 2, 4).transpose(-2, -3).reshape(4, 256, -1, 32)
    rows, columns = kept.sum(-1), kept.sum(1)
    for sums, of in ((rows, 256), (columns, 256), (tiles, 256), (words.sum(-1), 32)):
        spread = float(sums.square().mean()) / (of * variance)
        assert abs(spread - 1) < 5 * (3 / sums.numel()) ** 0.5


@pytest.mark.parametrize("dropout_p", [0.1, 0.5])
def test_pairs_do_not_depend_on_one_another(dropout_p):
    """Of neighbouring keys, queries, heads and seeds; the keys of a word are 8 apart."""
    kept = keep_mask(2, *indices(4, 256, 256), dropout_p).double() - keep_probability(dropout_p)
    other = keep_mask(3, *indices(4, 256, 256), dropout_p).double() - keep_probability(dropout_p)
    high = keep_mask(2 + 2**32, *indices(4, 256, 256), dropout_p).double()
    high -= keep_probability(dropout_p)
    neighbours = {
        **{f"{n} keys": (kept[..., n:], kept[..., :-n]) for n in (1, 2, 3, 4, 5, 8, 32, 64, 128)},
        **{f"{n} queries": (kept[:, n:], kept[:, :-n]) for n in (1, 2, 8, 64)},
        **{f"{n} heads": (kept[n:], kept[:-n]) for n in (1, 2)},
        "seed": (kept, other),
        "upper half of the seed": (kept, high),
        "transposed": (kept, kept.mT),
    }
    variance = keep_probability(dropout_p) * (1 - keep_probability(dropout_p))
    for name, (a, b) in neighbours.items():
        correlation = float((a * b).mean()) / variance
        assert abs(correlation) < 5 / a.numel() ** 0.5, name


def test_nothing_is_dropped_at_zero():
    assert keep_mask(1, *indices(2, 8, 8), 0.0).all()


def test_digits_below_the_lowest_1_of_the_threshold_decide_nothing():
    bh, q, word = indices(2, 3, 4)
    (*_, last) = philox((5, 0), (word, q, bh, torch.full_like(bh, DIGITS // 4 - 1)))
    assert torch.equal(keep_words(5, bh, q, word, 0.5), last)


def test_the_probability_is_a_multiple_of_two_to_the_minus_16():
    assert threshold(0.1) == 6554
    assert keep_probability(0.1) == 1 - 6554 / 65536
    assert keep_probability(0.25) == 0.75


@pytest.mark.parametrize("p", [1e-6, 1 - 1e-6, 2**-18])
def test_a_probability_that_rounds_to_0_or_1_is_refused(p):
    error = r"dropout_p must be 0 or .* 2\^-16 .* got"
    with pytest.raises(ValueError, match=error):
        AttentionOptions(dropout_p=p)
    with pytest.raises(ValueError, match=error):
        keep_mask(1, *indices(2, 8, 8), p)
    with pytest.raises(ValueError, match=error):
        SparseAttention(32, 2, masks.full(), dropout=p)
