"""Hugging Face transformers: attention with sparsity patterns.

`register(pattern)` registers an attention implementation for all models. `sparsify(model,
pattern)` gives the layers and heads of one model their patterns.

transformers calls a mask function once per forward pass, before the layers. Here it returns the
block masks of the batch, and transformers passes them to the attention of every layer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function
from transformers.utils import logging

import masks
from masks import BlockMask, MaskBatch, Pattern
from masks._parse import as_pattern
from sparseflash._attention import attention
from sparseflash.backends.select import check_backend
from sparseflash.compiled import stores_masks
from sparseflash.integrations.layers import Layers, layer_patterns
from sparseflash.nn.decode_masks import decode_mask, shared_length

logger = logging.get_logger(__name__)

# Compiling a mask reads tensors on the host and fills caches, which a graph must not trace.
outside_of_graphs = torch.compiler.disable(reason="masks are made outside of graphs")


def register(
    pattern: Pattern | str | Sequence[Pattern | str] | None = None,
    name: str = "blocksparse",
    *,
    backend: str = "auto",
) -> None:
    """Registers an attention implementation, for model.set_attn_implementation(name).

    A pair attends if both the model's own mask (causal, sliding window, padding) and the pattern
    allow it. Soft caps and attention sinks of a model are applied.

    Padding after all tokens costs nothing. Other padding needs a mask for each batch element. If
    the model's own mask is neither causal nor full (a sliding window, packed sequences), it is
    evaluated pair by pair for every batch.

    The pattern does not apply to cross-attention, in which a decoder attends to the tokens of an
    encoder. Attention that is not causal counts as cross-attention if the numbers of queries and
    keys differ, or if its module says so.

    In a step of generation with a cache the pattern is compiled at the next power of two of the
    length, so that many steps share a mask. This matters only for patterns that depend on the
    length, such as random ones.

    Args:
        pattern: A Pattern, or its text as masks.parse reads it; a list of these with one for each
            layer; or None for config.sparse_pattern of the model, which is masks.to_json(pattern)
            or a list of such texts. Positions are those of the padded sequence.
        name: The name of the implementation. It must not contain "flash", which transformers
            reserves for its own kernels.
        backend: As in sparseflash.attention.

    Raises:
        TypeError: `name` is not a string, or `pattern` has another type.
        ValueError: `name` contains "flash", a text is not a pattern, or no backend has the name
            `backend`. A call with a position_bias also raises it.
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, got {name!r}")
    if "flash" in name:
        raise ValueError(f'name must not contain "flash", got {name!r}')
    check_backend(backend)
    patterns = None
    if pattern is not None:
        patterns = tuple(as_pattern(own) for own in _as_list(pattern))
        patterns = patterns if len(set(patterns)) > 1 else patterns[:1]
    AttentionMaskInterface.register(name, partial(_masks_of_batch, patterns))
    AttentionInterface.register(name, partial(_attend, patterns, backend))


