"""The host side of all kernels: descriptors of tensors, arguments, grids."""

import math
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from masks.lookup_table import BlockLists
from sparseflash import dropout
from sparseflash.backends.hopper import configs
from sparseflash.backends.hopper.device.gluon_compat import TensorDescriptor, gl
from sparseflash.backends.hopper.device.layouts import WARPGROUP_M
from sparseflash.backends.hopper.device.params import LOG2E
from sparseflash.backends.hopper.select import computed_rows, is_dynamic
from sparseflash.backends.triton_common.arguments import (
    NO_SCORE_TENSORS,
    OF_SCORES,
    table_arguments,
)
from sparseflash.backends.triton_common.constants import ALIGNMENT
from sparseflash.backends.triton_common.launcher import Launch, launch_and_store, multiprocessors
from sparseflash.backends.triton_common.relaunch import try_relaunch
from sparseflash.dispatch.call import Call, OutputLayout
from sparseflash.dispatch.spec import AttentionSpec
from sparseflash.score import find_score_function

OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}
GLUON_DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}

UNSWIZZLED_LAYOUT = gl.NVMMASharedLayout(0, 32, 2)  # no swizzle, 32-bit elements, rank 2


class TmaTile(NamedTuple):
    """A TMA box of `rows` tokens and all dims of a tensor (batch, heads, tokens, dims)."""

    rows: int

    def descriptor(self, tensor: Tensor) -> TensorDescriptor:
        layout = _descriptor_fields(tensor.shape, tensor.stride(), tensor.dtype, self.rows)
        return _Descriptor(tensor, *layout)


class TmaBox2D(NamedTuple):
    """A TMA box (rows, columns) of a matrix."""

    columns: int
    rows: int = 1

    def descriptor(self, tensor: Tensor) -> TensorDescriptor:
        shape, strides = list(tensor.shape), list(tensor.stride())
        return _Descriptor(tensor, shape, strides, [self.rows, self.columns], UNSWIZZLED_LAYOUT)


WARPGROUP_TILE = TmaTile(WARPGROUP_M.value)
Access = TmaTile | TmaBox2D | None  # how a kernel accesses a tensor: by TMA, or None by pointer


@dataclass(frozen=True, slots=True, eq=False)
class PreparedKernel:
    """A persistent kernel, with what its launches share if plan and strides of inputs are equal.

    The parameters of the kernel are its inputs and outputs, each by its `access`; params.Table;
    key_lengths; the work counter; params.Sizes; scale_log2; params.Dropout; params.ScoreParams;
    SCORE, QHEADS_PER_KVHEAD, MASKED, ROW_TOKENS, COLUMN_TOKENS; PACKED_HEADS of the forward
    kernel; the constants of `config`.

    A launch repeats the previous one of the same plan. So all arguments of the kernel, except
    addresses, the stride of the bias and seeds, must follow from the plan, the strides of the
    inputs and which tensors are None (see dispatch.call.prepare_once).

    Args:
        kernel: One of sparseflash.backends.hopper.kernels.
        access: How it accesses each of its inputs and outputs.
        config: Pipeline stages and occupancy.
        outputs: Layouts of its outputs, None for outputs that are not computed.
        by_key: Whether its work tiles are block rows of keys, not of queries.
        ordered: Whether CTAs wait for one another: all run at once, and the scheduler is static.
        packed_heads: Query heads of a work tile of the forward kernel; None for other kernels.
    """

    kernel: Any
    access: tuple[Access, ...]
    config: configs.KernelConfig
    outputs: tuple[OutputLayout | None, ...] = ()
    by_key: bool = False
    ordered: bool = False
    packed_heads: int | None = None

    def launch(self, call: Call, *tensors: Tensor | None) -> None:
        """Launches the kernel.

        Args:
            call: The call.
            tensors: Inputs and outputs in the order of the kernel, None for those that it does not
                use.
        """
        plan = call.plan
        score_tensors = NO_SCORE_TENSORS if call.score_tensors is None else call.score_tensors.flat
        rows = computed_rows(plan.table, plan.spec, self.by_key)
        work_counter = None if self.ordered else make_work_counter(rows, plan.spec)
        bias = call.bias
        bias_stride = None if bias is None else bias.stride(0) * (len(bias) > 1)
        seeds = (None, None) if plan.spec.dropout_p == 0 else _seed_words(call.seed)
        changing = (*tensors, call.key_lengths, work_counter, bias, *score_tensors)
        addresses = [None if x is None else x.data_ptr() for x in changing]
        if not try_relaunch(plan.cache, self, (*addresses, bias_stride, *seeds)):
            prepared = self._launch_of(call, changing, bias_stride, seeds)
            launch_and_store(plan.cache, self, self.kernel, prepared)

    def _launch_of(
        self,
        call: Call,
        changing: tuple[Tensor | None, ...],
        bias_stride: int | None,
        seeds: tuple[int | None, ...],
    ) -> Launch:
        config, spec, table = self.config, call.spec, call.table
        rows = computed_rows(table, spec, self.by_key)
        tensors, others = changing[: len(self.access)], changing[len(self.access) :]
        key_lengths, work_counter, bias, *score_tensors = others
        heads = spec.kv_heads if self.by_key else spec.heads // (self.packed_heads or 1)
        sizes, grid = sizes_and_grid(spec, rows, heads, config, self.by_key)
        mask_batch_stride = spec.mask_heads if spec.mask_batch > 1 else None
        own_columns = None
        if call.more is not None and not self.by_key:
            own_columns = (spec.k_len - call.more[0].shape[2]) // table.block_size[1]
        bit_tiles = table.bit_tiles_by_key if self.by_key else table.bit_tiles
        arguments = (
            *(_argument(*x) for x in zip(tensors, self.access, strict=True)),
            *table_arguments(rows, bit_tiles, table),
            *(key_lengths, work_counter, *sizes, mask_batch_stride),
            *(own_columns, spec.scale * LOG2E.value),
            *(*seeds, *_dropout_arguments(spec.dropout_p)),
            *(spec.softcap, bias, bias_stride, *score_tensors),
        )
        block, group = table.block_size, spec.heads // spec.kv_heads
        masked = spec.has_key_lengths or rows.has_partial
        # Everything for which another kernel is compiled, also which arguments are None.
        widths = (configs.tile_width(spec.head_dim), configs.tile_width(spec.value_dim))
        properties = (spec.device, spec.dtype, widths, block, group, masked, spec.dropout_p > 0)
        score = None if spec.score is None else find_score_function(spec.score).triton
        variant = (
            *(*properties, spec.mask_batch > 1, spec.softcap is None, spec.score),
            self.packed_heads,
            *(x is None for x in changing),
        )
        row_tokens, column_tokens = reversed(block) if self.by_key else block
        constants = {"SCORE": score, "QHEADS_PER_KVHEAD": group, "MASKED": masked}
        constants |= {"ROW_TOKENS": row_tokens, "COLUMN_TOKENS": column_tokens}
        constants |= config.constants | OPTIONS | max_registers(config.ctas_per_sm)
        if self.packed_heads is not None:
            constants["PACKED_HEADS"] = self.packed_heads
        if self.ordered:
            constants |= {"launch_cooperative_grid": True}
        names = self.kernel.arg_names[: len(tensors)]
        names = (*names, "key_lengths", "work_counter", *OF_SCORES)
        names = (*names, "bias_stride", "seed_low", "seed_high")
        return Launch(grid, arguments, variant, constants, names)


