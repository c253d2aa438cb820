"""The built-in patterns, one family per file. A new one is a function that returns a Pattern,
named in BUILTIN.
"""

from collections.abc import Callable

from masks.pattern import Pattern
from masks.patterns.butterfly import butterfly
from masks.patterns.causal import causal
from masks.patterns.compositions import bigbird, longformer
from masks.patterns.dilated import dilated
from masks.patterns.documents import documents
from masks.patterns.full import full
from masks.patterns.global_tokens import global_tokens
from masks.patterns.local import local
from masks.patterns.random import random
from masks.patterns.strided import strided
from masks.patterns.tree import tree

BUILTIN: dict[str, Callable[..., Pattern]] = {
    f.__name__: f
    for f in (
        full,
        causal,
        local,
        strided,
        butterfly,
        dilated,
        global_tokens,
        random,
        documents,
        tree,
        bigbird,
        longformer,
    )
}