def sparsify(
    model: PreTrainedModel,
    pattern: Layers = None,
    *,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    backend: str = "auto",
) -> PreTrainedModel:
    """Gives the layers and heads of a transformers model their patterns, within its own mask.

    A pair attends as in `register`. Of a model of text and images, only layers of text get
    patterns. Its other parts are models, too, as model.vision_tower is. The patterns are recorded
    in the configuration of the model, so they are saved with it:
    `sparsify(AutoModel.from_pretrained(path))` restores them.

    Args:
        model: A model whose attention layers call transformers' attention interface, as most do.
        pattern: One pattern for all layers, or a list with one for each layer. A pattern of a
            layer is a Pattern, its text, None for all pairs, or a list of these with one for each
            query head or key head. Also {"layers": [{"heads": [...]}, ...]}, or the path of a JSON
            file with it (see sparseflash.lab). None for the patterns that the configuration
            records.
        layers: Indices of the layers with a pattern, from 0, or from -1 backwards. The others
            attend to all pairs. By default all layers.
        heads: Indices of the query heads of these layers with the pattern. By default all heads.
        backend: As in sparseflash.attention.

    Returns:
        The model, changed in place.

    Raises:
        TypeError, ValueError: The patterns do not match the layers and heads of the model, none is
            given and none recorded, no backend has the name `backend`, or the model does not call
            the attention interface. Nothing is changed then.
    """
    if not hasattr(model, "set_attn_implementation"):
        raise TypeError(f"model must be a model of transformers, got {type(model).__name__}")
    check_backend(backend)
    config = model.config.get_text_config()
    recorded = getattr(config, "sparse_pattern", None)
    if pattern is None:
        patterns = _recorded(config)
    elif not hasattr(config, "num_attention_heads"):
        raise ValueError(f"model must have attention heads, got {type(model).__name__}")
    else:
        sizes = (config.num_hidden_layers, config.num_attention_heads)
        kv_heads = getattr(config, "num_key_value_heads", None) or sizes[1]
        patterns = layer_patterns(pattern, *sizes, kv_heads, layers, heads)
        config.sparse_pattern = _record_of(patterns)
    name = f"blocksparse-{hash((patterns, backend)) % 2**64:x}"
    register(patterns, name, backend=backend)
    # An encoder of text has patterns, too. The configuration of text may be that of its decoder.
    part = model.config if getattr(model.config, "is_encoder_decoder", False) else config
    model.set_attn_implementation(_of_part(model.config, part, name) or name)
    if config._attn_implementation != name:  # transformers only logs it
        config.sparse_pattern = recorded
        raise ValueError(
            "model must call transformers' attention interface, which "
            f"{type(model).__name__} does not: its attention cannot be replaced"
        )
    return model


def _of_part(config: Any, part: Any, name: str) -> str | dict | None:
    """The argument of set_attn_implementation that names the attention of a part of a model.

    Args:
        config: The configuration of the model, or of a part of it.
        part: One of the configurations in it.
        name: The name of the implementation.

    Returns:
        The name, in a dict for each configuration around it; None if `part` is not in it.
    """
    if config is part:
        return name
    for key in config.sub_configs:
        inside = getattr(config, key, None)
        if inside is not None and (found := _of_part(inside, part, name)):
            return {key: found}
    return None


def _record_of(patterns: tuple[Pattern, ...]) -> list[str] | None:
    """The patterns as JSON texts; None if a pattern is made from a function of the user."""
    try:
        return [masks.to_json(own) for own in patterns]
    except ValueError:
        return None


# The settings that a configuration of a model with cross-attention may have.
_WITH_CROSS_ATTENTION = ("is_encoder_decoder", "is_decoder", "add_cross_attention")


class Span(NamedTuple):
    """The range of queries and keys of a call within the sequence, in tokens."""

    q_offset: int
    q_length: int
    kv_offset: int
    kv_length: int

    @property
    def is_whole(self) -> bool:
        """Whether it is a whole sequence. Then the mask is the pattern, at any length."""
        return self.q_offset == self.kv_offset == 0 and self.q_length == self.kv_length

    @property
    def q_end(self) -> int:
        return self.q_offset + self.q_length

    @property
    def k_end(self) -> int:
        return self.kv_offset + self.kv_length


class BatchMask(NamedTuple):
    """The mask of a batch, and its key_lengths as sparseflash.attention takes them."""

    mask: Pattern | BlockMask | MaskBatch
    key_lengths: Tensor | None


@dataclass(frozen=True, eq=False)
class LayerMasks:
    """The masks of a batch: one for each layer, or one that all layers share.

    Before a step with a static cache, `generate` of transformers calls the mask function and
    treats the result like a 4-dimensional mask tensor.

    Attributes:
        of_layers: The masks.
        is_whole: Whether queries and keys are whole sequences.
        of_cross_attention: The mask of cross-attention; None if the layers cannot have any.
        ndim: As of a mask tensor (batch, heads, queries, keys).
    """

    of_layers: tuple[BatchMask, ...]
    is_whole: bool
    of_cross_attention: BatchMask | None = None
    ndim: int = 4

    def contiguous(self) -> "LayerMasks":
        return self


