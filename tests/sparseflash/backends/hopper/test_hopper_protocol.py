"""How the partitions of the Hopper kernels share buffers, run on the CPU by simulated_gluon.

The simulation has to find the bugs that are planted into the sources of the kernels.
"""

import math
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from unittest.mock import patch

import pytest
import torch

import masks
import sparseflash.backends.compiled  # noqa: F401 (imports Triton once, before the simulations)
from sparseflash.backends import hopper
from sparseflash.dispatch.autograd import run
from sparseflash.dispatch.call import Call
from sparseflash.dispatch.spec import AttentionSpec
from sparseflash.testing import STRIDES, check_attention, make_inputs, poisoned_empty
from tests.helpers import simulated_gluon

MODULES = (
    *("device", "element_masks", "dropout", "launch"),
    *("row_terms", "query_gradient", "key_value_gradient"),
    *("query_sums", "fused_gradient"),
    *("forward_pass", "backward_pass"),
)
PROGRAMS = 2
FUSED = [(dropout, dim) for dropout, dims in hopper.FUSED_HEAD_DIMS.items() for dim in dims]


@contextmanager
def simulation(module="", code="", planted=""):
    """The backend with its kernels simulated and, in one module, some code replaced."""
    with patch.dict(sys.modules), patch.dict(vars(hopper)):
        sys.modules[f"{hopper.__name__}.gluon_shim"] = simulated_gluon
        hopper.FUSED_BLOCKS = 0
        for name in MODULES:
            source = (Path(hopper.__file__).parent / f"{name}.py").read_text()
            if name == module:
                assert code in source, f"{name} has no {code!r}"
                source = source.replace(code, planted)
            loaded = ModuleType(f"{hopper.__name__}.{name}")
            sys.modules[loaded.__name__] = loaded
            setattr(hopper, name, loaded)
            exec(compile(source, name, "exec"), vars(loaded))
            if name == "launch":
                vars(loaded).update(multiprocessors=lambda device: PROGRAMS)
        hopper._passes.cache_clear()
        try:
            yield
        finally:
            hopper._passes.cache_clear()


def check(
    pattern,
    head_dim=64,
    *,
    lengths=(500, 400),
    block_size=128,
    kv_heads=1,
    dtype=torch.bfloat16,
    strides="contiguous",
    scale=None,
    far_below_zero=False,
    key_lengths=None,
    dropout_p=0.0,
    deterministic=True,
):
    batch, heads = (1, 2) if key_lengths is None else (len(key_lengths), 2)
    kinds = {"kv_heads": kv_heads, "dtype": dtype, "strides": strides}
    query, key, value, grad_out = make_inputs(batch, heads, *lengths, head_dim, **kinds)
    if far_below_zero:
        query, key = query.abs() * 6, -key.abs() * 6
    mask = pattern(lengths, block_size)
    options = {} if key_lengths is None else {"key_lengths": torch.tensor(key_lengths)}
    spec = spec_of(query, key, mask, dropout_p, bool(options), deterministic)
    seed = -(2**40) - 3
    if dropout_p:
        options |= {"dropout_p": dropout_p, "seed": seed}
    if scale:
        spec, options = replace(spec, scale=scale), options | {"scale": scale}

    def attention(*inputs):
        lengths = options.get("key_lengths")
        return run(Call(spec, hopper, mask.table(), lengths, seed), *inputs)

    with poisoned_empty():  # in the backward pass too
        check_attention(attention, query, key, value, mask, grad_out=grad_out, **options)


def spec_of(query, key, mask, dropout_p=0.0, has_key_lengths=False, deterministic=True):
    batch, heads, q_len, head_dim = query.shape
    _, kv_heads, k_len, _ = key.shape
    return AttentionSpec(
        *(batch, heads, kv_heads, q_len, k_len, head_dim, query.dtype, query.device),
        *(mask.block_size, mask.num_heads, head_dim**-0.5, dropout_p, has_key_lengths),
        deterministic=deterministic,
    )


