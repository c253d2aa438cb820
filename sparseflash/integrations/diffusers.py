"""Hugging Face diffusers: `sparsify(model, pattern)` makes a model attend by a pattern.

A processor computes one attention layer of a model, with rotary embeddings and norms that differ
from model to model. It is not changed: it runs in a context that replaces torch's attention.
"""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from torch import nn

from masks import Pattern
from masks._parse import as_pattern
from sparseflash.backends.select import check_backend
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
        TypeError: `pattern` is not a Pattern or text, or `processor` cannot be called.
        ValueError: `processor` is a module with weights, or no backend has the name `backend`. A
            call of a processor that does not call torch's attention also raises it.
    """

    def __new__(cls, processor: Callable | None = None, *_arguments: Any, **_options: Any):
        # None, while a copy is made, which has the class of the original.
        return object.__new__(cls if processor is None else _with_signature_of(type(processor)))

    def __init__(self, processor: Callable, pattern: Pattern | str, *, backend: str = "auto"):
        if not callable(processor):
            raise TypeError(f"processor must be callable, got {type(processor).__name__}")
        if isinstance(processor, nn.Module):
            raise ValueError(
                f"processor must have no weights of its own, got {type(processor).__name__}"
            )
        check_backend(backend)
        self.processor, self.pattern, self.backend = processor, as_pattern(pattern), backend

    def __call__(self, *arguments: Any, **options: Any):
        mode = replace_sdpa(self.pattern, backend=self.backend)
        with mode:
            result = self.processor(*arguments, **options)
        if not mode.saw_attention:  # the result is that of dense attention
            raise ValueError(
                "processor must call torch's scaled_dot_product_attention, which "
                f"{type(self.processor).__name__} did not: diffusers has processors that call it, "
                'such as AttnProcessor2_0, and models with model.set_attention_backend("native")'
            )
        return result

    def __getattr__(self, name: str):
        if name == "processor":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self.processor, name)


@cache
def _with_signature_of(kind: type) -> type[SparseProcessor]:
    """SparseProcessor with the signature of a class of processors.

    diffusers passes only the arguments that the signature of a processor names. The class has it,
    and not the object, because torch.compile traces no calls of objects with a call of their own.
    """

    @wraps(kind.__call__)
    def call(self: SparseProcessor, *arguments: Any, **options: Any):
        return SparseProcessor.__call__(self, *arguments, **options)

    return type("SparseProcessor", (SparseProcessor,), {"__call__": call, "__doc__": kind.__doc__})


def sparsify(
    model: nn.Module,
    pattern: Pattern | str,
    *,
    processors: Callable[[str], bool] = lambda name: True,
    backend: str = "auto",
):
    """Gives the self-attention of a diffusers model a sparsity pattern.

    Attention with as many keys as queries counts as self-attention.

    Args:
        model: A model whose attention layers have get_processor and set_processor, such as
            pipe.transformer.
        pattern: A Pattern, or its text as masks.parse reads it.
        processors: A predicate that selects processors by their name: that of their attention
            layer in the model, and ".processor", as in model.attn_processors.
        backend: As in sparseflash.attention.

    Returns:
        The model, changed in place.

    Raises:
        TypeError: `model` is not a module, `pattern` is not a Pattern or text, or `processors` is
            not a function.
        ValueError: The model has no processors, none is selected, one is a module with weights, or
            no backend has the name `backend`. Nothing is changed then.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            "model must be a model of diffusers, such as pipe.transformer or pipe.unet, got "
            f"{type(model).__name__}"
        )
    if not callable(processors):
        raise TypeError(
            "processors must be a function of the name of a processor, got "
            f"{type(processors).__name__}"
        )
    pattern, layers = as_pattern(pattern), _attention_layers(model)
    if not layers:
        raise ValueError(
            f"model must have attention layers of diffusers, got none in {type(model).__name__}"
        )
    chosen = {layer: layer.get_processor() for name, layer in layers.items() if processors(name)}
    if not chosen:
        raise ValueError(f"processors must select at least one of {list(layers)}")
    sparse = {}
    for layer, processor in chosen.items():
        dense = processor.processor if isinstance(processor, SparseProcessor) else processor
        sparse[layer] = SparseProcessor(dense, pattern, backend=backend)
    for layer, processor in sparse.items():
        layer.set_processor(processor)
    return model


def _attention_layers(model: nn.Module) -> dict[str, Any]:
    """The attention layers by the names of their processors.

    Not from model.attn_processors, which some models lack that have such layers.
    """
    return {
        f"{name}.processor": module
        for name, module in model.named_modules()
        if hasattr(module, "get_processor") and hasattr(module, "set_processor")
    }
