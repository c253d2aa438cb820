"""The forward pass of few queries (decoding): split-KV.

One row of queries would occupy few multiprocessors. So the listed blocks of a row are divided into
splits, one for each program. A program stores its sums, and a second kernel merges them. With one
split there is no second kernel. The query heads of a key head are rows of one tile if they share
their mask.
"""

from functools import lru_cache

import torch
from torch import Tensor

from sparseflash.backends.triton import configs
from sparseflash.backends.triton.kernels.decode import decode_kernel, merge_kernel
from sparseflash.backends.triton.launch import (
    PreparedPass,
    launch_pass,
    launch_with_layout,
    prepare_pass,
)
from sparseflash.dispatch.call import Call, Plan, prepared_out_and_lse

MAX_SPLITS = 128
# The fixed time of a program, and the time of merging, each over the time of one key.
OVERHEAD_KEYS = 128
SPLITS_PER_STEP = 16  # of the merge kernel


def forward(call: Call, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of one call; see sparseflash.backends.base."""
    out, lse = prepared_out_and_lse(call.plan, query, value)
    tensors = {"query": query, "key": key, "value": value, "out": out}
    prepared = prepare_pass(call.plan, "decode", tensors)
    splits = num_splits(prepared, call.plan)
    split_sums = None
    if splits > 1:
        shape = (splits, lse.numel(), value.shape[3] + 2)
        split_sums = torch.empty(shape, dtype=torch.float32, device=query.device)
    grid = (splits * prepared.tiles_per_row, prepared.heads, query.shape[0])
    launch_pass(call, prepared, decode_kernel, tensors, (lse, call.max_logits, split_sums), grid)
    if split_sums is not None:
        _launch_merge(out, lse, call.max_logits, split_sums)
    return out, lse


def describe(plan: Plan, key: Tensor, value: Tensor) -> str:
    """The number of splits and the configuration of a call, as text."""
    prepared = prepare_pass(plan, "decode", {"key": key, "value": value})
    return f"decoding in {num_splits(prepared, plan)} splits of the keys, {prepared.config}"


def num_splits(prepared: PreparedPass, plan: Plan) -> int:
    """The number of splits of the keys of a row."""
    programs = prepared.tiles_per_row * prepared.heads * plan.spec.batch
    longest = plan.table.by_query.max_blocks
    blocks = plan.table.by_key.num_rows if longest is None else longest
    return fastest_splits(programs, blocks, plan.table.block_size[1], prepared.resident_programs)


@lru_cache(maxsize=4096)
def fastest_splits(programs: int, blocks: int, block_k: int, resident_programs: int) -> int:
    """The number of splits of rows of `blocks` that takes the least time.

    Programs run in waves of `resident_programs`. A wave takes the time of its longest split.
    """

    def keys(splits: int) -> int:
        longest_split = -(-blocks // splits) * block_k + OVERHEAD_KEYS
        merging = OVERHEAD_KEYS if splits > 1 else 0
        return -(-programs * splits // resident_programs) * longest_split + merging

    return min(range(1, max(1, min(blocks, MAX_SPLITS)) + 1), key=keys)


def _launch_merge(out: Tensor, lse: Tensor, max_logits: Tensor | None, split_sums: Tensor) -> None:
    batch, heads, q_len, value_dim = out.shape
    launch_with_layout(
        merge_kernel,
        (q_len, heads, batch),
        (out,),
        (lse, max_logits, split_sums, heads, q_len, split_sums.shape[0]),
        {
            "VALUE_DIM": value_dim,
            "VALUE_DIMS": configs.padded_dims(value_dim),
            "SPLITS_PER_STEP": SPLITS_PER_STEP,
            "enable_fp_fusion": True,
        },
    )
