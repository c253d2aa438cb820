"""What Triton may not specialise the kernels on."""

from sparseflash.backends.triton.kernels.block_lists import Sizes, Table
from sparseflash.backends.triton_common.arguments import OF_SCORES, unspecialized_arguments

OF_ROWS = ("lse", "max_logits", "grad_lse")


def unspecialized(*tensors: str) -> dict[str, list[str]]:
    """Arguments of triton.jit for a kernel with these strided tensors, a table and sizes.

    Only a dim stride keeps its specialisation on 1: wide loads need it. Tuples would lose these
    settings, so kernels take flat parameters.
    """
    strides = [f"{tensor}_{axis}" for tensor in tensors for axis in ("batch", "head", "token")]
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
        ],
    )
