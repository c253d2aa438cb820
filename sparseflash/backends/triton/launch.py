"""The host side of all kernels: arguments, compile-time constants and grids."""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import triton.language as tl
from torch import Tensor

from masks.lookup_table import BlockLists
from sparseflash import dropout
from sparseflash.backends.triton.configs import Config, kernel_variant, resident_programs
from sparseflash.backends.triton_common.arguments import (
    NO_SCORE_TENSORS,
    OF_SCORES,
    descriptor_of,
    table_arguments,
)
from sparseflash.backends.triton_common.constants import ALIGNMENT, LOG2E, LONGEST_FIRST_IMBALANCE
from sparseflash.backends.triton_common.launcher import Launch, launch, launch_and_store
from sparseflash.backends.triton_common.relaunch import try_relaunch
from sparseflash.dispatch.call import Call, Plan
from sparseflash.dispatch.spec import AttentionSpec

MAX_TILE = 256
MAX_GRID_YZ = 65535  # programs along the second and the third axis of a grid
RANK = 4  # dims of query, key and value, and so the number of strides of each
# Tensors that the loop of a pass may read by TMA: one with the head dim, one with the value dim.
STREAMED = {
    "forward": ("key", "value"),
    "decode": ("key", "value"),
    "dq": ("key", "value"),
    "ds_sums": ("key", "value"),
    "dkdv": ("query", "grad_out"),
}


@dataclass(frozen=True, eq=False)
class PreparedPass:
    """The parts of a launch that are equal for equal specs and layouts of tensors.

    Args:
        config: Tile shape, warps and pipeline stages.
        streamed: Names of the tensors that the loop reads.
        variant, constants: See triton_common.launcher.
        strides: Strides of the tensors, in the form that the kernel takes.
        tiles: Shapes of the TMA boxes of streamed tensors; None if the loop reads by pointers.
        scalars: scale * log2(e), soft cap, dropout threshold, 1 / keep probability.
        by_key: Whether block rows are block rows of keys.
        heads, tiles_per_row: Number of heads in the grid, and of programs for each block row.
        resident_programs: About the number of programs that run at a time.
    """

    config: Config
    streamed: tuple[str, ...]
    variant: tuple
    constants: dict[str, Any]
    strides: tuple[tuple[int, ...], ...]
    tiles: tuple[list[int] | None, ...]
    scalars: tuple[float, float, int, float]
    by_key: bool
    heads: int
    tiles_per_row: int
    resident_programs: int


def prepare_pass(plan: Plan, pass_name: str, tensors: dict[str, Tensor]) -> PreparedPass:
    """The launch parameters of a pass, cached in the plan.

    Args:
        pass_name: "forward", "dq", "dkdv", "ds_sums" or "decode".
        tensors: The tensors that the kernel takes with their strides, in its order.
    """
    layout = _strides_and_alignment(tensors.values())
    prepared = plan.cache.get((pass_name, layout))
    if prepared is None:
        spec, table = plan.spec, plan.table
        shares_mask = (
            spec.mask_heads == 1 or spec.mask_group > 1 or table.by_query.row_ptr.shape[0] == 1
        )
        properties = (spec, table.block_size, shares_mask, pass_name, tuple(tensors))
        prepared = plan.cache[pass_name, layout] = _prepare(*properties, *layout)
    return prepared


