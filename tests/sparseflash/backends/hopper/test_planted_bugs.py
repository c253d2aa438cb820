"""The simulation finds each bug that is planted into the Hopper kernels, by the check that should.

Without a bug the same calls pass.
"""

from typing import NamedTuple
from unittest.mock import patch

import pytest

import masks
from tests.helpers import simulated_gluon
from tests.helpers.planted_bugs import Argument, Bug, Call, Constant, Drop, Move, Replace
from tests.helpers.simulated_hopper import check, simulation

# What finds a bug: nobody can go on; a barrier counts what it should not; results are wrong.
DEADLOCK = "deadlock"
BARRIER = "more arrivals|arrives at barrier .* again|is signalled again"
NUMBERS = "NaN|largest absolute error"
BOUNDS = "out of bounds"
FOUND = (simulated_gluon.Failure, AssertionError, IndexError)


class Planted(NamedTuple):
    """A bug in a module of the backend, and the check that finds it."""

    module: str
    found: str
    changes: tuple[Bug, ...]


def planted(module: str, found: str, *changes: Bug) -> Planted:
    return Planted(module, found, changes)


NO_SIGNAL = Drop(Call("mma_one_tile", "pingpong_signal"))
NO_FIRST_SIGNAL = Drop(Call("consumer", "pingpong_signal"))
NO_WAIT_FOR_STORES = Drop(Call("release_query_after_store", "tma_store_wait"))
TWO_WARPGROUPS = {
    "V is released before O += P V has read it": planted(
        "kernels.forward",
        NUMBERS,
        Move(
            Call("mma_one_tile", "consumer_release", "value_pipeline"),
            Call("mma_one_tile", "warpgroup_mma_wait", "acc"),
        ),
    ),
    "V of the next block is released": planted(
        "kernels.forward",
        BARRIER,
        Argument(Call("mma_one_tile", "consumer_release", "value_pipeline"), 1, "state"),
    ),
    "the last V is not waited for": planted(
        "kernels.forward", NUMBERS, Drop(Call("mainloop", "consumer_wait", "value_pipeline"))
    ),
    "the first tile is not masked": planted(
        "kernels.forward", NUMBERS, Replace("mainloop", "n_masked > 0", "n_masked > 1")
    ),
    "a full tile is masked": planted(
        "kernels.forward", NUMBERS, Replace("mma_one_tile", "i < n_masked", "i <= n_masked")
    ),
    "ping-pong: the other warpgroup is not signalled": planted(
        "kernels.forward", DEADLOCK, NO_SIGNAL
    ),
    "ping-pong: a warpgroup does not wait": planted(
        "kernels.forward", BARRIER, Drop(Call("mma_one_tile", "pingpong_wait"))
    ),
    "ping-pong: nobody is signalled first": planted("kernels.forward", DEADLOCK, NO_FIRST_SIGNAL),
    "load-wait warp: one warpgroup is not signalled": planted(
        "kernels.forward", DEADLOCK, Drop(Call("load_wait_warp", "signal_warpgroup", nth=1))
    ),
    "load-wait warp: signals come before K": planted(
        "kernels.forward",
        NUMBERS,
        Move(
            Call("load_wait_warp", "signal_warpgroup", nth=0),
            Call("load_wait_warp", "consumer_wait", "key_pipeline"),
        ),
    ),
    "load-wait warp: V is not waited for": planted(
        "kernels.forward", BARRIER, Drop(Call("load_wait_warp", "consumer_wait", "value_pipeline"))
    ),
    "load-wait warp: V is not released": planted(
        "kernels.forward",
        DEADLOCK,
        Drop(Call("load_wait_warp", "consumer_release", "value_pipeline")),
    ),
    "load-wait warp: empty barriers do not count it": planted(
        "device.pipeline",
        BARRIER,
        Replace("make_named_barrier_pipeline", "1 + LOAD_WAIT_WARPS", "1"),
    ),
    "load-wait warp: work tiles do not count it": planted(
        "kernels.forward",
        DEADLOCK,
        Argument(Call("forward_kernel", "make_work_queue"), 0, "WARPGROUPS"),
    ),
    "Q is released before O is stored from its buffer": planted(
        "kernels.forward", NUMBERS, NO_WAIT_FOR_STORES
    ),
    "the phase never changes": planted(
        "device.pipeline", DEADLOCK, Replace("advance", "phase ^ 1", "phase")
    ),
    "empty barriers count one warpgroup": planted(
        "device.pipeline",
        BARRIER,
        Replace("make_named_barrier_pipeline", "128 * WARPGROUPS", "128"),
    ),
    "K and V share empty barriers": planted(
        "kernels.forward",
        BARRIER,
        Argument(
            Call("forward_kernel", "make_named_barrier_pipeline", "values"),
            1,
            "0",
        ),
    ),
    "V begins with no empty stage": planted(
        "kernels.backward_dq",
        DEADLOCK,
        Drop(Call("consumer", "release_all_stages", "value_pipeline")),
    ),
    "the producer does not acquire": planted(
        "device.pipeline", BARRIER, Drop(Call("producer_load", "producer_acquire"))
    ),
    "a work tile without its number of full blocks": planted(
        "device.scheduler", DEADLOCK, Drop(Call("publish_work", "write_field", "N_FULL"))
    ),
    "the end of work has no content": planted(
        "device.scheduler", DEADLOCK, Drop(Call("publish_end", "write_field"))
    ),
    "the end of work is not published": planted(
        "kernels.forward", DEADLOCK, Drop(Call("producer", "publish_end"))
    ),
    "Q is released before dK += dS Q has read it": planted(
        "kernels.backward_dkdv",
        NUMBERS,
        Move(
            Call("mma_one_tile", "consumer_release", "query_pipeline"),
            Call("mma_one_tile", "warpgroup_mma_wait", "dk"),
        ),
    ),
    "the bytes of LSE and delta are not expected": planted(
        "kernels.backward_dkdv",
        BARRIER,
        Argument(Call("load_query_tiles", "expect"), 1, "queries.block_type.nbytes"),
    ),
    "O is not waited for": planted(
        "kernels.backward_dq", BARRIER, Drop(Call("prologue", "consumer_wait", "key_pipeline"))
    ),
    "O is released before it is read": planted(
        "kernels.backward_dq",
        NUMBERS,
        Move(
            Call("prologue", "consumer_release", "value_pipeline"), Call("prologue", "as_matrix")
        ),
        Move(Call("prologue", "consumer_release", "key_pipeline"), Call("prologue", "as_matrix")),
    ),
    "O of the other warpgroup is read": planted(
        "kernels.backward_dq", NUMBERS, Replace("prologue", "WARPGROUP == 0", "WARPGROUP == 1")
    ),
    "LSE of one warpgroup alone is written": planted(
        "kernels.lse_delta",
        NUMBERS,
        Argument(Call("write_lse_delta", "store", "lse_log2"), "mask", "tokens % 128 < 64"),
    ),
    "Q is released before dQ is stored from its buffer": planted(
        "kernels.backward_dq",
        NUMBERS,
        Move(
            Call("consumer", "consumer_release", "query_pipeline"),
            Call("consumer", "tma_store_wait"),
        ),
    ),
}
WITHOUT_LOAD_WAIT_WARP = {
    "K is not waited for": planted(
        "kernels.forward", BARRIER, Drop(Call("mma_one_tile", "consumer_wait", "key_pipeline"))
    ),
    "V is not waited for": planted(
        "kernels.forward", BARRIER, Drop(Call("mma_one_tile", "consumer_wait", "value_pipeline"))
    ),
    "ping-pong: the other warpgroup is not signalled": planted(
        "kernels.forward", DEADLOCK, NO_SIGNAL
    ),
    "ping-pong: nobody is signalled first": planted("kernels.forward", DEADLOCK, NO_FIRST_SIGNAL),
}
ONE_WARPGROUP = {
    "V is not signalled where O takes one stage": planted(
        "kernels.backward_dq",
        DEADLOCK,
        Drop(Call("producer", "producer_commit", "value_pipeline")),
    ),
    "empty barriers count a second warpgroup": planted(
        "kernels.backward_dkdv",
        DEADLOCK,
        Argument(Call("backward_dkdv_kernel", "make_named_barrier_pipeline", "queries"), 3, "2"),
    ),
    "the one stage of Q is released before O is stored from it": planted(
        "kernels.forward", NUMBERS, NO_WAIT_FOR_STORES
    ),
    "K is loaded before its work tile is published": planted(
        "kernels.backward_dkdv",
        DEADLOCK,
        Move(Call("producer", "load_key_value_row"), Call("producer", "publish_work")),
    ),
    "bit tiles are read as those of blocks of 128": planted(
        "device.masking",
        BOUNDS,
        Replace("bit_tile_words", "params.column_tokens // 32", "128 // 32"),
    ),
}
PADDED_KEYS = {
    "a padded key is copied": planted(
        "kernels.clipped_block", NUMBERS, Replace("copy_rows", "rows < count", "rows <= count")
    ),
    "the clipped block is read with its padded keys": planted(
        "device.block_list",
        NUMBERS,
        Replace("load_key_value_tile", "more_start < 0", "more_start <= 0"),
    ),
    "the block after the copied one is read": planted(
        "device.block_list",
        NUMBERS,
        Replace("first_of_more", "key_length // params.column_tokens", "key_length // 256"),
    ),
    "gradients of padded keys are not set to 0": planted(
        "kernels.backward_dkdv", NUMBERS, Replace("consumer", "gl.where(inside, dv, 0.0)", "dv")
    ),
}
PACKED_HEADS = {
    "both warpgroups have the first head": planted(
        "kernels.forward", NUMBERS, Replace("head_of_warpgroup", "WARPGROUP % PACKED_HEADS", "0")
    ),
    "the second head begins with the next queries": planted(
        "kernels.forward",
        NUMBERS,
        Replace("first_row_of", "warpgroup // packed_heads", "warpgroup"),
    ),
    "pairs are counted as heads": planted(
        "kernels.forward", NUMBERS, Replace("producer", "head * PACKED_HEADS", "head")
    ),
    "work tiles are decoded as those of one head": planted(
        "kernels.forward", NUMBERS, Argument(Call("producer", "decode_work_id"), 2, "1")
    ),
    "O of both heads is stored as that of the first": planted(
        "kernels.forward",
        NUMBERS,
        Argument(Call("consumer", "tma_store"), 1, "[work.batch, work.head, query_start, 0]"),
    ),
    "the other head is not signalled": planted("kernels.forward", DEADLOCK, NO_SIGNAL),
    "there are as many work tiles as without packed heads": planted(
        "launch",
        BOUNDS,
        Replace("_launch_of", "spec.heads // (self.packed_heads or 1)", "spec.heads"),
    ),
}
FUSED = "kernels.backward_fused"
ALL_GRADIENTS = {
    "Q of this tile is released in place of the last one": planted(
        FUSED,
        DEADLOCK,
        Argument(Call("mma_one_tile", "consumer_release", "query_pipeline"), 1, "state"),
    ),
    "empty barriers of K count one warpgroup": planted(
        FUSED, DEADLOCK, Argument(Call("backward_fused_kernel", "make_pipeline", "keys"), 2, "1")
    ),
    "a full tile is masked": planted(
        FUSED, NUMBERS, Replace("mma_one_tile", "i < n_masked", "i <= n_masked")
    ),
}
WITHOUT_DQ_WARPGROUP = {
    "dS of the other warpgroup is not waited for": planted(
        FUSED, NUMBERS, Drop(Call("issue_dq_mma", "wait"))
    ),
    "dS has one buffer: it is overwritten before it is read": planted(
        FUSED, DEADLOCK, Constant("DS_STAGES", "gl.constexpr(1)")
    ),
    "dQ is overwritten before it is stored": planted(
        FUSED, NUMBERS, Drop(Call("mma_one_tile", "tma_store_wait"))
    ),
    "dQ is added to that of the next tile": planted(
        FUSED, NUMBERS, Replace("mainloop", "i - 1", "i")
    ),
}
DQ_WARPGROUP = {
    "dS is not waited for": planted(
        FUSED, DEADLOCK, Drop(Call("add_one_tile", "wait", "ds_exchange"))
    ),
    "dS is overwritten before it is read": planted(
        FUSED, DEADLOCK, Drop(Call("mma_one_tile", "wait", "ds_empty"))
    ),
    "dQ is overwritten before it is stored": planted(
        FUSED, NUMBERS, Drop(Call("add_one_tile", "tma_store_wait"))
    ),
    "dQ is added to that of the next tile": planted(
        FUSED, NUMBERS, Replace("dq_warpgroup", "i % TILES_PER_BLOCK", "(i + 1) % TILES_PER_BLOCK")
    ),
    "K of the first stage is read in every row": planted(
        FUSED, NUMBERS, Argument(Call("dq_warpgroup", "add_one_tile"), 3, "0")
    ),
    "K is released by the dQ warpgroup alone": planted(
        FUSED, DEADLOCK, Drop(Call("consumer", "consumer_release", "key_pipeline"))
    ),
    "work tiles are released without the dQ warpgroup": planted(
        FUSED, DEADLOCK, Replace("backward_fused_kernel", "3 if DQ_WARPGROUP else 2", "2")
    ),
}


