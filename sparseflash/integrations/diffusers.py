"""Hugging Face diffusers: `sparsify(model, pattern)` makes a model attend by a pattern.

A processor computes one attention of a model. What it does beside attention, such as rotary
embeddings and norms, differs from model to model and stays its own: it runs in a context in which
torch's attention is replaced.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn

from masks import Pattern
from masks._parse import as_pattern
from sparseflash.integrations.sdpa import replace_sdpa


class SparseProcessor:
    """A processor of diffusers whose attention to as many keys as queries is by a pattern.

    Args:
        processor: The one that is wrapped, which calls torch's scaled_dot_product_attention.
        pattern: A Pattern, or its text as masks.parse reads it. Positions are those of the tokens
            as the processor orders them.
        backend: As in sparseflash.attention.

    Raises:
        TypeError: The pattern is none.
        ValueError: The processor has weights of its own.
    """

    def __init__(self, processor: Callable, pattern: Pattern | str, *, backend: str = "auto"):
        if isinstance(processor, nn.Module):
            raise ValueError(
                f"processor must have no weights of its own, got {type(processor).__name__}"
            )
        self.processor, self.pattern, self.backend = processor, as_pattern(pattern), backend

        # diffusers gives a processor those arguments alone that its signature names.
        @wraps(processor.__call__)
        def call(*arguments: Any, **options: Any):
            return self.__class__.__call__(self, *arguments, **options)

        self.__dict__["__call__"] = call

    def __call__(self, *arguments: Any, **options: Any):
        with replace_sdpa(self.pattern, backend=self.backend):
            return self.processor(*arguments, **options)

    def __getattr__(self, name: str):
        if name == "processor":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self.processor, name)


def sparsify(
    model: Any,
    pattern: Pattern | str,
    *,
    processors: Callable[[str], bool] = lambda name: True,
    backend: str = "auto",
):
    """Makes a model of diffusers attend by a pattern where it attends to as many keys as queries.

    Args:
        model: One with attn_processors and set_attn_processor, such as pipe.transformer.
        pattern: A Pattern, or its text as masks.parse reads it.
        processors: Which of the processors are changed, by their names in model.attn_processors.
        backend: As in sparseflash.attention.

    Returns:
        The model.

    Raises:
        TypeError: The pattern is none.
        ValueError: No processor is chosen, or one has weights of its own.
    """
    pattern = as_pattern(pattern)
    all_processors = dict(model.attn_processors)
    chosen = {name: processor for name, processor in all_processors.items() if processors(name)}
    if not chosen:
        raise ValueError(f"processors must choose some of {list(all_processors)}")
    for name, processor in chosen.items():
        wrapped = processor.processor if isinstance(processor, SparseProcessor) else processor
        all_processors[name] = SparseProcessor(wrapped, pattern, backend=backend)
    model.set_attn_processor(all_processors)
    return model
