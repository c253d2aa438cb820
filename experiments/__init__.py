"""Experiments: what the library reaches on real hardware, each measured by one command."""
