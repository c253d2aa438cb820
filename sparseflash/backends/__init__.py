"""The backends: modules that implement sparseflash.backends.base.Backend, each independently."""

from sparseflash.backends import cpu, hopper, triton
from sparseflash.backends.base import Backend

# "auto" selects the first one without a reason against it. For a GPU the faster one is first.
BACKENDS: tuple[Backend, ...] = (cpu, hopper, triton)