@lru_cache(maxsize=4096)  # a DynamicMask is often new, and its plan with it
def _prepare(
    spec: AttentionSpec,
    block_size: tuple[int, int],
    shares_mask: bool,
    pass_name: str,
    names: tuple[str, ...],
    strides: tuple[tuple[int, ...], ...],
    aligned: tuple[bool, ...],
) -> PreparedPass:
    block_q, block_k = block_size
    size = spec.dtype.itemsize
    streamed = [names.index(name) for name in STREAMED[pass_name] if name in names]
    describable = all(aligned[i] and _is_describable(size, strides[i]) for i in streamed)
    group = spec.heads // spec.kv_heads
    heads_per_tile = group if pass_name == "decode" and shares_mask else 1
    packed_rows = spec.q_len * heads_per_tile if pass_name == "decode" else 0
    chosen = kernel_variant(
        *(pass_name, spec.device, spec.dtype, spec.head_dim, spec.value_dim, block_size),
        *(spec.dropout_p > 0, spec.softcap is not None, spec.score, spec.bias, spec.precision),
        *(describable, packed_rows, spec.differentiates_score_tensors),
    )
    config = chosen.config
    constants: dict[str, Any] = {"GROUP": group}
    if pass_name == "dkdv":
        heads, tiles_per_row, step = spec.kv_heads, block_k // config.bn, config.bm
    elif pass_name == "decode":
        heads, tiles_per_row = spec.heads // heads_per_tile, -(-packed_rows // config.bm)
        step, constants["HEADS_PER_TILE"] = config.bn, heads_per_tile
    else:
        heads, tiles_per_row, step = spec.heads, block_q // config.bm, config.bn
    scaled, layout = _layout(size, strides, aligned)
    return PreparedPass(
        config=config,
        streamed=STREAMED[pass_name],
        variant=(chosen, layout, *constants.values()),
        constants=constants | layout.constants | chosen.constants,
        strides=scaled,
        tiles=tuple(
            [1, 1, step, chosen.constants[dims]] if config.tma else None
            for dims in ("DIMS", "VALUE_DIMS")
        ),
        scalars=(
            *(spec.scale * LOG2E.value, spec.softcap or 0.0),
            *(dropout.threshold(spec.dropout_p), 1 / dropout.keep_probability(spec.dropout_p)),
        ),
        by_key=pass_name == "dkdv",
        heads=heads,
        tiles_per_row=tiles_per_row,
        resident_programs=resident_programs(
            spec.device, config, pass_name, spec.dtype, spec.widest_dim
        ),
    )


def _sizes_and_grid(
    spec: AttentionSpec, rows: BlockLists, prepared: PreparedPass
) -> tuple[tuple[int, ...], tuple[int, int, int]]:
    """kernels.block_lists.Sizes, and the grid: one program for each tile of a block row."""
    tiles = rows.num_rows * prepared.tiles_per_row
    longest_first = rows.imbalance > LONGEST_FIRST_IMBALANCE and tiles <= MAX_GRID_YZ
    sizes = (
        *(spec.heads, spec.q_len, spec.k_len, rows.row_ptr.shape[0], rows.num_rows),
        *(int(rows.imbalance != 1), int(longest_first)),
        *(spec.mask_heads if spec.mask_batch > 1 else 0, int(spec.mask_heads > 1)),
    )
    heads, batch = prepared.heads, spec.batch
    return sizes, (heads, batch, tiles) if longest_first else (tiles, heads, batch)


def launch_pass(
    call: Call,
    prepared: PreparedPass,
    kernel: Any,
    tensors: dict[str, Tensor],
    others: tuple[Tensor | float | None, ...],
    grid: tuple[int, int, int] | None = None,
) -> None:
    """Launches the kernel of a pass.

    Its parameters are `tensors`, each with its strides; descriptors of those that its loop reads;
    `others`; the table; key_lengths; bias and its stride; score tensors; positions of blocks;
    sizes; scalars; constants.

    Args:
        tensors: As in prepare_pass.
        grid: By default one program for each tile of a block row.
    """
    key_lengths, bias = call.key_lengths, call.bias
    score_tensors = NO_SCORE_TENSORS if call.score_tensors is None else call.score_tensors.flat
    positions = None if call.positions is None else call.positions.of_blocks()
    streamed = [tensors[name] for name in prepared.streamed]
    bias_stride = 0 if bias is None or len(bias) == 1 else bias.stride(0)
    changed_by_call = (key_lengths, bias, *score_tensors, positions)

    def launch_of_call() -> Launch:
        table = call.table
        rows = table.by_key if prepared.by_key else table.by_query
        sizes, default_grid = _sizes_and_grid(call.spec, rows, prepared)
        scale_log2, softcap, threshold, keep_scale = prepared.scalars
        arguments = (
            *_interleaved(tensors.values(), prepared.strides),
            *[
                tile and descriptor_of(x, tile)
                for x, tile in zip(streamed, prepared.tiles, strict=True)
            ],
            *others,
            *table_arguments(rows, table.bit_tiles, table),
            *(key_lengths, bias, bias_stride, *score_tensors, positions),
            *sizes,
            *(scale_log2, softcap, call.seed, threshold, keep_scale),
        )
        missing = tuple([x is None for x in (*others, key_lengths, *score_tensors, positions)])
        variant = (prepared.variant, missing)
        strided = len(tensors) * (1 + RANK)
        names = kernel.arg_names[strided : strided + len(streamed) + len(others)]
        changing = (*tensors, *names, "key_lengths", *OF_SCORES, "block_positions", "seed")
        return Launch(grid or default_grid, arguments, variant, prepared.constants, changing)

    values = [
        x.data_ptr() if isinstance(x, Tensor) else None
        for x in (*tensors.values(), *streamed, *others, *changed_by_call)
    ]
    types_and_values = [Tensor if isinstance(x, Tensor) else x for x in others]
    signature = (kernel.__name__, prepared, grid, bias_stride, *types_and_values)
    if not try_relaunch(call.plan.cache, signature, (*values, call.seed)):
        launch_and_store(call.plan.cache, signature, kernel, launch_of_call())


