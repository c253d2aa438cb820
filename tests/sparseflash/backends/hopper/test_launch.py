"""What the host makes of tensors and tables before a Hopper kernel starts."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import masks
from sparseflash.backends import hopper
from sparseflash.backends.hopper import configs, launch
from sparseflash.backends.hopper.configs import KernelConfig
from sparseflash.backends.triton_common import launcher
from sparseflash.dispatch.call import Call, Plan, empty_tensors, layouts_of, prepare_once
from sparseflash.testing import STRIDES, make_inputs
from tests.helpers.calls import spec_of

SPEC = spec_of(
    *(torch.empty(3, heads, 1024, 64, dtype=torch.bfloat16) for heads in (4, 2)),
    masks.full()(1024),
)


@pytest.fixture(autouse=True)
def multiprocessors(monkeypatch):
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 10)


@pytest.mark.parametrize("strides", STRIDES)
def test_tensors_are_copied_only_where_they_cannot_be_addressed(strides):
    query, *_ = make_inputs(2, 3, 40, 40, 64, dtype=torch.float16, strides=strides)
    addressed = launch.addressable(query)
    assert torch.equal(addressed, query)
    assert (addressed is query) == (strides in ("contiguous", "bshd"))
    descriptor = launch.TmaTile(64).descriptor(addressed)
    assert descriptor.block_shape == [1, 1, 64, 64]
    assert descriptor.strides == list(addressed.stride())


@pytest.mark.parametrize(
    ("head_dim", "width"), [(8, 64), (64, 64), (72, 128), (136, 256), (256, 256)]
)
def test_tiles_are_of_few_widths(head_dim, width):
    query, *_ = make_inputs(1, 1, 40, 40, head_dim, dtype=torch.float16)
    descriptor = launch.TmaTile(64).descriptor(query)
    assert descriptor.block_shape == [1, 1, 64, width]
    assert descriptor.shape == list(query.shape)


def test_strides_of_single_entries_do_not_matter():
    query = torch.zeros(1, 1, 40, 64, dtype=torch.float16).as_strided(
        (1, 1, 40, 64), (3, 5, 64, 1)
    )
    assert launch.addressable(query) is query
    assert launch.TmaTile(64).descriptor(query).strides[:2] == [8, 8]


@pytest.mark.parametrize(
    ("pattern", "is_dynamic", "heads_per_group"),
    [
        (masks.full(), False, 1),
        (masks.strided(2), False, 1),
        (masks.causal(), True, 12),
        (masks.pattern(lambda q, k: (q // 128 == 3) | (k < 100)), True, 12),
        (masks.global_tokens(1) - masks.full(), False, 1),
    ],
)
def test_rows_of_unequal_lengths_are_scheduled_dynamically_and_very_long_ones_first(
    pattern, is_dynamic, heads_per_group
):
    table = pattern(1024, block_size=128).table()
    counter = launch.make_work_counter(table.by_query, SPEC)
    assert (counter is not None) == is_dynamic
    # Beside another kernel, such as that of an exchange, CTAs would start their shares late.
    beside = replace(SPEC, shares_device=True)
    assert launch.make_work_counter(table.by_query, beside) is not None
    sizes, grid = launch.sizes_and_grid(SPEC, table.by_query, SPEC.heads, KernelConfig(1, {}))
    assert sizes == (4, 1024, 1024, 1, 8, 3 * 4 * 8, heads_per_group)
    assert grid == (10, 1, 1)


@pytest.mark.parametrize(
    ("seq_len", "head_dim", "dq_bytes", "heads_per_group"),
    [
        (1024, 64, 0, 12),
        (16_384, 64, 0, 8),
        (16_384, 128, 0, 4),
        (16_384, 128, 4, 2),
        (65_536, 128, 0, 1),
        (262_144, 128, 0, 1),
    ],
)
def test_a_group_has_as_many_imbalanced_heads_as_l2_holds(
    seq_len, head_dim, dq_bytes, heads_per_group
):
    spec = replace(SPEC, q_len=seq_len, k_len=seq_len, head_dim=head_dim, value_dim=head_dim)
    rows = masks.causal()(seq_len).table().by_query
    config = KernelConfig(1, {}, dq_bytes)
    sizes, _ = launch.sizes_and_grid(spec, rows, SPEC.heads, config)
    assert sizes[-1] == heads_per_group
    in_l2 = sizes[-1] * seq_len * head_dim * (4 + dq_bytes)
    assert in_l2 <= configs.L2_OPERAND_BYTES or sizes[-1] == 1


@pytest.mark.parametrize(
    ("seq_len", "num_bh", "heads_per_group"),
    [
        (4096, 128, 16),  # the group before the last fills the time of the longest row
        (8192, 16, 16),  # the longest row of a group of 8 would run alone for long
        (16_384, 32, 32),
    ],
)
def test_heads_stay_in_groups_unless_the_longest_row_would_end_alone(
    seq_len, num_bh, heads_per_group
):
    pattern = masks.local(512) | masks.global_tokens(128)
    rows = pattern(seq_len).table().by_query
    assert rows.imbalance > 3
    spec = replace(SPEC, q_len=seq_len, k_len=seq_len, head_dim=128, value_dim=128)
    assert launch.heads_per_group_of(spec, rows, num_bh, ctas=132) == heads_per_group


@pytest.mark.parametrize(
    ("pattern", "seq_len", "num_bh", "heads_per_group"),
    [
        # The last group of 2 has 1 head, with 1.8 rows for each CTA.
        (masks.causal(), 30_720, 7, 7),
        (masks.causal(), 30_720, 8, 2),
        (masks.causal(), 8192, 12, 12),  # 8 and 4
        (masks.causal(), 8192, 16, 8),
        # The longest row is 5.7 to 6.3 times the mean.
        (masks.local(2048) | masks.global_tokens(1560), 41_984, 7, 7),
        (masks.local(2048) | masks.global_tokens(1560), 46_080, 8, 8),
        (masks.local(2048) | masks.global_tokens(1560), 46_080, 64, 2),
    ],
)
def test_a_last_group_of_fewer_heads_and_rows_taken_ahead_count(
    pattern, seq_len, num_bh, heads_per_group
):
    rows = pattern(seq_len).table().by_query
    spec = replace(SPEC, q_len=seq_len, k_len=seq_len, head_dim=128, value_dim=128)
    assert launch.heads_per_group_of(spec, rows, num_bh, ctas=132) == heads_per_group


@pytest.mark.parametrize("pattern", [masks.full(), masks.causal()])
def test_a_batch_without_elements_has_no_work_tile(pattern):
    rows = pattern(1024, block_size=128).table().by_query
    spec = replace(SPEC, batch=0)
    sizes, grid = launch.sizes_and_grid(spec, rows, SPEC.heads, KernelConfig(1, {}))
    assert sizes[-2:] == (0, 1)
    assert grid == (0, 1, 1)


@pytest.mark.parametrize(
    ("seq_len", "num_bh", "of_queries", "of_keys"),
    [
        (4096, 128, 16, 16),
        (4096, 32, 16, 16),  # all, if rows were expected to begin one row late
        (4096, 129, 16, 16),  # the last group has 1 head, which does not count here
        (8192, 64, 8, 64),
        (16_384, 32, 4, 32),
        (1024, 12, 12, 12),
    ],
)
def test_heads_of_a_mask_that_only_the_device_knows_are_in_groups_too(
    seq_len, num_bh, of_queries, of_keys
):
    """But its rows of keys only if one key block that all rows of queries list would not end long
    after the others.
    """
    blocks = torch.ones(1, 1, seq_len // 128, seq_len // 128, dtype=torch.bool)
    table = masks.DynamicMask.from_blocks(blocks, block_size=128).table()
    spec = replace(SPEC, q_len=seq_len, k_len=seq_len, head_dim=128, value_dim=128)
    found = [
        launch.heads_per_group_of(spec, rows, num_bh, ctas=132, by_key=by_key)
        for rows, by_key in ((table.by_query, False), (table.by_key, True))
    ]
    assert found == [of_queries, of_keys]


def test_a_kernel_of_rows_of_keys_schedules_them_as_such(monkeypatch):
    launched = []
    monkeypatch.setattr(launcher, "launch", lambda *arguments: launched.append(arguments))
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    blocks = torch.ones(1, 1, 256, 256, dtype=torch.bool)
    table = masks.DynamicMask.from_blocks(blocks, block_size=128).table()
    spec = replace(SPEC, q_len=2**15, k_len=2**15, head_dim=128, value_dim=128, kv_heads=4)
    kernel = SimpleNamespace(__name__="kernel", arg_names=[])
    for by_key in (False, True):
        prepared = launch.PreparedKernel(kernel, (), KernelConfig(1, {}), by_key=by_key)
        prepared.launch(Call(Plan(spec, hopper, table)))
    # The arguments begin with the table, key lengths and the work counter; sizes follow.
    assert [arguments[2][9 + 6] for arguments in launched] == [2, 12]


def test_l2_holds_more_heads_of_narrow_values():
    rows = masks.causal()(16_384).table().by_query
    spec = replace(SPEC, q_len=16_384, k_len=16_384, head_dim=192, value_dim=128)
    found = [
        launch.sizes_and_grid(replace(spec, value_dim=dim), rows, 4, KernelConfig(1, {}))[0][-1]
        for dim in (192, 128)
    ]
    assert found == [2, 4]


@pytest.mark.parametrize(
    ("tokens", "ctas_per_sm", "grid"), [(1024, 2, 20), (1024, 3, 30), (64, 2, 12)]
)
def test_ctas_share_a_multiprocessor(tokens, ctas_per_sm, grid):
    rows = masks.full()(tokens, block_size=64).table().by_query
    spec = replace(SPEC, q_len=tokens)
    config = KernelConfig(ctas_per_sm, {})
    assert launch.sizes_and_grid(spec, rows, SPEC.heads, config)[1] == (grid, 1, 1)


@pytest.mark.parametrize(("ctas_per_sm", "registers"), [(2, 128), (3, 80), (4, 64)])
def test_and_its_registers(ctas_per_sm, registers):
    assert launch.max_registers(ctas_per_sm) == {"maxnreg": registers}
    assert launch.max_registers(1) == {}


def test_a_pass_starts_as_many_ctas_as_run_at_a_time(monkeypatch):
    launched = []
    monkeypatch.setattr(launcher, "launch", lambda *arguments: launched.append(arguments))
    table = masks.full()(1024, block_size=64).table()
    kernel = SimpleNamespace(__name__="kernel", arg_names=[])
    config = KernelConfig(3, {"STAGES": 2})
    call = Call(Plan(SPEC, hopper, table))
    launch.PreparedKernel(kernel, (), config).launch(call)
    ((_, grid, _, _, constants),) = launched
    assert grid == (30, 1, 1)
    assert constants.items() >= {"STAGES": 2, "maxnreg": 80}.items()


def test_a_kernel_is_prepared_once_for_inputs_of_equal_strides():
    def prepare(spec, block_size, query, key, may_be_none):
        layouts = layouts_of([torch.empty_like(query), None if may_be_none else key])
        return launch.PreparedKernel(None, (), KernelConfig(1, {}), layouts)

    def prepared(call, query, key, may_be_none=False):
        return prepare_once(call.plan, prepare, (query, key), may_be_none)

    query, key = (torch.empty(3, heads, 1024, 64, dtype=torch.bfloat16) for heads in (4, 2))
    turned = torch.empty(3, 1024, 4, 64, dtype=torch.bfloat16).transpose(1, 2)
    call, another = (Call(Plan(SPEC, hopper, masks.full()(1024).table())) for _ in range(2))
    first = prepared(call, query, key)
    assert prepared(call, query.clone(), key.clone()) is first
    assert prepared(another, query, key) is first
    assert prepared(call, turned, key) is not first
    assert prepared(call, query, key, may_be_none=True).outputs[1] is None
    for example in (query, turned):
        layouts = prepared(call, example, key).outputs
        new, _ = empty_tensors(layouts, example.device)
        assert (new.shape, new.dtype) == (example.shape, example.dtype)
        assert new.stride() == torch.empty_like(example).stride()
    assert len(call.plan.cache) == 3
