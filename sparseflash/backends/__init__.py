"""Backends: who can compute attention, and who should.

A backend is one record. Backends know nothing of one another; only this file knows them all.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from sparseflash.backends import cpu, hopper, triton
from sparseflash.dispatch.spec import EVERY_EXTRA, AttentionSpec


@dataclass(frozen=True)
class Backend:
    """One way to compute attention.

    why_not(spec): the reasons for which this backend cannot serve a call; empty when it can.
    extras: those of AttentionSpec.extras that it knows; with a bias its functions get it as well,
        bias=float32 (1 or heads, q_len + k_len - 1), contiguous.
    forward(query, key, value, table, key_lengths, seed, spec) -> (out, lse):
        out like query; lse natural-log float32 (float64 for float64 inputs), (batch, heads,
        q_len), contiguous.
    backward(grad_out, grad_lse, query, key, value, out, lse, table, key_lengths, seed, spec,
        needs) -> gradients of (query, key, value, bias, blocks), None where needs, in the same
        order, says no; grad_lse may be None. That of the blocks is float32 (batch, heads, nq,
        nk): see masks.DynamicMask.
    describe(query, key, value, table, spec) -> {pass: how it would run}; empty when there is one
        way.
    tiling(spec): the block size (tokens) of the table that it reads: the mask's elements in blocks
        of another size where that is not spec.block_size.
    pass_over(spec): the reasons for which "auto" looks for another backend although this one can
        serve a call; empty when it is the fastest.
    """

    name: str
    why_not: Callable[[AttentionSpec], list[str]]
    forward: Callable
    backward: Callable
    describe: Callable[..., dict[str, str]] = lambda *call: {}
    tiling: Callable[[AttentionSpec], tuple[int, int]] = lambda spec: spec.block_size
    pass_over: Callable[[AttentionSpec], list[str]] = lambda spec: []
    extras: frozenset[str] = frozenset()

    def reasons(self, name: str, spec: AttentionSpec) -> list[str]:
        """Why it is not the backend of a call that asks for the one called `name`."""
        unknown = [f"takes no {extra}" for extra in sorted(spec.extras - self.extras)]
        against = unknown + self.why_not(spec)
        return against or (self.pass_over(spec) if name == "auto" else [])


# Fastest first for the device it serves: "auto" takes the first that can.
BACKENDS = (
    Backend(
        "cpu",
        cpu.why_not,
        cpu.forward,
        cpu.backward,
        extras=EVERY_EXTRA,
    ),
    Backend(
        "hopper",
        hopper.why_not,
        hopper.forward,
        hopper.backward,
        hopper.describe,
        hopper.tiling,
        hopper.pass_over,
    ),
    Backend(
        "triton",
        triton.why_not,
        triton.forward,
        triton.backward,
        triton.describe,
        triton.tiling,
        extras=EVERY_EXTRA,
    ),
)


class BackendError(RuntimeError):
    """No backend, or not the one that was asked for, can serve a call."""


@lru_cache(maxsize=4096)
def select(name: str, spec: AttentionSpec) -> Backend:
    """The backend called `name`, or for "auto" the fastest that can serve `spec`.

    Raises ValueError for an unknown name and BackendError, with each backend's reasons, when none
    can.
    """
    known = [b.name for b in BACKENDS]
    if name != "auto" and name not in known:
        raise ValueError(f"backend must be 'auto' or one of {known}, got {name!r}")
    reasons = {}
    for backend in BACKENDS:
        if name in ("auto", backend.name):
            against = backend.reasons(name, spec)
            if not against:
                return backend
            reasons[backend.name] = against
    listing = "\n".join(f"  {b}: {'; '.join(why)}" for b, why in reasons.items())
    raise BackendError(f"no backend can serve this call ({spec}):\n{listing}")
