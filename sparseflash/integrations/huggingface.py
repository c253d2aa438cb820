"""Hugging Face transformers: `register(pattern)` makes models attend by a pattern, and
`sparsify(model, pattern)` one model by patterns of its layers and heads.

A model's mask function is called once per forward pass, before its layers: it makes the block
masks of the batch, which transformers passes to the attention of every layer.
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
from sparseflash.compiled import stores_masks
from sparseflash.integrations.layers import Layers, layer_patterns
from sparseflash.nn.decode_masks import decode_mask, shared_length

logger = logging.get_logger(__name__)

# Making a mask reads numbers on the host and fills caches, which a graph must not trace.
outside_of_graphs = torch.compiler.disable(reason="masks are made outside of graphs")


def register(
    pattern: Pattern | str | Sequence[Pattern | str] | None = None,
    name: str = "blocksparse",
    *,
    backend: str = "auto",
) -> None:
    """Registers `name` as an attention implementation: model.set_attn_implementation(name).

    What a model attends by its own mask (causal, sliding, padding) and by the pattern is attended.

    Padding after all tokens costs nothing; other padding makes masks of each batch element. A mask
    of the model that is neither causal nor full (a sliding window, packed sequences) is read pair
    by pair for every batch. Soft caps and attention sinks of a model
    count.

    Args:
        pattern: A Pattern, its text as masks.parse reads it, a list with one for each layer, or
            None for what the model's configuration records: config.sparse_pattern =
            masks.to_json(pattern), or a list of such texts. Positions are
            those of the padded sequence. In a step of generation, whose keys come before its
            queries, the pattern is that of the next power of two of the length, so that many
            steps share what is compiled; only a pattern that draws or counts blocks by the length
            depends on it.
        name: Must not contain "flash", which transformers takes for its own kernels.
        backend: As in sparseflash.attention.

    Raises:
        TypeError: `name` is no string.
        ValueError: `name` contains "flash". Calls raise it for a position bias, which is not a
            function of the distance alone there.
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, got {name!r}")
    if "flash" in name:
        raise ValueError(f'name must not contain "flash", got {name!r}')
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
    """Makes a transformers model attend by patterns of its layers and heads, within its own mask.

    The configuration records the patterns, so that a saved model keeps them:
    `sparsify(AutoModel.from_pretrained(path))` attends by them again. See register for what is
    attended.

    Args:
        model: Whose attention is chosen by set_attn_implementation.
        pattern: One for all layers, or a list with one for each layer: a Pattern, its text, None
            for all pairs, or a list of those with one for each head of queries or of keys. Or
            {"layers": [{"heads": [...]}, ...]}, or the path of a JSON file that holds it. None is
            what the configuration records.
        layers: The layers that are changed, from 0 or from -1 backwards; the others attend to all
            pairs. By default every layer.
        heads: Likewise the heads of queries of these layers.
        backend: As in sparseflash.attention.

    Returns:
        The model.

    Raises:
        TypeError, ValueError: The patterns do not fit the layers and heads of the model, or none
            is given and none recorded. Nothing is changed.
    """
    if not hasattr(model, "set_attn_implementation"):
        raise TypeError(f"model must be one of transformers, got {type(model).__name__}")
    config = model.config.get_text_config()
    if pattern is None:
        patterns = _recorded(config)
    else:
        sizes = (config.num_hidden_layers, config.num_attention_heads)
        kv_heads = getattr(config, "num_key_value_heads", None) or sizes[1]
        patterns = layer_patterns(pattern, *sizes, kv_heads, layers, heads)
        config.sparse_pattern = _record_of(patterns)
    name = f"blocksparse-{hash((patterns, backend)) % 2**64:x}"
    register(patterns, name, backend=backend)
    model.set_attn_implementation(name)
    return model


def _record_of(patterns: tuple[Pattern, ...]) -> list[str] | None:
    """What the configuration records of patterns; None where one is of a function."""
    try:
        return [masks.to_json(own) for own in patterns]
    except ValueError:
        return None


