"""Words of a text as integers by hashing, without a trained vocabulary."""

import numpy as np

BUCKETS = 2**15  # of hashed words
FACTOR = 0x9E3779B97F4A7C15
LONGEST_WORD = 64
FIRST_WORD = 257  # lower ids are padding and bytes outside of words
TOKEN_BYTES = 4  # lower bound of the mean number of bytes of a token


def words(text: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The beginning and the bucket of each word of a text.

    Args:
        text: uint8; a word is a run of letters a to z in any case.
    """
    letters, lower = letters_of(text)
    values = (lower[letters] - ord("a") + 1).astype(np.uint64)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], letters, [False]])))
    begins, sizes = edges[::2], edges[1::2] - edges[::2]
    starts = np.cumsum(sizes) - sizes
    if not len(starts):
        return starts, starts
    place = np.arange(len(values)) - np.repeat(starts, sizes)
    powers = np.multiply.accumulate(np.full(LONGEST_WORD, FACTOR, np.uint64))
    hashes = np.add.reduceat(values * powers[np.minimum(place, LONGEST_WORD - 1)], starts)
    bits = BUCKETS.bit_length() - 1
    return begins, (hashes * np.uint64(FACTOR) >> np.uint64(64 - bits)).astype(np.int64)


def word_ids(text: np.ndarray) -> np.ndarray:
    """The ids of the words of a text and of the bytes between them, except spaces, in order."""
    begins, buckets = words(text)
    letters, _ = letters_of(text)
    marks = np.flatnonzero(~letters & (text > ord(" ")))
    ids = np.concatenate([buckets + FIRST_WORD, text[marks].astype(np.int64) + 1])
    return ids[np.argsort(np.concatenate([begins, marks]))].astype(np.int32)


def letters_of(text: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(whether each byte is a letter, the text in lower case)"""
    lower = text | 0x20
    return (lower >= ord("a")) & (lower <= ord("z")), lower
