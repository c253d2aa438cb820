"""Captures the calls of attention that a model makes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import masks
from masks import BlockMask, Pattern
from masks._parse import as_pattern
from sparseflash._attention import attention
from sparseflash.integrations.sdpa import SdpaMode
from sparseflash.nn import SparseAttention
from sparseflash.options import OptionKeywords


@dataclass(frozen=True)
class AttentionCall:
    """One call of attention.

    Attributes:
        module: Name of the module that makes the call.
        query, key, value: (batch, heads, tokens, head_dim).
        base: The pattern of the call: full(), causal() or that of a SparseAttention.
        options: The other options of the call, as in AttentionOptions, such as its soft cap.
    """

    module: str
    query: Tensor
    key: Tensor
    value: Tensor
    base: Pattern
    options: OptionKeywords

    def attend(self, mask: Pattern | BlockMask) -> tuple[Tensor, Tensor]:
        """(out, lse) of the call with another mask."""
        return attention(self.query, self.key, self.value, mask, return_lse=True, **self.options)


Handler = Callable[[AttentionCall], Tensor]


@contextmanager
def captured(model: nn.Module, handle: Handler) -> Iterator[None]:
    """A context in which `handle` computes all attention of a model.

    It replaces torch's scaled_dot_product_attention and that of sparseflash.nn.SparseAttention.

    Args:
        model: The model; it is run inside the context.
        handle: Called with each AttentionCall; returns out (batch, heads, tokens, head_dim).

    Raises:
        ValueError: A module named after attention ran without such a call, or with a mask, lengths
            or sizes that are not supported. The message names the module.
    """
    capture = _Capture(handle)
    hooks = []
    for name, module in model.named_modules():
        if _is_attention(module):
            enter, leave = partial(capture.enter, name), partial(capture.leave)
            hooks.append(module.register_forward_pre_hook(enter))
            hooks.append(module.register_forward_hook(leave, always_call=True))
    sparse_modules = [m for m in model.modules() if isinstance(m, SparseAttention)]
    try:
        for module in sparse_modules:
            module.__dict__["_attend"] = partial(capture.attend_module, module)
        with capture:
            yield
    finally:
        for module in sparse_modules:
            del module.__dict__["_attend"]
        for hook in hooks:
            hook.remove()
    if capture.silent:
        raise ValueError(
            f"attention of {', '.join(sorted(capture.silent))} cannot be hooked: it calls neither "
            "torch's scaled_dot_product_attention nor sparseflash's. A transformers model does "
            'after set_attn_implementation("sdpa")'
        )


def attention_modules(model: nn.Module) -> list[str]:
    """Names of the modules whose class is named after attention."""
    return [name for name, module in model.named_modules() if _is_attention(module)]


def run(model: nn.Module, inputs: Any, loss: Callable[[Any], Tensor] | None) -> Tensor | None:
    """Runs the model in evaluation mode. Returns its loss, or None if it has none.

    Raises:
        TypeError: There are no inputs, or `loss` is not a function or returns no tensor.
        ValueError: The loss is not one number.
    """
    if inputs is None:
        raise TypeError("inputs must be the arguments of the model, got None")
    if loss is not None and not callable(loss):
        raise TypeError(f"loss must be a function of the output, got {loss!r}")
    training = model.training
    try:
        model.eval()
        out = model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
    finally:
        model.train(training)
    value = getattr(out, "loss", None) if loss is None else loss(out)
    if loss is not None and not isinstance(value, Tensor):
        raise TypeError(f"loss must return a tensor, got {type(value).__name__}")
    if value is not None and value.numel() != 1:
        raise ValueError(f"loss must return one number, got {tuple(value.shape)}")
    return value


@torch.no_grad()
def loss_difference(
    model: nn.Module,
    inputs: Any,
    layers: Sequence[Sequence[Pattern | str]],
    *,
    loss: Callable[[Any], Tensor] | None = None,
) -> float:
    """The loss of a model with sparse patterns, minus the loss of the model as it is.

    Args:
        model, inputs, loss: As in profile.
        layers: For each layer, in the order of the calls, a pattern for every head, as in
            Suggestion.layers.

    Returns:
        The difference of the losses.

    Raises:
        ValueError: The model has no loss, other layers or heads, or cannot be captured.
    """
    parsed = [masks.stack([as_pattern(p) for p in heads]) for heads in layers]
    calls = iter(parsed)

    def sparse(call: AttentionCall) -> Tensor:
        pattern = next(calls, None)
        if pattern is None:
            raise ValueError(f"layers must have an entry for each of the model, got {len(layers)}")
        return call.attend(within(pattern, call.base))[0]

    own_loss = run(model, inputs, loss)
    with captured(model, sparse):
        sparse_loss = run(model, inputs, loss)
    if own_loss is None or sparse_loss is None:
        raise ValueError("inputs must have labels, or loss be given: the model returns no loss")
    return float(sparse_loss) - float(own_loss)


def within(pattern: Pattern, base: Pattern) -> Pattern:
    """The pattern, restricted to the pairs of the model's own pattern."""
    if base.block_size != pattern.block_size:
        base = base.with_block_size(pattern.block_size)
    return pattern & base


