"""Device functions that the kernels share, one subject a module."""
