"""All Hopper kernels that ship, compiled on a machine that may have no GPU."""

import pytest

from sparseflash.backends.hopper import backward_pass, forward_pass
from sparseflash.backends.hopper.launch import REGISTERS, Room
from tests.helpers.compile_only import SHARED_MEMORY, finish, start
from tests.helpers.operands import unset_operands

SCRIPT = "compile_hopper"
SIZES = ((64, 128), (128, 128), (256, 128), (64, 64), (128, 64))  # width of tiles, block
# Bytes per thread, without and with all options.
STACK_LIMIT = {64: (56, 320), 128: (160, 544), 256: (560, 800)}
KEYS = {64: 128, 128: 128, 256: 64}  # of a tile where rows are queries, if a block has as many
RESERVED = 1024  # bytes of shared memory for each program, beside its own
ROOMS = {"forward": forward_pass.ROOMS, "dq": backward_pass.QUERY_ROOMS}


@pytest.mark.slow
@pytest.mark.parametrize(("head_dim", "block"), SIZES)
def test_kernels_that_ship(head_dim, block):
    for report in finish(start(SCRIPT, "variants", head_dim, block)):
        check_memory(report)
        check_products(report)
        check_barriers(report)
        assert report["unset"] == [], report


def check_memory(report: dict) -> None:
    programs = room_of(report).programs
    memory = (SHARED_MEMORY[90] + RESERVED) // programs - RESERVED
    assert report["shared"] <= memory, report
    assert report["registers"] <= REGISTERS // programs, report
    limit = STACK_LIMIT[report["head_dim"]]["options" in report["mask"]]
    assert report["stack"] <= limit, report


def room_of(report: dict) -> Room:
    if report["which"] == "fused":
        return backward_pass.FUSED_ROOMS[report["head_dim"]]
    rooms = ROOMS.get(report["which"], backward_pass.KEY_ROOMS)
    return rooms[report["block"]][report["head_dim"]]


def check_products(report: dict) -> None:
    """A product (64, n) of depth k is k / 16 instructions. Partial and full tiles share them in
    the forward kernel and in that of all gradients.

    Where the compiler cannot let products run on beside other code, it waits for each of them.
    """
    depth, loops = report["head_dim"] // 16, 1 if report["mask"] == "full" else 2
    keys = min(KEYS[report["head_dim"]], report["block"]) // 16
    groups = report["block"] // 64  # of warps that compute
    products, waits = {
        "forward": (2 * (depth + keys), 4),
        "dq": (loops * (2 * depth + keys), loops * 3),
        "dkdv": (loops * (2 * depth + 2 * 4), loops * 4),
        "dk": (loops * (2 * depth + 4), loops * 3),
        "dv": (loops * (depth + 4), loops * 2),
        "fused": fused_products(report),
    }[report["which"]]
    assert report["products"] == groups * products, report
    # The first tile of a row may wait for S^T before it begins dP^T, in one group or in both.
    assert report["waits"] - groups * waits in range(3 if report["which"] == "fused" else 1), (
        report
    )


def fused_products(report: dict) -> tuple[int, int]:
    """(products, waits) of a group, which begins the first tile before the loop and ends the last
    one after it. Where it adds every other tile of dQ, the loop has two tiles, and one more
    follows.
    """
    tile, dq = 2 * (report["head_dim"] // 16) + 2 * 4, 2 * 4
    if report["head_dim"] == 64 and "options" not in report["mask"]:
        return 2 * (2 * tile + dq), 13
    return 2 * (tile + dq), 7


def check_barriers(report: dict) -> None:
    """In turns all 256 threads that compute, and a warp that relays if there is one; those of the
    warp that loads, and of the other; two rings, at which the groups and the other arrive and that
    warp waits; none of Triton's.
    """
    relays = 0
    if report["which"] == "forward":
        is_masked = report["mask"] != "full"
        relays = forward_pass.relays(report["block"], report["head_dim"], is_masked)
    threads = f"{128 * (report['block'] // 64) + 32 * (1 + relays):#x}"
    taken = {b for b in report["barriers"] if b.startswith("0x") and int(b.split(",")[0], 16) > 3}
    in_turns = report["which"] == "forward" and report["block"] == 128
    rings = range(7, 7 + 2 * room_of(report).constants["STAGES"])
    wanted = {"0x6, 0x20"} | ({"0xf, 0x20"} if relays else set())
    turn = f"{256 + 32 * relays:#x}"
    wanted |= {f"0x4, {turn}", f"0x5, {turn}"} if in_turns else set()
    wanted |= {f"{number:#x}, {threads}" for number in rings}
    assert taken == wanted, report
    assert max(rings) < 16 - relays, report
    at_run_time = {b.split(", ")[1] for b in report["barriers"] if b.startswith("R")}
    assert at_run_time <= {threads}, report
    assert "0x0, 0x80" in report["barriers"], report


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
    assert counts == {"forward": 2, "dq": 2, "dkdv": 2, "fused": 0}  # one for each side of blocks


@pytest.mark.slow
def test_what_is_launched_without_asking_triton_is_what_triton_would_launch():
    (report,) = finish(start(SCRIPT, "layouts", 64))
    assert report["variants"] >= 31
    assert report["kernels of one variant"] == 1