class _Capture(SdpaMode):
    """Lets `handle` compute the calls of scaled_dot_product_attention and of SparseAttention.

    Attributes:
        running: Names of the modules that run and are named after attention, the innermost last.
        silent: Names of those that have made no call.
    """

    def __init__(self, handle: Handler):
        super().__init__()
        self.handle = handle
        self.running: list[str] = []
        self.silent: set[str] = set()

    def enter(self, name: str, *_) -> None:
        """Called before a module runs."""
        self.running.append(name)
        self.silent.add(name)

    def leave(self, *_) -> None:
        """Called after a module has run."""
        self.running.pop()

    def _attend(
        self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, **_
    ) -> Tensor:
        """scaled_dot_product_attention; its arguments are torch's."""
        if attn_mask is not None:
            raise ValueError(
                f"{self._caller()} has an attn_mask, and only full and causal attention are "
                "supported: inputs must have one length, without padding or a cache"
            )
        base = masks.causal() if is_causal else masks.full()
        return self._handled(query, key, value, base, {"scale": scale})

    def attend_module(
        self, module: SparseAttention, query, key, value, mask, key_lengths, score_tensors
    ) -> Tensor:
        """SparseAttention._attend."""
        if score_tensors:
            raise ValueError(f"{self._caller()} has score_tensors, which are not supported")
        if key_lengths is not None or not (mask is None or isinstance(mask, Pattern)):
            raise ValueError(
                f"{self._caller()} has key_lengths or a cache, which are not supported"
            )
        base = masks.full() if mask is None else mask
        out = self._handled(query, key, value, base, module.options)
        return module.out_proj(out.transpose(1, 2).flatten(2))

    def _caller(self) -> str:
        return self.running[-1] if self.running else "the model"

    def _handled(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        base: Pattern,
        options: OptionKeywords,
    ) -> Tensor:
        if query.shape[2] != key.shape[2]:
            raise ValueError(
                f"{self._caller()} has {query.shape[2]} queries and {key.shape[2]} keys: only "
                "self-attention of whole sequences is supported"
            )
        self.silent.discard(self._caller())
        return self.handle(AttentionCall(self._caller(), query, key, value, base, options))


def _is_attention(module: nn.Module) -> bool:
    """Whether a module is named after attention and contains no other such module."""
    inside = (m for m in module.modules() if m is not module)
    return _has_attention_name(module) and not any(map(_has_attention_name, inside))


def _has_attention_name(module: nn.Module) -> bool:
    name = type(module).__name__.lower()
    return "attention" in name or "attn" in name
