"""All Hopper kernels that ship, compiled on a machine that may have no GPU."""

from pathlib import Path

import pytest
from compile_only import SHARED_MEMORY, finish, start
from operands import unset_operands

from sparseflash.backends.hopper import HEAD_DIMS

SCRIPT = Path(__file__).parent / "compile_kernels.py"
STACK_LIMIT = 160  # bytes per thread
GROUPS = 2  # of warps that compute


@pytest.fixture(scope="module")
def variants() -> list[dict]:
    running = [start(SCRIPT, "variants", head_dim) for head_dim in HEAD_DIMS]
    return [report for process in running for report in finish(process)]


@pytest.mark.slow
def test_shared_memory_and_registers_suffice(variants):
    for report in variants:
        assert report["shared"] <= SHARED_MEMORY[90], report
        assert report["stack"] <= STACK_LIMIT, report


@pytest.mark.slow
def test_products_are_those_of_the_source_and_run_on(variants):
    """A product (64, n) of depth k is k / 16 instructions.

    Where the compiler cannot let products run on beside other code, it waits for each of them.
    """
    for report in variants:
        depth, loops = report["head_dim"] // 16, 1 if report["mask"] == "full" else 2
        products, waits = {
            "forward": (depth + loops * (depth + 8) + 8, 2 + loops * 2),
            "dq": (loops * (2 * depth + 8), loops * 3),
            "dkdv": (loops * (2 * depth + 2 * 4), loops * 4),
        }[report["which"]]
        assert report["products"] == GROUPS * products, report
        assert report["waits"] == GROUPS * waits, report


@pytest.mark.slow
def test_operands_of_products_are_set(variants):
    for report in variants:
        assert report["unset"] == [], report


def test_an_operand_that_a_skipped_loop_sets_is_found():
    code = """
        /*0000*/                   UMOV UR6, 0x10 ;
        /*0010*/                   UMOV UR7, 0x20 ;
        /*0020*/              @!P0 BRA `(.L_x_2) ;
        /*0030*/                   UMOV UR4, 0x30 ;
        /*0040*/                   UMOV UR5, 0x40 ;
.L_x_1:
        /*0050*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0060*/               @P1 BRA `(.L_x_1) ;
.L_x_2:
        /*0070*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0080*/                   HGMMA.64x64x16.F32.BF16 R24, R40, gdesc[UR4].tnspB, R24 ;
        /*0090*/                   EXIT ;
"""
    (found,) = unset_operands(code)
    assert found.startswith("0070")


@pytest.mark.slow
def test_lengths_and_batches_share_a_kernel():
    (counts,) = finish(start(SCRIPT, "calls", 64))
    assert set(counts.values()) == {1}


@pytest.mark.slow
def test_what_is_launched_without_asking_triton_is_what_triton_would_launch():
    (report,) = finish(start(SCRIPT, "layouts", 64))
    assert report["variants"] >= 28
    assert report["kernels of one variant"] == 1
