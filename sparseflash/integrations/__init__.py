"""Attention of other libraries computed by sparseflash."""
