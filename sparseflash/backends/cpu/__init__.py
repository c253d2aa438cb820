"""The backend "cpu": vectorised PyTorch that skips the empty blocks in both passes."""

from sparseflash.backends.cpu.few_queries import attended_runs
from sparseflash.backends.cpu.plan import block_size_for
from sparseflash.backends.cpu.unattended import backward, forward
from sparseflash.dispatch.call import Call
from sparseflash.dispatch.spec import EVERY_EXTRA, AttentionSpec

__all__ = [
    "auto_skip",
    "backward",
    "block_size_for",
    "compiled_for",
    "computes_in_place",
    "describe",
    "forward",
    "forward_block_size_for",
    "why_not",
]

name = "cpu"
extras = EVERY_EXTRA
compiles = False
forward_block_size_for = block_size_for


def why_not(spec: AttentionSpec, mask) -> list[str]:
    """The reasons for which it cannot compute a call; empty if it can."""
    return [] if spec.device.type == "cpu" else [f"needs CPU tensors, got {spec.device}"]


def auto_skip(spec: AttentionSpec, mask) -> list[str]:
    """Always empty: no other backend can compute calls on a CPU, except in the interpreter."""
    return []


def compiled_for(spec: AttentionSpec, table) -> tuple[bool, ...]:
    """Always empty: nothing is compiled."""
    return ()


def computes_in_place(spec: AttentionSpec) -> bool:
    """Never: one backward pass for all gradients computes less than two."""
    return False


def describe(call: Call, mask, query, key, value) -> dict[str, str]:
    """The block size in which the mask is read, and by what; see sparseflash.backends.base."""
    tile, own = call.table.block_size, call.spec.block_size
    verb = "merged" if tile > own else "split"
    described = {} if tile == own else {"tiles": f"{tile}, {verb} from blocks of {own}"}
    if attended_runs(call.plan):
        described["forward"] = (
            "torch's attention of the keys that every query attends, if no gradient is needed"
        )
    return described
