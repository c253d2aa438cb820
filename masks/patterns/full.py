from masks._pattern import Pattern, builtin
from masks.block_mask import from_full_runs


@builtin()
def full() -> Pattern:
    """Every query attends every key: dense attention."""
    return Pattern("full()", from_full_runs, of_tokens=True)
