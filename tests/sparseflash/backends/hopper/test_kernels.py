"""Hopper kernels that ship, compiled on a machine that may have no GPU.

With --every-kernel all of them, which takes minutes.
"""

import pytest

from sparseflash.backends.hopper import configs
from sparseflash.backends.hopper.configs import KernelConfig
from sparseflash.backends.hopper.device import barriers
from sparseflash.backends.hopper.kernels.forward import num_load_wait_warps
from tests.helpers.compile_only import SHARED_MEMORY
from tests.helpers.operands import unset_operands

EVERY = (
    *("full", "causal", "causal, with options"),
    *("causal, with changed scores", "full, with changed scores"),
)
FULL, PLAIN, OPTIONS, CHANGED, READING = EVERY
# Width of tiles of queries and keys, of values; block. Which calls are compiled of each: plain
# ones where both widths are equal, rarer ones in blocks of both sizes. Where one width is smaller,
# a kernel takes no more registers and memory than with two of the larger.
SIZES = {
    (64, 64, 128): (PLAIN, OPTIONS),
    (128, 128, 128): (PLAIN, READING),
    (256, 256, 128): (PLAIN, OPTIONS, CHANGED),
    (64, 64, 64): EVERY,
    (128, 128, 64): (PLAIN, OPTIONS),
    (256, 128, 128): (PLAIN,),
    (64, 128, 128): (FULL,),
    (128, 64, 64): (OPTIONS,),
    (128, 64, 128): (FULL,),
    (64, 128, 64): (FULL,),
}
# Bytes per thread, without and with all options.
STACK_LIMIT = {64: (112, 320), 128: (160, 544), 256: (560, 800)}
STACK_LIMIT_OF_CHANGED_SCORES = 2000
KEYS = {64: 128, 128: 128, 256: 64}  # of a tile where rows are queries, if a block has as many
RESERVED = 1024  # bytes of shared memory for each CTA, beside its own
CONFIGS = {"forward": configs.FORWARD_CONFIGS, "dq": configs.DQ_CONFIGS}


@pytest.mark.slow(30)
@pytest.mark.parametrize(("head_dim", "value_dim", "block"), SIZES)
def test_kernels_that_ship(head_dim, value_dim, block, request, compiler):
    size = head_dim, value_dim, block
    calls = EVERY if request.config.getoption("every_kernel") else SIZES[size]
    for report in compiler.reports("hopper", "variants", *size, *calls):
        check_memory(report)
        check_products(report)
        check_barriers(report)
        assert report["unset"] == [], report


@pytest.mark.slow
def test_forward_kernels_of_three_warpgroups(compiler):
    reports = compiler.reports("hopper", "three", 64)
    assert len(reports) == 3
    for report in reports:
        check_memory(report)
        check_products(report)
        check_barriers(report)
        assert report["unset"] == [], report
        # With key lengths, two numbers that are read once a row.
        assert report["stack"] <= (8 if report["mask"] == "causal, with lengths" else 0), report


@pytest.mark.slow(30)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_forward_kernels_of_packed_heads(head_dim, compiler):
    reports = compiler.reports("hopper", "packed", head_dim)
    assert len(reports) == 3
    for report in reports:
        check_memory(report)
        check_products(report)
        check_barriers(report)
        assert report["unset"] == [], report
        assert report["stack"] <= (8 if "options" in report["mask"] else 0), report


@pytest.mark.slow
def test_score_functions_of_another_shape_are_refused(compiler):
    reports = compiler.reports("hopper", "refused", 64)
    told = {report["function"]: report["error"] for report in reports}
    assert set(told.values()) == {"f of a score function must have the shape of score"}
    assert list(told) == ["of_query", "of_nothing"]


def check_memory(report: dict) -> None:
    ctas_per_sm = config_of(report).ctas_per_sm
    memory = (SHARED_MEMORY[90] + RESERVED) // ctas_per_sm - RESERVED
    assert report["shared"] <= memory, report
    assert report["registers"] <= configs.REGISTERS_PER_SM // ctas_per_sm, report
    limit = STACK_LIMIT[widest_dim(report)]["options" in report["mask"]]
    if "changed scores" in report["mask"]:
        limit = STACK_LIMIT_OF_CHANGED_SCORES
    assert report["stack"] <= limit, report


def widest_dim(report: dict) -> int:
    return max(report["head_dim"], report["value_dim"])


