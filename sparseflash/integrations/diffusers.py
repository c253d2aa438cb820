"""Hugging Face diffusers: `sparsify(model, pattern)` makes a model attend by a pattern.

A processor computes one attention layer of a model, with rotary embeddings and norms that differ
from model to model. It is not changed: it runs in a context that replaces torch's attention.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn

from masks import Pattern
from masks._parse import as_pattern
from sparseflash.integrations.sdpa import replace_sdpa


class SparseProcessor:
    """A processor of diffusers whose self-attention has a sparsity pattern.

    Attention with as many keys as queries counts as self-attention. Other attention is unchanged.

    Args:
        processor: The processor to wrap. It calls torch's scaled_dot_product_attention.
        pattern: A Pattern, or its text as masks.parse reads it. It applies to the tokens in the
            order of the processor.
        backend: As in sparseflash.attention.

    Raises:
        TypeError: `pattern` is not a Pattern or text.
        ValueError: `processor` is a module with weights.
    """

    def __init__(self, processor: Callable, pattern: Pattern | str, *, backend: str = "auto"):
        if isinstance(processor, nn.Module):
            raise ValueError(
                f"processor must have no weights of its own, got {type(processor).__name__}"
            )
        self.processor, self.pattern, self.backend = processor, as_pattern(pattern), backend

        # diffusers passes only the arguments that the signature of a processor names.
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
    """Gives the self-attention of a diffusers model a sparsity pattern.

    Attention with as many keys as queries counts as self-attention.

    Args:
        model: A model with attn_processors and set_attn_processor, such as pipe.transformer.
        pattern: A Pattern, or its text as masks.parse reads it.
        processors: A predicate that selects processors by their name in model.attn_processors.
        backend: As in sparseflash.attention.

    Returns:
        The model, changed in place.

    Raises:
        TypeError: `pattern` is not a Pattern or text.
        ValueError: No processor is selected, or one is a module with weights.
    """
    pattern = as_pattern(pattern)
    all_processors = dict(model.attn_processors)
    chosen = {name: processor for name, processor in all_processors.items() if processors(name)}
    if not chosen:
        raise ValueError(f"processors must select at least one of {list(all_processors)}")
    for name, processor in chosen.items():
        wrapped = processor.processor if isinstance(processor, SparseProcessor) else processor
        all_processors[name] = SparseProcessor(wrapped, pattern, backend=backend)
    model.set_attn_processor(all_processors)
    return model
