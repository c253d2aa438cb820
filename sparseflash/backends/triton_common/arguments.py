"""Arguments of kernels: the lookup table, descriptors, and arguments without specialisation.

It is imported without torch too: see compile_worker.py.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from triton.tools.tensor_descriptor import TensorDescriptor

if TYPE_CHECKING:
    from torch import Tensor

    from masks.lookup_table import BlockLists, LookupTable

# Parameters of every kernel of a pass that change scores. The last three are ScoreTensors.flat.
OF_SCORES = ("bias", "score_floats", "score_integers", "score_layout")
NO_SCORE_TENSORS = (None, None, None)


class Descriptor(TensorDescriptor):
    """A TMA descriptor of a tensor and a tile that are known to be valid; skips the checks."""

    def __post_init__(self):
        pass


def descriptor_of(tensor: "Tensor", tile: list[int]) -> Descriptor:
    """The descriptor of a tensor that TMA can address."""
    return Descriptor(tensor, [*tensor.shape], [*tensor.stride()], tile)


def table_arguments(
    rows: "BlockLists", bit_tiles: "Tensor", table: "LookupTable"
) -> tuple["Tensor", ...]:
    """One direction of a lookup table, in the order of the fields of Table in the kernels."""
    lists = (rows.row_ptr, rows.full_index, rows.partial_index, rows.partial_bit_tile)
    return (*lists, rows.schedule, bit_tiles, table.head_to_mask)


def unspecialized_arguments(
    integers: Iterable[str], alignments: Iterable[str]
) -> dict[str, list[str]]:
    """Arguments of triton.jit and gluon.jit with which a compiled kernel is valid for all sizes.

    By default Triton compiles a variant for each integer that is 1 or a multiple of 16, and for
    each pointer that is aligned to 16 bytes.

    Args:
        integers: Names of integers that are not specialised at all.
        alignments: Names of integers and pointers that are not specialised on multiples of 16.
    """
    return {"do_not_specialize": [*integers], "do_not_specialize_on_alignment": [*alignments]}
