"""Tools to test attention: the float64 reference, inputs, poisoned memory, the error budget."""

from sparseflash.testing.error_budget import (
    STRIDES,
    assert_close_to_reference,
    check_attention,
    error_budget,
    make_inputs,
    poisoned_empty,
)

__all__ = [
    "STRIDES",
    "assert_close_to_reference",
    "check_attention",
    "error_budget",
    "make_inputs",
    "poisoned_empty",
]
