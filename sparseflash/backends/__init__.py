"""Backends: each module is a sparseflash.backends.base.Backend and knows no other."""

from sparseflash.backends import cpu, hopper, triton
from sparseflash.backends.base import Backend

# Fastest first for the device that it serves: "auto" takes the first that can.
BACKENDS: tuple[Backend, ...] = (cpu, hopper, triton)
