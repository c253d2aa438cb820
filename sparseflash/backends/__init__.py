"""Backends: who can compute attention, and who should.

A backend is one record. Backends know nothing of one another; only this file knows them all.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from sparseflash.backends import cpu, portable
from sparseflash.spec import AttentionSpec


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
        needs) -> (grad_query, grad_key, grad_value), None where needs says no; grad_lse may be
        None. With a bias, needs and the results have a fourth entry for it.
    describe(query, key, value, spec) -> {pass: how it would run}; empty when there is one way.
    """

    name: str
    why_not: Callable[[AttentionSpec], list[str]]
    forward: Callable
    backward: Callable
    describe: Callable[..., dict[str, str]] = lambda query, key, value, spec: {}
    extras: frozenset[str] = frozenset()

    def reasons(self, spec: AttentionSpec) -> list[str]:
        """Why this backend cannot serve a call; empty when it can."""
        unknown = sorted(spec.extras - self.extras)
        return [f"takes no {name}" for name in unknown] + self.why_not(spec)


# Fastest first for the device it serves: "auto" takes the first that can.
BACKENDS = (
    Backend(
        "cpu",
        cpu.why_not,
        cpu.forward,
        cpu.backward,
        extras=frozenset({"softcap", "bias", "gradient of bias"}),
    ),
    Backend(
        "triton",
        portable.why_not,
        portable.forward,
        portable.backward,
        portable.describe,
        frozenset({"softcap", "bias"}),
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
            why_not = backend.reasons(spec)
            if not why_not:
                return backend
            reasons[backend.name] = why_not
    listing = "\n".join(f"  {b}: {'; '.join(why)}" for b, why in reasons.items())
    raise BackendError(f"no backend can serve this call ({spec}):\n{listing}")
