"""Experiments: commands that measure the library on real hardware."""
