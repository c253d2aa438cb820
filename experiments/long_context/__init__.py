"""Sequences that several ranks share: scaling, and training of a small language model."""