def _argument(tensor: Tensor | None, access: Access) -> Tensor | TensorDescriptor | None:
    return tensor if tensor is None or access is None else access.descriptor(tensor)


def max_registers(ctas_per_sm: int) -> dict[str, int]:
    """The option maxnreg if several CTAs of 256 threads share a multiprocessor.

    It bounds the registers with which a thread starts. setmaxnreg then gives more to consumers and
    fewer to the producer.
    """
    if ctas_per_sm == 1:
        return {}
    return {"maxnreg": configs.REGISTERS_PER_SM // ctas_per_sm // 256 // 8 * 8}


def addressable(tensor: Tensor) -> Tensor:
    """The tensor, or a contiguous copy if TMA cannot address it."""
    aligned = tensor.data_ptr() % ALIGNMENT == 0
    if aligned and tensor.is_contiguous():  # all head dims are multiples of its unit
        return tensor
    strides = addressable_strides(tensor.shape, tensor.stride(), tensor.element_size())
    return tensor if aligned and strides else tensor.contiguous()


@lru_cache(maxsize=4096)
def addressable_strides(
    shape: torch.Size, strides: tuple[int, ...], element_size: int
) -> tuple[int, ...] | None:
    """Strides for TMA; None if it cannot address the tensor. Those of dims of size 1 are free."""
    unit = ALIGNMENT // element_size
    *outer, inner = (n if size > 1 else unit for n, size in zip(strides, shape, strict=True))
    inner = 1 if shape[-1] == 1 else inner
    if inner != 1 or any(n <= 0 or n % unit for n in outer):
        return None
    return (*outer, inner)


@lru_cache(maxsize=64)
def kv_tile(block: int, widest_dim: int) -> TmaTile:
    """The tile of K and V in the forward and dQ kernels: a block, or half of one."""
    return TmaTile(min(block, configs.MAX_KV_TILE[configs.tile_width(widest_dim)]))


class _Descriptor(TensorDescriptor):
    """A descriptor of an addressable tensor; skips the checks of TensorDescriptor."""

    def __post_init__(self):
        pass


@lru_cache(maxsize=4096)
def _descriptor_fields(
    shape: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, rows: int
) -> tuple:
    """(shape, strides, box, layout) of a descriptor."""
    box = [1, 1, rows, configs.tile_width(shape[-1])]
    shared_layout: Any = gl.NVMMASharedLayout  # whose methods have no types
    layout = shared_layout.get_default_for(box, GLUON_DTYPES[dtype])
    tma_strides = addressable_strides(shape, strides, dtype.itemsize)
    if shape[0] == 0 and tma_strides is None:
        # Tensors without elements are contiguous whatever their strides; no kernel reads them.
        tma_strides = (*[ALIGNMENT // dtype.itemsize] * (len(shape) - 1), 1)
    assert tma_strides is not None, "descriptors are made of addressable tensors"
    return list(shape), list(tma_strides), box, layout


def _dropout_arguments(dropout_p: float) -> tuple[int | float | None, ...]:
    """(threshold, keep_scale) of params.Dropout."""
    if dropout_p == 0:
        return None, None
    return dropout.threshold(dropout_p), 1 / dropout.keep_probability(dropout_p)


def _seed_words(seed: int) -> tuple[int, ...]:
    """(seed_low, seed_high) of params.Dropout."""
    return struct.unpack("<2i", struct.pack("<q", seed))


def make_work_counter(rows: BlockLists, spec: AttentionSpec) -> Tensor | None:
    """The counter of the dynamic tile scheduler; None if the scheduler is static."""
    if not is_dynamic(rows, spec):
        return None
    # A new one for every launch, because the kernel never resets it.
    return torch.zeros(1, dtype=torch.int32, device=spec.device)


def sizes_and_grid(
    spec: AttentionSpec,
    rows: BlockLists,
    heads: int,
    config: configs.KernelConfig,
    by_key: bool = False,
) -> tuple[tuple[int, ...], tuple[int, int, int]]:
    """params.Sizes without its last field, and the grid of a persistent kernel.

    The grid has at most as many CTAs as run at a time.
    """
    num_bh = spec.batch * heads
    num_work_tiles = num_bh * rows.num_scheduled_rows
    ctas = config.ctas_per_sm * multiprocessors(spec.device)
    heads_per_group = heads_per_group_of(spec, rows, num_bh, ctas, config.dq_bytes, by_key)
    lengths = (spec.heads, spec.q_len, spec.k_len)
    sizes = (*lengths, spec.mask_heads, rows.num_scheduled_rows, num_work_tiles, heads_per_group)
    return sizes, (min(num_work_tiles, ctas), 1, 1)


def heads_per_group_of(
    spec: AttentionSpec,
    rows: BlockLists,
    num_bh: int,
    ctas: int,
    dq_bytes: int = 0,
    by_key: bool = False,
) -> int:
    """The number of heads whose rows are scheduled together, longest rows first (LPT).

    If all rows have about the same number of blocks, it is 1: all CTAs share K and V of one head
    in L2. Otherwise, as for causal masks, it is the largest power of two whose operands fit in L2.
    One head does not suffice then, because its short rows cannot fill the idle time that its long
    rows leave. It is all heads if the longest row of the last group would run alone for more than
    MAX_TAIL of the total time. The last group may have fewer heads than the others, and a CTA may
    begin that row one row of mean length late, because CTAs take work tiles ahead.

    The host does not know the rows of a mask whose blocks the device chooses, so it assumes an
    imbalance: see configs.ASSUMED_IMBALANCE. For such a mask it counts neither of the two:
    neighbouring rows may read different keys, so that L2 would hold few of those of all heads.

    Args:
        spec: Spec of the call.
        rows: Block lists that the kernel reads.
        num_bh: Batch elements times heads, or pairs of packed heads; 0 if there is no batch
            element.
        ctas: CTAs that run at the same time.
        dq_bytes: As in KernelConfig.
        by_key: Whether the rows are of keys.

    Returns:
        Heads, 1 to num_bh, or 1 if there are none.
    """
    if num_bh == 0 or rows.imbalance <= configs.MIN_DYNAMIC_IMBALANCE:
        return 1
    both_dims = spec.head_dim + spec.value_dim
    token_bytes = both_dims * spec.dtype.itemsize + spec.head_dim * dq_bytes
    head_bytes = max(spec.q_len, spec.k_len) * token_bytes
    in_l2 = max(configs.L2_OPERAND_BYTES // head_bytes, 1)
    heads = min(num_bh, 1 << in_l2.bit_length() - 1)
    imbalance, last_heads = rows.imbalance + 1, (num_bh - 1) % heads + 1
    if math.isinf(imbalance):
        query_blocks = -(-spec.q_len // spec.block_size[0])
        sink = query_blocks / configs.ASSUMED_BLOCKS if by_key else 0.0
        imbalance, last_heads = max(configs.ASSUMED_IMBALANCE, sink), heads
    # Times of a group and of all heads on all CTAs, in units of the time of a row of mean length.
    group, all_heads = (n * rows.num_scheduled_rows / ctas for n in (last_heads, num_bh))
    return heads if imbalance - group <= configs.MAX_TAIL * all_heads else num_bh
