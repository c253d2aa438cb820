"""Selects block sizes and patterns by predicted time; measurements can verify the selection.

`block_sizes` compares a pattern in blocks of 16 to 512 tokens. `search` finds the fastest patterns
whose receptive field, over the layers of a model, is large enough. `measure` adds measured times.

Predicted times are the least times of sparseflash.io_model. They are below the measured times. In
the records, if two measured times differ by 10 % or more, the predicted times have the same order
in more than 9 of 10 cases.

A backend reads small blocks as parts of larger ones if that is faster. So several block sizes may
take the same time.
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
