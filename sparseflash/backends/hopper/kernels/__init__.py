"""The kernels: device code alone, one kernel a module."""
