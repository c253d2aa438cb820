"""Random numbers as hashes of names: equal on every machine, process and numpy version.

Generated data depend on this code. A change of it changes the data, and then numba's cache of its
callers must be deleted.

Reference:
    Steele, Lea, Flood 2014, Fast splittable pseudorandom number generators (splitmix64).
"""

from collections.abc import Sequence

import numba
import numpy as np

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31, _S11 = (np.uint64(bits) for bits in (27, 30, 31, 11))
_ULP = 2.0**-53


@numba.njit(nogil=True)
def mix(x):
    """The finalizer of splitmix64: a bijection of uint64 that makes consecutive numbers random."""
    x = (x ^ (x >> _S30)) * _MIX_1
    x = (x ^ (x >> _S27)) * _MIX_2
    return x ^ (x >> _S31)


@numba.njit(nogil=True)
def seed_of(stream, index):
    """The seed of sample `index` of a stream; stream and index are uint64."""
    return mix(mix(stream + _GAMMA) + (index + np.uint64(1)) * _GAMMA)


@numba.njit(nogil=True)
def uniform(state):
    """The next number in [0, 1) of a generator; state: its state, uint64 (1,), is advanced."""
    state[0] += _GAMMA
    return (mix(state[0]) >> _S11) * _ULP


@numba.njit(nogil=True)
def below(state, n):
    """The next integer in [0, n) of a generator; state: see uniform."""
    return int(uniform(state) * n)


def stream_of(*names: str | int) -> np.uint64:
    """The stream of random numbers of some names, such as ("listops", 0, "train")."""
    text = "/".join(map(str, names)).encode()
    return np.uint64(_stream_of(np.frombuffer(text, np.uint8)))


@numba.njit(nogil=True, cache=True)
def _stream_of(text):
    stream = np.uint64(0)
    for byte in text:
        stream = seed_of(stream, np.uint64(byte))
    return stream


def split_by_hash(n: int, sizes: Sequence[int], *names: str | int) -> list[np.ndarray]:
    """Splits the indices 0 to n - 1 by their hashes.

    Args:
        n: Number of indices.
        sizes: Size of each part.
        names: Names of the stream of hashes.

    Returns:
        The indices of each part, ascending.

    Raises:
        ValueError: The sizes do not sum to n.
    """
    if sum(sizes) != n:
        raise ValueError(f"sizes must sum to the {n} samples, got {list(sizes)}")
    order = np.argsort(_hashes(stream_of(*names), n), kind="stable")
    parts = np.split(order, np.cumsum(sizes)[:-1])
    return [np.sort(part) for part in parts]


@numba.njit(nogil=True)
def _hashes(stream, n):
    hashes = np.empty(n, np.uint64)
    for i in range(n):
        hashes[i] = seed_of(stream, np.uint64(i))
    return hashes


@numba.njit(nogil=True, cache=True)
def shuffled(positions, n, stream):
    """The elements of 0 to n - 1 at some positions of the permutation of a stream.

    The permutation takes no memory: it is a Feistel network on the smallest even number of bits
    that can represent n - 1, applied until the result is below n.

    Args:
        positions: int64 (m,).
        n: Number of elements.
        stream: uint64.

    Returns:
        int64 (m,).
    """
    half = np.uint64(1)
    while np.uint64(1) << (half + half) < np.uint64(n):
        half += np.uint64(1)
    low = (np.uint64(1) << half) - np.uint64(1)
    elements = np.empty(len(positions), np.int64)
    for i in range(len(positions)):
        x = np.uint64(positions[i])
        while True:
            left, right = x >> half, x & low
            for turn in range(4):
                left, right = right, left ^ (seed_of(stream + np.uint64(turn), right) & low)
            x = (left << half) | right
            if x < np.uint64(n):
                break
        elements[i] = x
    return elements