@outside_of_graphs
def _masks_of_batch(
    patterns: tuple[Pattern, ...] | None,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | LayerMasks | None = None,
    *,
    device: torch.device,
    config: Any = None,
    **_options,
) -> LayerMasks:
    """The mask function that transformers calls.

    attention_mask is bool (batch, tokens), False at padding.
    """
    if isinstance(attention_mask, LayerMasks):
        return attention_mask
    span = Span(int(q_offset), q_length, kv_offset, kv_length)
    bidirectional = mask_function is bidirectional_mask_function
    if bidirectional and q_length != kv_length:  # cross-attention
        patterns = (masks.full(),)
    else:
        patterns = _patterns_of(patterns, config, mask_function is causal_mask_function)
    batch_arguments = (batch_size, span, mask_function, attention_mask, torch.device(device))
    batch_masks = {own: _mask_of_batch(own, *batch_arguments) for own in dict.fromkeys(patterns)}
    # With as many keys as queries only the module knows whether it is cross-attention.
    may_cross = any(getattr(config, name, False) for name in _WITH_CROSS_ATTENTION)
    cross = None
    if bidirectional and may_cross:
        cross = _mask_of_batch(masks.full(), *batch_arguments)
    return LayerMasks(tuple(batch_masks[own] for own in patterns), span.is_whole, cross)


def _mask_of_batch(
    pattern: Pattern,
    batch_size: int,
    span: Span,
    mask_function: Callable,
    attention_mask: Tensor | None,
    device: torch.device,
) -> BatchMask:
    """The mask of a batch in the layers that have this pattern."""
    lengths, allowed = _padding(attention_mask, span)
    simple = mask_function in (causal_mask_function, bidirectional_mask_function)
    if simple and allowed is None and span.is_whole:
        return BatchMask(pattern, lengths)
    mask = own = _mask_of_span(pattern, span, device)
    if not simple:
        functions = (
            partial(mask_function, torch.tensor(i, device=device)) for i in range(batch_size)
        )
        mask = MaskBatch.from_masks(
            [own & _of_pairs(own, span, function, device) for function in functions]
        )
    if allowed is not None:
        mask = MaskBatch.with_keys(mask, allowed)
    return BatchMask(mask, lengths)


