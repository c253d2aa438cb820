"""Selects the backend of a call."""

from masks.mask_batch import CompiledMask
from sparseflash import backends
from sparseflash.backends.base import Backend, BackendError
from sparseflash.dispatch.spec import AttentionSpec


def check_backend(name: str) -> None:
    """Raises ValueError unless it is "auto" or the name of a backend."""
    names = [backend.name for backend in backends.BACKENDS]
    if name != "auto" and name not in names:
        raise ValueError(f"backend must be 'auto' or one of {names}, got {name!r}")


def select(spec: AttentionSpec, mask: CompiledMask) -> Backend:
    """The backend that the call names, or for "auto" the first one without a reason against it.

    Raises:
        ValueError: No backend has this name.
        BackendError: No backend can compute the call. The message lists the reasons of each.
    """
    check_backend(spec.backend)
    reasons = {}
    for backend in backends.BACKENDS:
        if spec.backend in ("auto", backend.name):
            against = reasons_against(backend, spec, mask)
            if not against:
                return backend
            reasons[backend.name] = against
    listing = "\n".join(f"  {name}: {'; '.join(why)}" for name, why in reasons.items())
    raise BackendError(f"no backend can compute this call ({spec}):\n{listing}")


def select_passes(spec: AttentionSpec, mask: CompiledMask) -> tuple[Backend, Backend | None]:
    """The backend of both passes, and that of the gradients of a bias and of score tensors.

    The second is None if the first one computes these gradients, or if there are none. It differs
    if "auto" finds a faster backend that supports the rest of the call. The gradients can be
    computed from the O and LSE of any backend.

    Raises:
        ValueError, BackendError: As in select.
    """
    complete, other = select(spec, mask), spec.without_sums_of_ds
    if other == spec or spec.backend != "auto":
        return complete, None
    backend = select(other, mask)
    return backend, None if backend is complete else complete


def reasons_against(backend: Backend, spec: AttentionSpec, mask: CompiledMask) -> list[str]:
    """The reasons for which a backend is not selected for a call; empty if it can be."""
    unknown = [f"does not support {extra}" for extra in sorted(spec.extras - backend.extras)]
    against = unknown + backend.why_not(spec, mask)
    return against or (backend.auto_skip(spec, mask) if spec.backend == "auto" else [])
