"""The number by which later calls compare their arguments; the comparison is in test_refusals."""

from unittest import mock

import pytest
import torch

from sparseflash.distributed import agreement


def test_numbers_of_other_facts_are_others():
    facts = {"plan": "a", "options": "b"}
    others = [{"plan": "b", "options": "a"}, {"plan": "a"}, {"plan": "a", "options": None}]
    numbers = [agreement.number_of(each) for each in (facts, *others)]
    assert len(set(numbers)) == len(numbers)
    assert agreement.number_of(dict(facts)) == numbers[0]


@pytest.mark.parametrize("seed", [0, 1, 2**62, -(2**63), 2**64 - 1])
def test_numbers_never_equal_the_special_ones(seed):
    number = agreement.with_seed(agreement.number_of({"plan": "a"}), seed)
    assert 0 <= number <= agreement.LOW_BITS
    assert agreement.with_seed(number, 1) != number


def test_seeds_that_are_equal_in_some_bits_have_other_numbers():
    number = agreement.number_of({"plan": "a"})
    seeds = [sign * 2**bit for bit in range(63) for sign in (1, -1)]
    assert len({agreement.with_seed(number, each) for each in seeds}) == len(seeds)


def test_hashes_of_lengths_depend_on_each_length_and_its_place():
    lengths = torch.tensor([[5, 7, 7], [7, 5, 7], [7, 7, 5], [5, 7, 8], [0, 0, 0], [2**31, 7, 7]])
    hashes = [int(agreement._hash(each)) for each in lengths]
    assert len(set(hashes)) == len(hashes)
    assert all(0 <= each <= agreement.LOW_BITS for each in hashes)


def test_hashes_change_if_two_lengths_are_exchanged():
    """Also multiples of large powers of 2, of whose hashes few bits differ."""
    for step in (1, 128, 4096, 2**20):
        lengths = torch.arange(9) * step
        hashes = {int(agreement._hash(lengths))}
        for first in range(9):
            for second in range(first):
                exchanged = lengths.clone()
                exchanged[[first, second]] = lengths[[second, first]]
                hashes.add(int(agreement._hash(exchanged)))
        assert len(hashes) == 1 + 9 * 8 // 2, step
    first = torch.tensor([172032, 0, 40960])
    assert agreement._hash(first) != agreement._hash(first.flip(0))


def test_hashes_are_sums_in_whole_numbers():
    lengths = torch.tensor([5, 2**31, 77])
    factors = [(i * agreement.OF_ELEMENTS) ^ agreement.OF_LENGTHS for i in (1, 2, 3)]
    expected = sum(n * factor for n, factor in zip(lengths.tolist(), factors, strict=True))
    assert int(agreement._hash(lengths)) == expected & agreement.LOW_BITS


@pytest.mark.parametrize(
    ("config", "tensors", "expected"),
    [
        ("cpu:gloo,meta:other", ("cpu", "cpu", "cpu"), "cpu"),
        ("cpu:gloo,meta:other", ("meta", "meta", "meta"), "meta"),
        ("cpu:gloo,meta:other", ("cpu", "meta", None), "meta"),  # invalid on this rank
        ("cpu:gloo,cuda:nccl", (None, None, None), "cuda"),
        ("cpu:gloo,cuda:gloo", (None, None, None), "cpu"),
        ("cuda:nccl", ("cpu", "cpu", "cpu"), "cuda"),
        ("meta:other", (None, None, None), "meta"),
    ],
)
def test_ranks_with_invalid_tensors_compare_on_the_device_of_the_others(config, tensors, expected):
    given = [None if each is None else torch.empty(1, device=each) for each in tensors]
    with mock.patch.object(agreement.dist, "get_backend_config", return_value=config):
        assert agreement._device_of(mock.Mock(), given) == torch.device(expected)
