"""Which block size, and which pattern: ranked by predicted time, verified by measurement.

`block_sizes` sets a pattern in blocks of 16 to 512 tokens beside one another. `search` ranks
families of patterns that see far enough over the layers of a model within a budget of time. Times
are the least ones of sparseflash.io_model: below the measured ones, and in their order for more
than 9 of 10 pairs that differ by 10 % in the records. `measure` adds measured ones.

Backends read small blocks as parts of larger ones where that takes less time, so several block
sizes may have the same time.
"""

from sparseflash.advisor.choices import (
    Choice,
    Workload,
    block_sizes,
    measure,
    ordered_share,
    plot,
    search,
)

__all__ = ["Choice", "Workload", "block_sizes", "measure", "ordered_share", "plot", "search"]
