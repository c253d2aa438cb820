from masks.block_mask import of_full
from masks.pattern import Pattern, builtin


@builtin()
def full() -> Pattern:
    """Every query attends every key: dense attention."""
    return Pattern("full()", of_full)
