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
BARRIER = "more arrivals|arrives at barrier .* again|a turn is passed"
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


NO_SIGNAL = Drop(Call("step", "pass_turn"))
NO_FIRST_SIGNAL = Drop(Call("consume", "pass_turn"))
NO_WAIT_FOR_STORES = Drop(Call("hand_back", "wait_for_stores"))
TWO_WARPGROUPS = {
    "V is released before O += P V has read it": planted(
        "forward_pass",
        NUMBERS,
        Move(Call("step", "leave", "value_ring"), Call("step", "warpgroup_mma_wait", "acc")),
    ),
    "V of the next block is released": planted(
        "forward_pass", BARRIER, Argument(Call("step", "leave", "value_ring"), 1, "stage")
    ),
    "the last V is not waited for": planted(
        "forward_pass", NUMBERS, Drop(Call("attend", "wait", "value_ring"))
    ),
    "the first tile is not masked": planted(
        "forward_pass", NUMBERS, Replace("attend", "masked > 0", "masked > 1")
    ),
    "a full tile is masked": planted(
        "forward_pass", NUMBERS, Replace("step", "i < masked", "i <= masked")
    ),
    "ping-pong: the other warpgroup is not signalled": planted(
        "forward_pass", DEADLOCK, NO_SIGNAL
    ),
    "ping-pong: a warpgroup does not wait": planted(
        "forward_pass", BARRIER, Drop(Call("step", "await_turn"))
    ),
    "ping-pong: nobody is signalled first": planted("forward_pass", DEADLOCK, NO_FIRST_SIGNAL),
    "load-wait warp: one warpgroup is not signalled": planted(
        "forward_pass", DEADLOCK, Drop(Call("relay", "let_in", nth=1))
    ),
    "load-wait warp: signals come before K": planted(
        "forward_pass",
        NUMBERS,
        Move(Call("relay", "let_in", nth=0), Call("relay", "wait", "key_ring")),
    ),
    "load-wait warp: V is not waited for": planted(
        "forward_pass", BARRIER, Drop(Call("relay", "wait", "value_ring"))
    ),
    "load-wait warp: V is not released": planted(
        "forward_pass", DEADLOCK, Drop(Call("relay", "leave", "value_ring"))
    ),
    "load-wait warp: empty barriers do not count it": planted(
        "device", BARRIER, Replace("group_ring", "1 + RELAYS", "1")
    ),
    "load-wait warp: work tiles do not count it": planted(
        "forward_pass", DEADLOCK, Argument(Call("forward_kernel", "row_ring"), 0, "GROUPS")
    ),
    "Q is released before O is stored from its buffer": planted(
        "forward_pass", NUMBERS, NO_WAIT_FOR_STORES
    ),
    "the phase never changes": planted(
        "device", DEADLOCK, Replace("advance", "phase ^ 1", "phase")
    ),
    "empty barriers count one warpgroup": planted(
        "device", BARRIER, Replace("group_ring", "128 * GROUPS", "128")
    ),
    "K and V share empty barriers": planted(
        "forward_pass", BARRIER, Argument(Call("forward_kernel", "group_ring", "values"), 1, "0")
    ),
    "V begins with no empty stage": planted(
        "query_gradient", DEADLOCK, Drop(Call("consume", "hand_over", "value_ring"))
    ),
    "the producer does not acquire": planted(
        "device", BARRIER, Drop(Call("refill", "await_empty"))
    ),
    "a work tile without its number of full blocks": planted(
        "device", DEADLOCK, Drop(Call("announce", "tell", "FULLS"))
    ),
    "the end of work has no content": planted(
        "device", DEADLOCK, Drop(Call("announce_end", "tell"))
    ),
    "the end of work is not published": planted(
        "forward_pass", DEADLOCK, Drop(Call("produce", "announce_end"))
    ),
    "Q is released before dK += dS Q has read it": planted(
        "key_value_gradient",
        NUMBERS,
        Move(Call("step", "leave", "query_ring"), Call("step", "warpgroup_mma_wait", "dk")),
    ),
    "the bytes of LSE and delta are not expected": planted(
        "key_value_gradient",
        BARRIER,
        Argument(Call("load_queries", "expect"), 1, "queries.block_type.nbytes"),
    ),
    "O is not waited for": planted(
        "query_gradient", BARRIER, Drop(Call("begin", "wait", "key_ring"))
    ),
    "O is released before it is read": planted(
        "query_gradient",
        NUMBERS,
        Move(Call("begin", "leave", "value_ring"), Call("begin", "as_matrix")),
        Move(Call("begin", "leave", "key_ring"), Call("begin", "as_matrix")),
    ),
    "O of the other warpgroup is read": planted(
        "query_gradient", NUMBERS, Replace("begin", "MEMBER == 0", "MEMBER == 1")
    ),
    "LSE of one warpgroup alone is written": planted(
        "row_terms", NUMBERS, Argument(Call("write", "store", "lse2"), "mask", "tokens % 128 < 64")
    ),
    "Q is released before dQ is stored from its buffer": planted(
        "query_gradient",
        NUMBERS,
        Move(Call("consume", "release", "query_ring"), Call("consume", "wait_for_stores")),
    ),
}
WITHOUT_LOAD_WAIT_WARP = {
    "K is not waited for": planted(
        "forward_pass", BARRIER, Drop(Call("step", "wait", "key_ring"))
    ),
    "V is not waited for": planted(
        "forward_pass", BARRIER, Drop(Call("step", "wait", "value_ring"))
    ),
    "ping-pong: the other warpgroup is not signalled": planted(
        "forward_pass", DEADLOCK, NO_SIGNAL
    ),
    "ping-pong: nobody is signalled first": planted("forward_pass", DEADLOCK, NO_FIRST_SIGNAL),
}
ONE_WARPGROUP = {
    "V is not signalled where O takes one stage": planted(
        "query_gradient", DEADLOCK, Drop(Call("produce", "skip"))
    ),
    "empty barriers count a second warpgroup": planted(
        "key_value_gradient",
        DEADLOCK,
        Argument(Call("key_value_gradient_kernel", "group_ring", "queries"), 3, "2"),
    ),
    "the one stage of Q is released before O is stored from it": planted(
        "forward_pass", NUMBERS, NO_WAIT_FOR_STORES
    ),
    "K is loaded before its work tile is published": planted(
        "key_value_gradient",
        DEADLOCK,
        Move(Call("produce", "load_own_keys"), Call("produce", "announce")),
    ),
    "bit tiles are read as those of blocks of 128": planted(
        "element_masks", BOUNDS, Replace("mask_words", "call.block // 32", "128 // 32")
    ),
}
ALL_GRADIENTS = {
    "dS of the other warpgroup is not waited for": planted(
        "fused_gradient", NUMBERS, Drop(Call("begin_query_gradient", "wait"))
    ),
    "dS has one buffer: it is overwritten before it is read": planted(
        "fused_gradient", DEADLOCK, Constant("SIDES", "gl.constexpr(1)")
    ),
    "dQ is overwritten before it is stored": planted(
        "fused_gradient", NUMBERS, Drop(Call("visit_tile", "wait_for_stores"))
    ),
    "dQ is added to that of the next tile": planted(
        "fused_gradient", NUMBERS, Replace("visit_tiles", "i + part - 1", "i + part")
    ),
    "Q of this tile is released in place of the last one": planted(
        "fused_gradient", DEADLOCK, Argument(Call("visit_tile", "leave", "query_ring"), 1, "stage")
    ),
    "empty barriers of K count one warpgroup": planted(
        "fused_gradient", DEADLOCK, Argument(Call("fused_gradient_kernel", "ring", "keys"), 2, "1")
    ),
    "K of the first stage is read in every row": planted(
        "fused_gradient",
        NUMBERS,
        Replace("begin_query_gradient", "place.own + group", "place.own * 0 + group"),
    ),
    "a full tile is masked": planted(
        "fused_gradient", NUMBERS, Replace("visit_tile", "i < masked", "i <= masked")
    ),
}
AT_64_ALONE = ("K of the first stage is read in every row",)  # 128 dims have one stage of K