def _attend(
    patterns: tuple[Pattern, ...] | None,
    backend: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: LayerMasks | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: (out (batch, seq, heads, head_dim), no weights)."""
    if options.get("position_bias") is not None:
        raise ValueError("blocksparse attention does not support position_bias")
    if options.get("output_attentions"):
        logger.warning_once(
            "block-sparse attention has no output_attentions: it never stores all probabilities. "
            "sparseflash.lab.profile measures them; eager attention returns them."
        )
    call = partial(
        attention,
        scale=scaling,
        dropout_p=dropout,
        softcap=options.get("softcap"),
        sinks=options.get("s_aux"),
        backend=backend,
    )
    if attention_mask is None:
        causal = options.get("is_causal", getattr(module, "is_causal", False))
        if not causal and (query.shape[2] != key.shape[2] or _is_cross_attention(module)):
            own = (masks.full(),)
        else:
            own = _patterns_of(patterns, getattr(module, "config", None), causal)
        out = call(query, key, value, _of_layer(own, module))
    elif isinstance(attention_mask, LayerMasks):
        # A step of generation has masks of its own: a graph would be compiled for every step.
        attend = _attend_batch if attention_mask.is_whole else outside_of_graphs(_attend_batch)
        if attention_mask.of_cross_attention is not None and _is_cross_attention(module):
            own = attention_mask.of_cross_attention
        else:
            own = _of_layer(attention_mask.of_layers, module)
        out = attend(call, query, key, value, own)
    else:
        raise ValueError(
            f"attention_mask must be 2-dimensional or None, got {tuple(attention_mask.shape)}"
        )
    return rearrange(out, "b h n d -> b n h d").contiguous(), None


def _is_cross_attention(module: nn.Module) -> bool:
    """Whether a module that is not causal attends to tokens of an encoder, by what it says."""
    says_so = getattr(module, "is_cross_attention", False) or getattr(module, "is_decoder", False)
    return says_so or "CrossAttention" in type(module).__name__


def _attend_batch(call: Callable, query: Tensor, key: Tensor, value: Tensor, batch: BatchMask):
    return call(query, key, value, batch.mask, key_lengths=batch.key_lengths)


def _of_layer(each: tuple, module: nn.Module):
    """The element for the layer of a module; the only element if there is one."""
    if len(each) == 1:
        return each[0]
    layer = getattr(module, "layer_idx", None)
    if layer is None or layer >= len(each):
        raise ValueError(
            f"{type(module).__name__} must have a layer_idx below {len(each)}, the number "
            f"of layers that have patterns, got {layer}"
        )
    return each[layer]


@outside_of_graphs
def _patterns_of(
    patterns: tuple[Pattern, ...] | None, config: Any, causal: bool
) -> tuple[Pattern, ...]:
    """The patterns of all layers; one if they share it."""
    patterns = _recorded(config) if patterns is None else patterns
    return tuple(_causal(own) for own in patterns) if causal else patterns


def _recorded(config: Any) -> tuple[Pattern, ...]:
    record = getattr(config, "sparse_pattern", None)
    if record is None:
        raise ValueError("config.sparse_pattern must be set, because no pattern was registered")
    try:
        return tuple(masks.from_json(text) for text in _as_list(record))
    except (TypeError, ValueError) as error:
        raise ValueError(
            "config.sparse_pattern must be what masks.to_json makes, or a list of that, got "
            f"{record!r}"
        ) from error


def _as_list(one_or_more: Any) -> Sequence:
    return one_or_more if isinstance(one_or_more, list | tuple) else [one_or_more]


@lru_cache(maxsize=32)
def _causal(pattern: Pattern) -> Pattern:
    return pattern & masks.causal()


@stores_masks(maxsize=256)
def _mask_of_span(pattern: Pattern, span: Span, device: torch.device) -> BlockMask:
    """The mask of a span, a part of the mask of the whole sequence."""
    length = max(span.q_end, span.k_end)
    if span.q_offset == 0 and span.kv_offset == 0:
        return pattern(length, device=device).crop(span.q_end, span.k_end)
    rows = (span.q_offset, span.q_end, span.k_end)
    mask = decode_mask(pattern, shared_length(length), *rows, device)
    return mask if span.kv_offset == 0 else mask.T.slice_queries(span.kv_offset, span.k_end).T


def _of_pairs(
    like: BlockMask, span: Span, attends_pair: Callable, device: torch.device
) -> BlockMask:
    """The mask of a function (head, query, key) -> bool of transformers.

    The function is called on `device`, where its own tensors are.
    """
    by_key = torch.vmap(attends_pair, in_dims=(None, None, 0))
    by_query = torch.vmap(by_key, in_dims=(None, 0, None))
    any_head = torch.tensor(0, device=device)

    @masks.pattern
    def model(q: Tensor, k: Tensor) -> Tensor:
        return by_query(any_head, q.flatten() + span.q_offset, k.flatten() + span.kv_offset)

    return model(like.seq_len, like.block_size, device).to(like.device)


def _padding(attention_mask: Tensor | None, span: Span) -> tuple[Tensor | None, Tensor | None]:
    """(key lengths (batch,) on the CPU, None) if padding comes after all tokens.

    Otherwise (None, bool (batch, kv_length), False at padding). Keys past the end of
    attention_mask are not computed yet and count as padding.
    """
    if attention_mask is None:
        return None, None
    missing = max(0, span.k_end - attention_mask.shape[1])
    allowed = nn.functional.pad(attention_mask.bool(), (0, missing))
    allowed = allowed[:, span.kv_offset : span.k_end]
    lengths = allowed.sum(1).cpu()
    if bool(
        (allowed.cpu() == (torch.arange(span.kv_length, device="cpu") < lengths[:, None])).all()
    ):
        return lengths, None
    return None, allowed