def two_warpgroups(head_dim):
    """In one order of the partitions after another, by one CTA that has all work tiles."""
    pattern = masks.pattern(lambda q, k: (q // 128 == 2) | (k < 450))
    for order in (None, min, max):
        with patch.object(simulated_gluon, "ORDER", order):
            check(pattern, head_dim, lengths=(600, 520), kv_heads=2)


def one_warpgroup():
    pattern = masks.pattern(lambda q, k: (q // 64 == 2) | (k < 150))
    check(pattern, 128, lengths=(300, 260), block_size=64, kv_heads=2)


def packed_heads():
    pattern = masks.pattern(lambda q, k: (q // 64 == 2) | (k < 150))
    lengths = (300, 260)
    check(pattern, 64, lengths=lengths, block_size=64, heads=4, kv_heads=2, key_lengths=[260, 90])


def padded_keys(deterministic=True):
    options = {"lengths": (200, 260), "key_lengths": [40, 130, 256]}
    check(masks.causal(align="top-left"), 64, deterministic=deterministic, **options)


def all_gradients(head_dim):
    pattern = masks.pattern(lambda q, k: (q // 128 == 2) | (k < 300))
    with patch.object(simulated_gluon, "ORDER", max):
        check(pattern, head_dim, lengths=(600, 520), kv_heads=2, deterministic=False)


@pytest.mark.parametrize("head_dim", [128, 256])
def test_two_warpgroups_without_a_bug(head_dim):
    with simulation(ctas=1):
        two_warpgroups(head_dim)


@pytest.mark.parametrize("bug", TWO_WARPGROUPS)
def test_two_warpgroups(bug):
    module, found, changes = TWO_WARPGROUPS[bug]
    with simulation({module: changes}, ctas=1), pytest.raises(FOUND, match=found):
        two_warpgroups(128)


@pytest.mark.parametrize("bug", WITHOUT_LOAD_WAIT_WARP)
def test_two_warpgroups_without_load_wait_warp(bug):
    module, found, changes = WITHOUT_LOAD_WAIT_WARP[bug]
    with simulation({module: changes}, ctas=1), pytest.raises(FOUND, match=found):
        two_warpgroups(256)


def test_one_warpgroup_without_a_bug():
    with simulation():
        one_warpgroup()


@pytest.mark.parametrize("bug", ONE_WARPGROUP)
def test_one_warpgroup(bug):
    module, found, changes = ONE_WARPGROUP[bug]
    with simulation({module: changes}), pytest.raises(FOUND, match=found):
        one_warpgroup()


def test_packed_heads_without_a_bug():
    with simulation(packed_widths=(64,)):
        packed_heads()


@pytest.mark.parametrize("bug", PACKED_HEADS)
def test_packed_heads(bug):
    module, found, changes = PACKED_HEADS[bug]
    planted_bugs = simulation({module: changes}, packed_widths=(64,))
    with planted_bugs, pytest.raises(FOUND, match=found):
        packed_heads()


@pytest.mark.parametrize("deterministic", [True, False])
def test_padded_keys_without_a_bug(deterministic):
    with simulation():
        padded_keys(deterministic)


@pytest.mark.parametrize("bug", PADDED_KEYS)
def test_padded_keys(bug):
    module, found, changes = PADDED_KEYS[bug]
    with simulation({module: changes}), pytest.raises(FOUND, match=found):
        padded_keys()


def test_the_kernel_of_all_gradients_reads_no_padded_keys():
    bug = Replace("backward_fused_kernel", "more_keys", "None")
    with simulation({FUSED: (bug,)}), pytest.raises(FOUND, match=NUMBERS):
        padded_keys(deterministic=False)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_all_gradients_without_a_bug(head_dim):
    with simulation():
        all_gradients(head_dim)


BUGS_OF_ALL_GRADIENTS = [
    *((64, bug, at) for bug, at in (ALL_GRADIENTS | DQ_WARPGROUP).items()),
    *((128, bug, at) for bug, at in (ALL_GRADIENTS | WITHOUT_DQ_WARPGROUP).items()),
]


@pytest.mark.parametrize(
    ("head_dim", "planted_bug"),
    [pytest.param(dim, at, id=f"{dim}-{bug}") for dim, bug, at in BUGS_OF_ALL_GRADIENTS],
)
def test_all_gradients(head_dim, planted_bug):
    module, found, changes = planted_bug
    with simulation({module: changes}), pytest.raises(FOUND, match=found):
        all_gradients(head_dim)