def launch_with_layout(
    kernel: Any,
    grid: tuple[int, int, int],
    tensors: tuple[Tensor, ...],
    others: tuple[Tensor | int | None, ...],
    constants: dict[str, Any],
) -> None:
    """Launches a kernel without a table.

    Args:
        kernel: One of sparseflash.backends.triton.kernels.
        grid: Programs along three axes.
        tensors: Its first parameters, each followed by its strides.
        others: The parameters after them, on which the kernel is not specialised.
        constants: Its constants, and options of the compiler.
    """
    strides, aligned = _strides_and_alignment(tensors)
    size = max([x.element_size() for x in tensors])
    scaled, layout = _layout(size, strides, aligned)
    # None is a constant of the kernel, and an integer of 64 bits has another type.
    kinds = tuple([x >= 2**31 if isinstance(x, int) else x is None for x in others])
    dtypes = tuple([x.dtype for x in tensors])
    variant = (tensors[0].device, dtypes, layout, kinds, *constants.items())
    arguments = (*_interleaved(tensors, scaled), *others)
    launch(kernel, grid, arguments, variant, constants | layout.constants)


class Layout(NamedTuple):
    """The properties of strided tensors for which a kernel is compiled.

    Kernels accept any strides (see kernels.signature).

    Attributes:
        align: The largest power of two, up to 16 bytes, that divides all strides but the last.
            These strides are passed divided by it.
        index: Dtype of offsets.
        unit: For each tensor, whether its last stride is 1.
        wide: The strides that need 64 bits, as (tensor, axis).
        aligned: For each tensor, whether it begins at a multiple of 16 bytes.
    """

    align: int
    index: tl.dtype
    unit: tuple[bool, ...]
    wide: tuple[tuple[int, int], ...]
    aligned: tuple[bool, ...]

    @property
    def constants(self) -> dict[str, Any]:
        return {"ALIGN": self.align, "INDEX": self.index}


@lru_cache(maxsize=4096)
def _layout(
    element_size: int, strides: tuple[tuple[int, ...], ...], aligned: tuple[bool, ...]
) -> tuple[tuple[tuple[int, ...], ...], Layout]:
    """(strides in the form that kernels take, layout)."""
    unit = tuple(s[-1] == 1 for s in strides)
    align = (
        math.gcd(ALIGNMENT // element_size, *(n for s in strides for n in s[:-1]))
        if all(unit)
        else 1
    )
    reach = MAX_TILE * max(token + dim for *_, token, dim in strides)
    index = tl.int64 if reach >= 2**31 else tl.int32
    scaled = tuple((*(n // align for n in s[:-1]), s[-1]) for s in strides)
    wide = tuple((i, j) for i, s in enumerate(scaled) for j, n in enumerate(s) if n >= 2**31)
    return scaled, Layout(align, index, unit, wide, aligned)


def _strides_and_alignment(
    tensors: Collection[Tensor],
) -> tuple[tuple[tuple[int, ...], ...], tuple[bool, ...]]:
    aligned = tuple([t.data_ptr() % ALIGNMENT == 0 for t in tensors])
    return tuple([t.stride() for t in tensors]), aligned


def _interleaved(tensors: Iterable[Tensor], strides: tuple[tuple[int, ...], ...]) -> list:
    """Each tensor followed by its strides."""
    return [argument for t, s in zip(tensors, strides, strict=True) for argument in (t, *s)]


def _is_describable(element_size: int, strides: tuple[int, ...]) -> bool:
    """Whether TMA can read an aligned tensor with these strides."""
    *outer, inner = strides
    return inner == 1 and all(n > 0 and n * element_size % ALIGNMENT == 0 for n in outer)