def two_warpgroups(head_dim):
    """In one order of the partitions after another, by one program that has all rows."""
    pattern = masks.pattern(lambda q, k: (q // 128 == 2) | (k < 450))
    for hurry in (None, min, max):
        with patch.object(simulated_gluon, "HURRY", hurry):
            check(pattern, head_dim, lengths=(600, 520), kv_heads=2)


def one_warpgroup():
    pattern = masks.pattern(lambda q, k: (q // 64 == 2) | (k < 150))
    check(pattern, 128, lengths=(300, 260), block_size=64, kv_heads=2)


def all_gradients(head_dim):
    pattern = masks.pattern(lambda q, k: (q // 128 == 2) | (k < 300))
    with patch.object(simulated_gluon, "HURRY", max):
        check(pattern, head_dim, lengths=(600, 520), kv_heads=2, deterministic=False)


@pytest.mark.parametrize("head_dim", [128, 256])
def test_two_warpgroups_without_a_bug(head_dim):
    with simulation(programs=1):
        two_warpgroups(head_dim)


@pytest.mark.parametrize("bug", TWO_WARPGROUPS)
def test_two_warpgroups(bug):
    module, found, changes = TWO_WARPGROUPS[bug]
    with simulation({module: changes}, programs=1), pytest.raises(FOUND, match=found):
        two_warpgroups(128)


@pytest.mark.parametrize("bug", WITHOUT_LOAD_WAIT_WARP)
def test_two_warpgroups_without_load_wait_warp(bug):
    module, found, changes = WITHOUT_LOAD_WAIT_WARP[bug]
    with simulation({module: changes}, programs=1), pytest.raises(FOUND, match=found):
        two_warpgroups(256)


def test_one_warpgroup_without_a_bug():
    with simulation():
        one_warpgroup()


@pytest.mark.parametrize("bug", ONE_WARPGROUP)
def test_one_warpgroup(bug):
    module, found, changes = ONE_WARPGROUP[bug]
    with simulation({module: changes}), pytest.raises(FOUND, match=found):
        one_warpgroup()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_all_gradients_without_a_bug(head_dim):
    with simulation():
        all_gradients(head_dim)


@pytest.mark.parametrize(
    ("bug", "head_dim"),
    [(bug, 64) for bug in ALL_GRADIENTS]
    + [(bug, 128) for bug in ALL_GRADIENTS if bug not in AT_64_ALONE],
)
def test_all_gradients(bug, head_dim):
    module, found, changes = ALL_GRADIENTS[bug]
    with simulation({module: changes}), pytest.raises(FOUND, match=found):
        all_gradients(head_dim)
