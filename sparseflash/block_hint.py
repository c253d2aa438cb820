"""Whether blocks of another size are predicted to be faster, and the hint that says so."""

import logging
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

from masks import BlockMask
from masks._core.grid import is_captured
from masks.mask_batch import CompiledMask
from masks.registry import OF_DEFAULT_SIZE
from sparseflash.backends.base import Backend
from sparseflash.dispatch.spec import AttentionSpec

if TYPE_CHECKING:
    from sparseflash.io_model import Cost

SIDES = (64, 128)  # of blocks in which a mask may be faster
FASTER = 0.9  # blocks of another size are recommended below this ratio of predicted times
# A hint is given for masks of at most so many blocks, for which the prediction takes less than
# about a second, and of which at least this share is partial: other blocks of the default size
# have no zeros that smaller blocks would skip.
MAX_BLOCKS = 2**14
MIN_PARTIAL = (1 - FASTER) / 0.75
# So many masks are examined in a process, each in up to a second: training with sequences of many
# lengths makes a mask for each length.
MAX_MASKS = 4

logger = logging.getLogger("sparseflash")
_examined = count()  # next() of it is one operation for all threads


def better_blocks(
    spec: AttentionSpec, backend: Backend, mask: CompiledMask
) -> tuple[int, float] | None:
    """The side of the blocks with the least predicted time; see Explanation.better_blocks."""
    cost = cost_model(spec, backend)
    if cost is None or not isinstance(mask, BlockMask):
        return None

    from sparseflash.io_model import DIRECTIONS

    def seconds(same: BlockMask) -> float:
        passes = (cost(same, direction=d, backend=spec.backend) for d in DIRECTIONS)
        return sum(each.seconds for each in passes)

    times = {
        side: seconds(mask.reblock(side)) for side in SIDES if (side, side) != spec.block_size
    }
    side = min(times, key=lambda side: times[side])
    share = times[side] / seconds(mask)
    return (side, share) if share <= FASTER else None


def cost_model(spec: AttentionSpec, backend: Backend) -> "Callable[..., Cost] | None":
    """io_model.attention with all arguments of a call except the mask; None if not modelled."""
    from sparseflash import io_model  # which imports the plans that call this module

    modelled = backend.name in io_model.BACKENDS and not spec.few_queries
    device = io_model.device_like(spec.device) if modelled else None
    sizes = {"batch": spec.batch, "heads": spec.heads, "kv_heads": spec.kv_heads}
    properties = {"head_dim": spec.head_dim, "dtype": spec.dtype, "device": device}
    return partial(io_model.attention, **sizes, **properties) if device else None


def hint_at_better_blocks(spec: AttentionSpec, backend: Backend, mask: CompiledMask) -> None:
    """Logs that another block size may be faster, for the first masks of the default size.

    It is called when a plan is made, and only for a device that sparseflash.io_model has.
    """
    if (
        not backend.compiles
        or not isinstance(mask, BlockMask)
        or OF_DEFAULT_SIZE not in mask.cache
    ):
        return
    if is_captured(spec.device):
        return
    few = mask.nnz_blocks <= MAX_BLOCKS and mask.partial_blocks >= MIN_PARTIAL * mask.nnz_blocks
    if not few or cost_model(spec, backend) is None:  # which imports the IO model
        return
    if mask.cache.pop(OF_DEFAULT_SIZE, None) is None:  # another thread is here too
        return
    if next(_examined) >= MAX_MASKS:
        return
    if better := better_blocks(spec, backend, mask):
        side, share = better
        logger.warning(
            "sparseflash: blocks of %d may be faster than the default %s for a mask of %s tokens "
            "on %s (see with_block_size): their predicted time is %.0f%%. To silence this, give "
            "the whole pattern a block size, or set the level of the logger sparseflash.",
            *(side, spec.block_size, mask.seq_len, spec.device, 100 * share),
        )
