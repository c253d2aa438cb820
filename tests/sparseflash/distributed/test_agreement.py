"""The number by which later calls compare their arguments; the comparison is in test_refusals."""

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
    assert 0 <= number <= agreement.MASK
    assert agreement.with_seed(number, 1) != number


def test_hashes_of_lengths_depend_on_each_length_and_its_place():
    lengths = torch.tensor([[5, 7, 7], [7, 5, 7], [7, 7, 5], [5, 7, 8], [0, 0, 0], [2**31, 7, 7]])
    hashes = [int(agreement._hash(each)) for each in lengths]
    assert len(set(hashes)) == len(hashes)
    assert all(0 <= each <= agreement.MASK for each in hashes)
