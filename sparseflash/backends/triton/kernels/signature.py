"""Arguments on which Triton does not specialise the kernels."""

from sparseflash.backends.triton.kernels.block_lists import Sizes, Table
from sparseflash.backends.triton_common.arguments import OF_SCORES, unspecialized_arguments

OF_ROWS = ("lse", "part_lse", "max_logits", "grad_lse")


def unspecialized(*tensors: str, without_dims: tuple[str, ...] = ()) -> dict[str, list[str]]:
    """Arguments of triton.jit for a kernel with these strided tensors, a table and sizes.

    Those without dims have strides of batch, heads and tokens alone.

    Only the strides of dims are specialised on 1, because wide loads need this. Kernels have flat
    parameters, because these settings do not apply to fields of tuples.
    """
    strided, axes = (*tensors, *without_dims), ("batch", "head", "token")
    strides = [f"{tensor}_{axis}" for tensor in strided for axis in axes]
    dim_strides = [f"{tensor}_dim" for tensor in tensors]
    return unspecialized_arguments(
        integers=[*strides, *Sizes._fields, "bias_head", "batches", "splits"],
        alignments=[
            *dim_strides,
            *Table._fields,
            *OF_ROWS,
            "key_lengths",
            *OF_SCORES,
            "block_positions",
            "rows",
            "part_rows",
        ],
    )
