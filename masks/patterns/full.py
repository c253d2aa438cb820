from masks.block_mask import from_full_runs
from masks.pattern import Pattern, builtin


@builtin()
def full() -> Pattern:
    """Every query attends every key: dense attention."""
    return Pattern("full()", from_full_runs)
