"""Kernels that ship, compiled for two architectures on a machine that may have neither.

With --every-kernel all of them, which takes minutes.
"""

import pytest

ARCHITECTURES = (80, 90)
STACK_LIMIT = 512  # bytes per thread


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_that_ship(architecture, request, compiler):
    which = "every" if request.config.getoption("every_kernel") else "variants"
    for report in compiler.reports("triton", which, architecture):
        assert report["shared"] <= report["estimate"] <= report["limit"], report["variant"]
        assert report["stack"] <= STACK_LIMIT, report["variant"]
        if architecture == 90 and report["wants_warpgroups"]:
            assert report["warpgroup_products"] > 0, report["variant"]


@pytest.mark.slow
def test_lengths_batches_and_masks_share_a_kernel(compiler):
    first, second = compiler.reports("triton", "calls", 90)
    # Decoding takes one for keys that are split, and one for keys that are not.
    assert first == {"forward": 1, "dq": 1, "dkdv": 1, "ds_sums": 1, "decode": 2}
    assert second == {which: 2 * kernels for which, kernels in first.items()}


@pytest.mark.slow
def test_float32_products_are_in_tf32_only_on_request(compiler):
    ieee, tf32 = compiler.reports("triton", "products", 80)
    assert set(ieee.values()) == {False}
    assert set(tf32.values()) == {True}


@pytest.mark.slow
def test_what_is_launched_without_asking_triton_is_what_triton_would_launch(compiler):
    (report,) = compiler.reports("triton", "layouts", 90)
    assert report["variants"] >= 18
    assert report["kernels of one variant"] == 1


@pytest.mark.slow
def test_rows_are_merged_added_and_copied_by_wide_loads(compiler):
    """A thread loads 16 bytes at a time of each operand; otherwise only indices and LSE."""
    reports = compiler.reports("triton", "rows", 90)
    assert len(reports) == 60
    for report in reports:
        accesses, written = report["accesses"], report["written"]
        assert accesses["ld16"] == report["operands"] * written, report
        assert accesses["st16"] == written, report
        assert set(accesses) <= {"ld16", "st16", "ld4", "ld8", "st4"}, report