def config_of(report: dict) -> KernelConfig:
    if report["which"] == "fused":
        return configs.FUSED_CONFIGS[report["head_dim"]]
    if report["which"] == "packed":
        return configs.PACKED_CONFIGS[report["head_dim"]]
    table = CONFIGS.get(report["which"], configs.DKDV_CONFIGS)
    return table[report["block"]][widest_dim(report)]


def warpgroups_of(report: dict) -> int:
    """Consumer warpgroups of a CTA, each of which computes 64 rows."""
    return configs.PACKED_HEADS if report["which"] == "packed" else report["block"] // 64


def check_products(report: dict) -> None:
    """A product (64, n) of depth k is k / 16 instructions. Partial and full tiles share them in
    the forward kernel and in that of all gradients.

    Where the compiler cannot let products run on beside other code, it waits for each of them.
    """
    depth, loops = report["head_dim"] // 16, 2 - report["mask"].startswith("full")
    depth_of_values = report["value_dim"] // 16
    keys = min(KEYS[widest_dim(report)], report["block"]) // 16
    warpgroups = warpgroups_of(report)
    products, waits = {
        "forward": (2 * (depth + keys), 4),
        "packed": (2 * (depth + keys), 4),
        "dq": (loops * (depth + depth_of_values + keys), loops * 3),
        "dkdv": (loops * (depth + depth_of_values + 2 * 4), loops * 4),
        "dk": (loops * (depth + depth_of_values + 4), loops * 3),
        "dv": (loops * (depth + 4), loops * 2),
        "fused": fused_products(report),
    }[report["which"]]
    assert report["products"] == warpgroups * products, report
    # The first tile of a row may wait for S^T before it begins dP^T, in one warpgroup or in both.
    # The dQ warpgroup has one wait.
    assert report["waits"] - warpgroups * waits in range(4 if report["which"] == "fused" else 1), (
        report
    )


def fused_products(report: dict) -> tuple[int, int]:
    """(products, waits) of a warpgroup, which begins the first tile before the loop and ends the
    last one after it, and half of the products of the dQ warpgroup if there is one.
    """
    tile, dq = 2 * (report["head_dim"] // 16) + 2 * 4, 2 * 4
    if report["head_dim"] <= configs.MAX_DQ_WARPGROUP_DIMS:
        return 2 * tile + dq // 2, 7
    return 2 * (tile + dq), 7


def check_barriers(report: dict) -> None:
    """Ping-pong of all warpgroups, with the load-wait warp if there is one; the threads of the
    producer, and of the load-wait warp; two pipelines, at which warpgroups and the load-wait warp
    arrive and the producer waits; none of Triton's.
    """
    load_wait_warps, is_forward = 0, report["which"] in ("forward", "packed")
    all_warpgroups = warpgroups_of(report)
    if is_forward:
        is_masked = not report["mask"].startswith("full")
        load_wait_warps = num_load_wait_warps(64 * all_warpgroups, report["head_dim"], is_masked)
    threads = f"{128 * all_warpgroups + 32 * (1 + load_wait_warps):#x}"
    taken = {b for b in report["barriers"] if b.startswith("0x") and int(b.split(",")[0], 16) > 3}
    warpgroups = all_warpgroups if is_forward else 1
    first = barriers.FIRST_PIPELINE_BARRIER.value
    pipelines = range(first, first + 2 * config_of(report).constants["STAGES"])
    wanted = {"0x6, 0x20"} | ({"0xf, 0x20"} if load_wait_warps else set())
    pingpong = f"{256 + 32 * load_wait_warps:#x}"
    of_pingpong = {1: (), 2: (4, 5), 3: (4, 5, 14)}[warpgroups]
    wanted |= {f"{number:#x}, {pingpong}" for number in of_pingpong}
    wanted |= {f"{number:#x}, {threads}" for number in pipelines}
    assert taken == wanted, report
    assert max(pipelines) < 16 - load_wait_warps, report
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
def test_lengths_and_batches_share_a_kernel(compiler):
    (counts,) = compiler.reports("hopper", "calls", 64)
    assert counts == {"forward": 2, "dq": 2, "dkdv": 2, "fused": 0}  # one for each side of blocks


@pytest.mark.slow
def test_what_is_launched_without_asking_triton_is_what_triton_would_launch(compiler):
    (report,) = compiler.reports("hopper", "layouts", 64)
    assert report["variants"] >= 51
    assert report["kernels of one variant"] == 1
