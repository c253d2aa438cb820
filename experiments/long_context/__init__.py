"""Context parallelism: scaling over ranks, and training of a small language model."""