class Span(NamedTuple):
    """The queries and keys of a call within the sequence, in tokens."""

    q_offset: int
    q_length: int
    kv_offset: int
    kv_length: int

    @property
    def is_whole(self) -> bool:
        """Whether it is all of a sequence: one pattern then serves every length."""
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
    """The masks of a batch in each layer, one where all layers share it.

    `generate` makes them before a step with a cache of a fixed size, and treats them as a tensor
    of all pairs that is given to the model.

    is_whole: whether their queries and keys are whole sequences.
    """

    of_layers: tuple[BatchMask, ...]
    is_whole: bool
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
    """A mask function as transformers calls it; attention_mask is bool (batch, tokens), False at
    padding.
    """
    if isinstance(attention_mask, LayerMasks):
        return attention_mask
    span = Span(int(q_offset), q_length, kv_offset, kv_length)
    patterns = _patterns_of(patterns, config, mask_function is causal_mask_function)
    facts = (batch_size, span, mask_function, attention_mask, torch.device(device))
    batch_masks = {own: _mask_of_batch(own, *facts) for own in dict.fromkeys(patterns)}
    return LayerMasks(tuple(batch_masks[own] for own in patterns), span.is_whole)


def _mask_of_batch(
    pattern: Pattern,
    batch_size: int,
    span: Span,
    mask_function: Callable,
    attention_mask: Tensor | None,
    device: torch.device,
) -> BatchMask:
    """The masks of a batch in the layers of a pattern."""
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
        raise ValueError("blocksparse attention takes no position_bias")
    if options.get("output_attentions"):
        logger.warning_once(
            "block-sparse attention has no output_attentions: it never holds all probabilities. "
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
        own = _patterns_of(patterns, getattr(module, "config", None), causal)
        out = call(query, key, value, _of_layer(own, module))
    elif isinstance(attention_mask, LayerMasks):
        # A step of generation has masks of its own: a graph would be compiled for every step.
        attend = _attend_batch if attention_mask.is_whole else outside_of_graphs(_attend_batch)
        out = attend(call, query, key, value, _of_layer(attention_mask.of_layers, module))
    else:
        raise ValueError(
            f"attention_mask must be 2-dimensional or None, got {tuple(attention_mask.shape)}"
        )
    return rearrange(out, "b h n d -> b n h d").contiguous(), None


def _attend_batch(call: Callable, query: Tensor, key: Tensor, value: Tensor, batch: BatchMask):
    return call(query, key, value, batch.mask, key_lengths=batch.key_lengths)


def _of_layer(each: tuple, module: nn.Module):
    """What is that of a module's layer."""
    if len(each) == 1:
        return each[0]
    layer = getattr(module, "layer_idx", None)
    if layer is None or layer >= len(each):
        raise ValueError(
            f"{type(module).__name__} must have a layer_idx below {len(each)}, as there are "
            f"patterns of so many layers, got {layer}"
        )
    return each[layer]


@outside_of_graphs
def _patterns_of(
    patterns: tuple[Pattern, ...] | None, config: Any, causal: bool
) -> tuple[Pattern, ...]:
    """The patterns of all layers, one where they share it."""
    patterns = _recorded(config) if patterns is None else patterns
    return tuple(_causal(own) for own in patterns) if causal else patterns


def _recorded(config: Any) -> tuple[Pattern, ...]:
    record = getattr(config, "sparse_pattern", None)
    if record is None:
        raise ValueError("config.sparse_pattern must be set, for no pattern was registered")
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
    return pattern & masks.causal().with_block_size(pattern.block_size)


@stores_masks(maxsize=256)
def _mask_of_span(pattern: Pattern, span: Span, device: torch.device) -> BlockMask:
    """The mask of a call, cut out of that of the whole sequence."""
    length = max(span.q_end, span.k_end)
    if span.q_offset == 0 and span.kv_offset == 0:
        return pattern(length, device=device).crop(span.q_end, span.k_end)
    rows = (span.q_offset, span.q_end, span.k_end)
    mask = decode_mask(pattern, shared_length(length), *rows, device)
    return mask if span.kv_offset == 0 else mask.T.slice_queries(span.kv_offset, span.k_end).T


def _of_pairs(
    like: BlockMask, span: Span, attends_pair: Callable, device: torch.device
) -> BlockMask:
    """The pairs of a call for which transformers' function of (head, query, key) holds.

    It is called on `device`, where its own tensors are.
    """
    by_key = torch.vmap(attends_pair, in_dims=(None, None, 0))
    by_query = torch.vmap(by_key, in_dims=(None, 0, None))
    any_head = torch.tensor(0, device=device)

    @masks.pattern
    def model(q: Tensor, k: Tensor) -> Tensor:
        return by_query(any_head, q.flatten() + span.q_offset, k.flatten() + span.kv_offset)

    return model(like.seq_len, like.block_size, device).to(like.device)


def _padding(attention_mask: Tensor | None, span: Span) -> tuple[Tensor | None, Tensor | None]:
    """Where padding comes after all tokens, their number in each batch element, on the CPU;
    otherwise bool (batch, kv_length), False at padding. Keys that attention_mask does not know of
    are none yet.
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
