"""The built-in patterns, one family per file.

A new pattern is a function with the decorator `builtin` that returns a Pattern.
"""

from masks.patterns.butterfly import butterfly
from masks.patterns.causal import causal
from masks.patterns.compositions import bigbird, longformer
from masks.patterns.dilated import dilated
from masks.patterns.documents import documents
from masks.patterns.full import full
from masks.patterns.global_tokens import global_tokens
from masks.patterns.local import local
from masks.patterns.neighborhood2d import neighborhood2d
from masks.patterns.random import random
from masks.patterns.strided import strided
from masks.patterns.tree import tree

__all__ = [
    "bigbird",
    "butterfly",
    "causal",
    "dilated",
    "documents",
    "full",
    "global_tokens",
    "local",
    "longformer",
    "neighborhood2d",
    "random",
    "strided",
    "tree",
]