PATTERNS = {
    "full": masks.full(),
    "causal": masks.causal(align="top-left"),
    "blocks": masks.random(0.5),
    "heavy row": masks.pattern(lambda q, k: (q // 128 == 2) | (k < 100)),
    "nothing": masks.global_tokens(1) - masks.full(),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_simulated_kernels_are_right(name):
    with simulation():
        check(PATTERNS[name])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", PATTERNS)
def test_simulated_kernels_on_blocks_of_64(name, dtype):
    with simulation():
        check(PATTERNS[name], lengths=(300, 260), block_size=64, dtype=dtype)


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_simulated_kernels_on_blocks_of_64_with_all_that_is_optional(head_dim):
    pattern = masks.stack([PATTERNS["causal"], PATTERNS["heavy row"]])
    options = {"key_lengths": [0, 100, 192], "dropout_p": 0.3, "deterministic": False}
    with simulation():
        check(pattern, head_dim, lengths=(250, 200), block_size=64, **options)


def test_a_group_alone_far_behind_what_is_loaded(monkeypatch):
    monkeypatch.setattr(simulated_gluon, "HURRY", max)
    with simulation():
        check(PATTERNS["causal"], 128, lengths=(300, 260), block_size=64)


@pytest.mark.parametrize("head_dim", [96, 128, 192])
def test_simulated_kernels_with_all_that_is_optional(head_dim):
    pattern = masks.stack([PATTERNS["causal"], PATTERNS["heavy row"]])
    with simulation():
        check(pattern, head_dim, key_lengths=[0, 130, 400], dropout_p=0.3)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", PATTERNS)
def test_the_simulated_kernel_of_all_gradients(name, head_dim):
    with simulation():
        check(PATTERNS[name], head_dim, deterministic=False)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_one_group_far_ahead_of_the_other(head_dim, monkeypatch):
    monkeypatch.setattr(simulated_gluon, "HURRY", max)
    with simulation():
        check(PATTERNS["causal"], head_dim, deterministic=False)


@pytest.mark.parametrize(("dropout", "head_dim"), FUSED)
def test_the_simulated_kernel_of_all_gradients_with_all_that_is_optional(dropout, head_dim):
    pattern = masks.stack([PATTERNS["causal"], PATTERNS["heavy row"]])
    options = {"key_lengths": [0, 130, 400], "dropout_p": 0.3 * dropout, "scale": 0.3}
    with simulation():
        check(pattern, head_dim, deterministic=False, **options)


@pytest.mark.parametrize("key_lengths", [None, [1, 130, 400]])
@pytest.mark.parametrize("deterministic", [True, False])
def test_no_key_past_the_end_has_weight_where_all_scores_are_far_below(deterministic, key_lengths):
    options = {"key_lengths": key_lengths, "far_below_zero": True}
    with simulation():
        check(PATTERNS["full"], deterministic=deterministic, **options)


@pytest.mark.parametrize("strides", STRIDES)
def test_the_simulated_kernel_of_all_gradients_with_other_strides(strides):
    with simulation():
        check(PATTERNS["causal"], 128, lengths=(300, 300), strides=strides, deterministic=False)


def test_simulated_kernels_of_the_widest_tiles():
    with simulation():
        check(PATTERNS["blocks"], 256)


@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 128), (96, 128), (256, 128), (96, 64)])
@pytest.mark.parametrize("with_grad_lse", [False, True])
def test_the_kernel_of_dq_writes_the_row_terms_that_their_own_kernel_writes(
    with_grad_lse, head_dim, block_size
):
    kinds = {"kv_heads": 1, "dtype": torch.bfloat16, "strides": "bshd"}
    query, key, value, grad_out = make_inputs(2, 2, 300, 200, head_dim, **kinds)
    mask = masks.pattern(lambda q, k: q >= 140)((300, 200), block_size)
    call = (mask.table(), None, 0, spec_of(query, key, mask))
    grad_lse = torch.randn(2, 300, 2).mT if with_grad_lse else None
    with simulation():
        out, lse = hopper.forward(query, key, value, *call)
        saved = (grad_out, grad_lse, query, key, value, out, lse, *call)
        padded_len = -(-300 // block_size) * block_size
        written, by_their_own = (written_terms(padded_len, x, *saved) for x in (True, False))
    lse2 = torch.where(lse == -torch.inf, torch.inf, lse * math.log2(math.e))
    delta = (grad_out.float() * out.float()).sum(-1) - (0 if grad_lse is None else grad_lse)
    expected = torch.zeros(2, 2, 2, padded_len)
    expected[..., :300] = torch.stack([lse2, -delta], dim=2)
    assert lse2.isinf().sum() == 2 * 2 * 140
    torch.testing.assert_close(written.view_as(expected), expected)
    assert torch.equal(by_their_own, written)


def written_terms(padded_len, needs_query, *saved_and_call):
    """The row terms of a backward pass that is to make dQ, or nothing."""
    terms = torch.full((2 * 2 * 2, padded_len), torch.nan)
    with patch(f"{hopper.__name__}.row_terms.empty", return_value=terms):
        hopper.backward(*saved_and_call, (needs_query, False, False))
    return terms


LOADS_O = "    out = device.as_matrix(buffer).load(ROWS)\n"
NEEDS_O = """\
    mbarrier.wait(grad_out_ring.filled.index(MEMBER), query_phase)
    grad_out = device.matrix(grad_out_ring, MEMBER).load(ROWS)
    minus_delta = row_terms.minus_delta_of(out, grad_out, grad_lse)
    row_terms.write(vectors, lse2, minus_delta, pair, tokens, call.sizes.rows * call.block)
    # O was loaded by threads: those loads have to be done before the accelerator fills its buffer.
    fence_async_shared()
"""
RELEASES_O = "    device.leave(value_ring, stage)\n    device.leave(key_ring, stage)\n"
ANNOUNCES = """\
            row_stage, row_phase = device.announce(
                call, batch, kv_head, row, walk, row_stage, row_phase
            )
"""
LOADS_KEYS = """\
            if member == 0:
                load_own_keys(
                    keys, values, key_ring, value_ring, grad_keys is not None, call,
                    batch, kv_head, row, key_stage, key_phase,
                )  # fmt: skip
                key_stage, key_phase = device.advance(key_stage, key_phase, KEY_STAGES)
"""
MASKS = "if MASKED and i < masked:"
AWAITS = "    if call.block > PART:\n        await_turn(MEMBER, RELAYS)\n"
PASSES = "    if call.block > PART:\n        pass_turn(MEMBER, RELAYS)\n"
KEYS_ARRIVE = """\
                mbarrier.wait(key_ring.filled.index(stage), phase)
                device.leave(key_ring, stage)
"""
LETS_IN = """\
                if i > 0:
                    let_in(0, RELAYS)
                    let_in(1, RELAYS)
"""
VALUES_ARRIVE = "                mbarrier.wait(value_ring.filled.index(stage), phase)\n"
PLANTED = {
    "values released before they are read": (
        "forward_pass",
        "    acc = warpgroup_mma_wait(0, deps=(acc,))\n    device.leave(value_ring, last)\n",
        "    device.leave(value_ring, last)\n    acc = warpgroup_mma_wait(0, deps=(acc,))\n",
    ),
    "values of the next block released": (
        "forward_pass",
        "device.leave(value_ring, last)",
        "device.leave(value_ring, stage)",
    ),
    "the last values not waited for": (
        "forward_pass",
        "    mbarrier.wait(value_ring.filled.index(stage), phase)\n    acc =",
        "    acc =",
    ),
    "a first tile without its mask": (
        "forward_pass",
        "if MASKED and masked > 0:",
        "if MASKED and masked > 1:",
    ),
    "a full tile with a mask": ("forward_pass", MASKS, MASKS.replace("<", "<=")),
    "a turn that is not passed": ("forward_pass", f"is_async=True)\n{PASSES}", "is_async=True)\n"),
    "a turn that is not awaited": ("forward_pass", AWAITS, ""),
    "no first turn": ("forward_pass", PASSES.replace("call.block > PART", "MEMBER == 1"), ""),
    "a group that is not let in": (
        "forward_pass",
        "                    let_in(1, RELAYS)\n",
        "",
    ),
    "a group let in before the keys are there": (
        "forward_pass",
        KEYS_ARRIVE + LETS_IN,
        LETS_IN + KEYS_ARRIVE,
    ),
    "values that nobody waits for": ("forward_pass", VALUES_ARRIVE, ""),
    "values that the relay keeps": (
        "forward_pass",
        f"{VALUES_ARRIVE}                device.leave(value_ring, stage)\n",
        VALUES_ARRIVE,
    ),
    "a relay that misses tiles": (
        "device",
        "threads: gl.constexpr = 128 * GROUPS + 32 * (1 + RELAYS)",
        "threads: gl.constexpr = 128 * GROUPS + 32",
    ),
    "rows that the relay may not hear": (
        "forward_pass",
        "device.row_ring(GROUPS + RELAYS)",
        "device.row_ring(GROUPS)",
    ),
    "queries handed back before O has left": (
        "forward_pass",
        "    wait_for_stores(0)\n    mbarrier.arrive",
        "    mbarrier.arrive",
    ),
    "a phase that does not turn": ("device", "phase = phase ^ 1", "phase = phase"),
    "a ring emptied by one group alone": (
        "device",
        "threads: gl.constexpr = 128 * GROUPS",
        "threads: gl.constexpr = 128",
    ),
    "rings that share barriers": (
        "forward_pass",
        "device.group_ring(values, STAGES, STAGES,",
        "device.group_ring(values, 0, STAGES,",
    ),
    "a ring that is not handed over": (
        "query_gradient",
        "    device.hand_over(value_ring)\n",
        "",
    ),
    "a buffer filled before it is empty": (
        "device",
        "    await_empty(ring, stage)\n    load",
        "    load",
    ),
    "a fact that is not told": ("device", "    tell(call, stage, FULLS, walk.fulls)\n", ""),
    "an end that is not told": ("device", "    tell(call, stage, ROW, -1)\n", ""),
    "no end": ("forward_pass", "    device.announce_end(call, row_stage, row_phase)\n", ""),
    "queries released before they are read": (
        "key_value_gradient",
        "    dk = warpgroup_mma_wait(0, deps=(dk,))\n    device.leave(query_ring, stage)\n",
        "    device.leave(query_ring, stage)\n    dk = warpgroup_mma_wait(0, deps=(dk,))\n",
    ),
    "row terms not counted": (
        "key_value_gradient",
        "queries.block_type.nbytes + 2 * terms.block_type.nbytes",
        "queries.block_type.nbytes",
    ),
    "O not waited for": (
        "query_gradient",
        "    mbarrier.wait(key_ring.filled.index(stage), phase)\n    mbarrier.wait(value_ring",
        "    mbarrier.wait(value_ring",
    ),
    "O handed back before it is read": (
        "query_gradient",
        f"{LOADS_O}{NEEDS_O}{RELEASES_O}",
        f"{RELEASES_O}{LOADS_O}{NEEDS_O}",
    ),
    "O of the other group": (
        "query_gradient",
        "key_ring if MEMBER == 0 else value_ring",
        "value_ring if MEMBER == 0 else key_ring",
    ),
    "terms of one group alone": (
        "row_terms",
        "gl.store(lse2_row + tokens, lse2)",
        "gl.store(lse2_row + tokens, lse2, mask=tokens % 128 < 64)",
    ),
    "queries overwritten before dQ has left": (
        "query_gradient",
        "        wait_for_stores(0)\n        device.release(query_ring, MEMBER)\n",
        "        device.release(query_ring, MEMBER)\n        wait_for_stores(0)\n",
    ),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_are_found(bug):
    with simulation(*PLANTED[bug]):
        look_for_a_bug(128)


PLANTED_WITHOUT_A_RELAY = {
    "keys not waited for": (
        "        mbarrier.wait(key_ring.filled.index(stage), phase)\n    key =",
        "        pass\n    key =",
    ),
    "values not waited for": (
        "        mbarrier.wait(value_ring.filled.index(last), last_phase)\n    acc =",
        "        pass\n    acc =",
    ),
    "a turn that is not passed": PLANTED["a turn that is not passed"][1:],
    "no first turn": PLANTED["no first turn"][1:],
}


@pytest.mark.parametrize("bug", PLANTED_WITHOUT_A_RELAY)
def test_planted_bugs_are_found_where_groups_wait_for_tiles(bug):
    with simulation("forward_pass", *PLANTED_WITHOUT_A_RELAY[bug]):
        look_for_a_bug(256)


def look_for_a_bug(head_dim):
    """Finds one in one order of the partitions or another, in one program with all rows."""
    pattern = masks.pattern(lambda q, k: (q // 128 == 2) | (k < 450))
    found = pytest.raises((simulated_gluon.Failure, AssertionError))
    with found, patch.dict(globals(), PROGRAMS=1):
        for hurry in (None, min, max):
            with patch.object(simulated_gluon, "HURRY", hurry):
                check(pattern, head_dim, lengths=(600, 520), kv_heads=2)


PLANTED_FOR_ONE_GROUP = {
    "values not handed on while O is loaded": (
        "query_gradient",
        "            device.skip(value_ring, stage)\n",
        "            pass\n",
    ),
    "a ring that waits for a second group": (
        "key_value_gradient",
        "device.group_ring(queries, 0, STAGES, GROUPS)",
        "device.group_ring(queries, 0, STAGES, 2)",
    ),
    "the only buffer of queries handed back before O has left": (
        "forward_pass",
        "    wait_for_stores(0)\n    mbarrier.arrive",
        "    mbarrier.arrive",
    ),
    "keys loaded before their row is announced": (
        "key_value_gradient",
        ANNOUNCES + LOADS_KEYS,
        LOADS_KEYS + ANNOUNCES,
    ),
    "a bank of tiles of 128": ("element_masks", "call.block // 32", "128 // 32"),
}


@pytest.mark.parametrize("bug", PLANTED_FOR_ONE_GROUP)
def test_bugs_planted_for_one_group_are_found(bug):
    pattern = masks.pattern(lambda q, k: (q // 64 == 2) | (k < 150))
    found = pytest.raises((simulated_gluon.Failure, AssertionError, IndexError))
    with simulation(*PLANTED_FOR_ONE_GROUP[bug]), found:
        check(pattern, 128, lengths=(300, 260), block_size=64, kv_heads=2)


PLANTED_IN_THE_FUSED_KERNEL = {
    "dS of the other group not waited for": (
        "            mbarrier.wait(exchange.filled.index(entry), place.side_phase)\n",
        "            pass\n",
    ),
    "dS overwritten before the other group has read it": (
        "SIDES = gl.constexpr(2)",
        "SIDES = gl.constexpr(1)",
    ),
    "dQ overwritten before it has left": (
        "    if last_tile is not None:\n        wait_for_stores(0)\n    dk, scores",
        "    dk, scores",
    ),
    "dQ added to that of the next tile": (
        "PARTS + (i + part - 1) % PARTS",
        "PARTS + (i + part) % PARTS",
    ),
    "queries released before dK has read them": (
        "        device.leave(rings.query_ring, last.stage)\n    device",
        "        device.leave(rings.query_ring, stage)\n    device",
    ),
    "keys released by one group alone": (
        "device.ring(keys, 2 * KEY_STAGES, 2)",
        "device.ring(keys, 2 * KEY_STAGES, 1)",
    ),
    "keys of the row before": ("opaque(place.own + group)", "opaque(place.own * 0 + group)"),
    "a full tile with a mask": (MASKS, MASKS.replace("<", "<=")),
}


AT_64_ALONE = ("keys of the row before",)  # at 128 dims there is room for those of one row


@pytest.mark.parametrize(
    ("bug", "head_dim"),
    [(bug, 64) for bug in PLANTED_IN_THE_FUSED_KERNEL]
    + [(bug, 128) for bug in PLANTED_IN_THE_FUSED_KERNEL if bug not in AT_64_ALONE],
)
def test_bugs_planted_in_the_kernel_of_all_gradients_are_found(bug, head_dim, monkeypatch):
    monkeypatch.setattr(simulated_gluon, "HURRY", max)
    pattern = masks.pattern(lambda q, k: (q // 128 == 2) | (k < 300))
    code = PLANTED_IN_THE_FUSED_KERNEL[bug]
    found = pytest.raises((simulated_gluon.Failure, AssertionError))
    with simulation("fused_gradient", *code), found:
        check(pattern, head_dim, lengths=(600, 520), kv_heads=2, deterministic=False)
