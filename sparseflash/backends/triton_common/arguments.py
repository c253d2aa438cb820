"""Arguments of kernels: the lookup table, descriptors, and what Triton may not specialise."""

from collections.abc import Iterable

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from masks.lookup_table import BlockLists, LookupTable

# What changes scores: parameters of every kernel of a pass. The last three are ScoreTensors.flat.
OF_SCORES = ("bias", "score_floats", "score_integers", "score_layout")
NO_SCORE_TENSORS = (None, None, None)


class Descriptor(TensorDescriptor):
    """What TMA reads or writes, of a tensor and a tile that are known to be valid: not checked."""

    def __post_init__(self):
        pass


def descriptor_of(tensor: Tensor, tile: list[int]) -> Descriptor:
    """The descriptor of all of a tensor, which TMA can address."""
    return Descriptor(tensor, [*tensor.shape], [*tensor.stride()], tile)


def table_arguments(rows: BlockLists, bit_tiles: Tensor, table: LookupTable) -> tuple[Tensor, ...]:
    """One direction of a lookup table, in the order of the kernels' Table."""
    lists = (rows.row_ptr, rows.full_index, rows.partial_index, rows.partial_bit_tile)
    return (*lists, rows.schedule, bit_tiles, table.head_to_mask)


def unspecialized_arguments(
    integers: Iterable[str], alignments: Iterable[str]
) -> dict[str, list[str]]:
    """Arguments of triton.jit and gluon.jit, by which one kernel serves calls of all sizes.

    Triton would compile a kernel anew whenever an integer turns to 1 or gains or loses a factor
    of 16, or a pointer its alignment.

    Args:
        integers: Names of integers that are not specialised at all.
        alignments: Names of integers and pointers that are not specialised on a factor of 16.
    """
    return {"do_not_specialize": [*integers], "do_not_specialize_on_alignment": [*alignments]}
