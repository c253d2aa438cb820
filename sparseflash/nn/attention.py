"""Multi-head attention with a sparsity pattern."""

from collections.abc import Sequence
from numbers import Real
from typing import Unpack

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import linear

import masks
from masks import BlockMask, Pattern
from masks._parse import as_pattern, parse
from masks.arguments import check_floating, check_integer, check_sizes
from sparseflash._attention import attention
from sparseflash.arguments import check_key_lengths, lengths_in_range
from sparseflash.dispatch.spec import FEW_QUERIES
from sparseflash.nn.decode_masks import decode_mask, shared_length
from sparseflash.nn.kv_cache import KeyValueCache
from sparseflash.nn.rotary import Rotary
from sparseflash.options import AttentionOptions, OptionKeywords
from sparseflash.score import find_score_function


class SparseAttention(nn.Module):
    """Multi-head attention whose pattern is part of the module.

    q, k, v = x W_q, m W_k, m W_v (m is x in self-attention);  y = attention(q, k, v, pattern) W_o

    Tensors are (batch, seq, embed_dim). Parameters have the names and the layout of those of
    torch.nn.MultiheadAttention. Its state dict loads if kv_heads is num_heads and value_dim is the
    default. The pattern is not part of the state dict: save masks.to_json(module.pattern) with it.

    Args:
        embed_dim: Features of a token.
        num_heads: Number of query heads; it divides embed_dim.
        pattern: A Pattern, or its text as masks.parse reads it; a sequence of these with one for
            each query head or each key head; or None for all pairs. It is compiled once per length
            and device, in blocks of its own size.
        kv_heads: Number of key heads; it divides num_heads, which is the default.
        value_dim: Value dim. By default the head dim, embed_dim / num_heads.
        dropout: Probability of dropping an entry of P, in training only.
        bias: Whether the projections have a bias.
        rotary: Position embedding of queries and keys, for self-attention only.
        device, dtype: Device and dtype of the parameters.
        **options: Options of every call, as in AttentionOptions, except dropout_p. Score tensors
            are passed to each call.

    Raises:
        TypeError, ValueError: Dimensions do not divide, the pattern does not match the heads, or
            an option is wrong.
    """

    batch_first = True

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        pattern: Pattern | str | Sequence[Pattern | str] | None = None,
        *,
        kv_heads: int | None = None,
        value_dim: int | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        rotary: Rotary | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[OptionKeywords],
    ):
        super().__init__()
        kv_heads = num_heads if kv_heads is None else kv_heads
        check_sizes(2**31 - 1, embed_dim=embed_dim, num_heads=num_heads, kv_heads=kv_heads)
        if embed_dim % num_heads or num_heads % kv_heads:
            raise ValueError(
                f"num_heads must divide embed_dim {embed_dim} and be a multiple of kv_heads "
                f"{kv_heads}, got {num_heads}"
            )
        self.embed_dim, self.num_heads, self.kv_heads = embed_dim, num_heads, kv_heads
        self.head_dim = embed_dim // num_heads
        self.value_dim = self.head_dim
        if value_dim is not None:
            self.value_dim = check_integer("value_dim", value_dim, least=1)
        if not isinstance(rotary, Rotary | None):
            raise TypeError(f"rotary must be a Rotary or None, got {rotary!r}")
        if rotary is not None and rotary.head_dim != self.head_dim:
            raise ValueError(
                f"rotary must have head_dim {self.head_dim} (embed_dim / num_heads), got "
                f"{rotary.head_dim}"
            )
        if not isinstance(dropout, Real) or not 0 <= dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {dropout!r}")
        self.pattern = _parsed_pattern(pattern, num_heads, kv_heads)
        if "dropout_p" in options:
            raise TypeError("dropout_p must be given as dropout, which applies in training only")
        AttentionOptions(**(options | {"dropout_p": dropout}))
        self.dropout, self.rotary, self.options = dropout, rotary, options
        rows = sum(self._projections)
        self.in_proj_weight = nn.Parameter(
            torch.empty(rows, embed_dim, device=device, dtype=dtype)
        )
        self.in_proj_bias = (
            nn.Parameter(torch.empty(rows, device=device, dtype=dtype)) if bias else None
        )
        self.out_proj = nn.Linear(
            num_heads * self.value_dim, embed_dim, bias, device=device, dtype=dtype
        )
        self.reset_parameters()

    @classmethod
    def from_torch(
        cls,
        module: nn.MultiheadAttention,
        pattern: Pattern | str | Sequence[Pattern | str] | None = None,
    ) -> "SparseAttention":
        """Converts a torch.nn.MultiheadAttention.

        The result has its weights, dropout, device, dtype and mode (training or evaluation).
        Tensors of the result are (batch, seq, embed_dim), also if batch_first of `module` is
        False.

        Args:
            module: The module to convert.
            pattern: As in SparseAttention.

        Raises:
            TypeError: `module` is not a MultiheadAttention.
            ValueError: `module` has kdim, vdim, add_bias_kv or add_zero_attn.
        """
        if not isinstance(module, nn.MultiheadAttention):
            raise TypeError(
                f"module must be a torch.nn.MultiheadAttention, got {type(module).__name__}"
            )
        if module.in_proj_weight is None or module.bias_k is not None or module.add_zero_attn:
            raise ValueError("module must have no kdim, vdim, add_bias_kv or add_zero_attn")
        sparse = cls(
            module.embed_dim,
            module.num_heads,
            pattern,
            dropout=module.dropout,
            bias=module.in_proj_bias is not None,
            device=module.in_proj_weight.device,
            dtype=module.in_proj_weight.dtype,
        )
        sparse.load_state_dict(module.state_dict())
        return sparse.train(module.training)

    def reset_parameters(self) -> None:
        """Initialises the parameters as torch.nn.MultiheadAttention does."""
        nn.init.xavier_uniform_(self.in_proj_weight)
        self.out_proj.reset_parameters()
        for bias in (self.in_proj_bias, self.out_proj.bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None = None,
        *,
        key_lengths: Tensor | None = None,
        cache: KeyValueCache | None = None,
        score_tensors: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """Attention of x to itself (self-attention) or to memory (cross-attention).

        Args:
            x: (batch, seq, embed_dim), the tokens of the queries.
            memory: (batch, k_len, embed_dim), the tokens of keys and values; x by default.
            key_lengths: As in sparseflash.attention. With a cache, up to its max_len.
            cache: Keys and values of earlier tokens. x has the tokens that follow them; it attends
                the earlier tokens and itself. The pattern is compiled at the max_len of the cache.
                The keys and values of x are appended, unless the call fails.
            score_tensors: As in sparseflash.attention.

        Returns:
            (batch, seq, embed_dim), in the dtype of x.

        Raises:
            TypeError: `x` or `memory` is not floating-point, or `cache` has another type.
            ValueError: A shape is wrong; memory is given with a cache or a rotary embedding; or
                the cache has tokens and the score function depends on the position of the query,
                which would be counted from the first token of x.
            TypeError, ValueError, BackendError: As in sparseflash.attention.
        """
        self._check("x", x)
        if memory is not None:
            self._check("memory", memory)
        if not isinstance(cache, KeyValueCache | None):
            raise TypeError(f"cache must be a KeyValueCache or None, got {type(cache).__name__}")
        if memory is not None and (cache is not None or self.rotary is not None):
            raise ValueError("memory must be None with a cache or a rotary embedding")
        query, key, value = self._projected(x, memory)
        if self.rotary is not None:
            offset = 0 if cache is None else cache.length
            query, key = self.rotary(query, offset), self.rotary(key, offset)
        if cache is None:
            return self._attend(query, key, value, self.pattern, key_lengths, score_tensors)
        start = cache.length
        if start:
            self._check_score_of_steps()
        try:
            key, value = cache.append(key, value)
            cache_arguments = (cache, key_lengths, score_tensors)
            return self._attend_cache(query, key, value, start, *cache_arguments)
        except Exception:
            cache.length = start
            raise

    def _attend_cache(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        begin: int,
        cache: KeyValueCache,
        key_lengths: Tensor | None,
        score_tensors: Sequence[Tensor] | None,
    ) -> Tensor:
        """Attention of the tokens from `begin` on, which the cache contains, to all of it."""
        if key_lengths is not None:
            check_key_lengths(key_lengths, query)
            lengths_in_range(key_lengths, cache.max_len, key_lengths.device)
            key_lengths = key_lengths.clamp(0, cache.length)
        if query.shape[2] <= FEW_QUERIES:
            key, value = cache.first(_readable_keys(cache))
            if key_lengths is None:
                shape = query.shape[:1]
                key_lengths = torch.full(shape, cache.length, dtype=torch.int32, device="cpu")
        mask = self.pattern
        if mask is not None:
            rows = (begin, cache.length, key.shape[2])
            mask = decode_mask(mask, cache.max_len, *rows, query.device)
        return self._attend(query, key, value, mask, key_lengths, score_tensors)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Pattern | BlockMask | None,
        key_lengths: Tensor | None,
        score_tensors: Sequence[Tensor] | None,
    ) -> Tensor:
        dropout_p = self.dropout if self.training else 0.0
        options = self.options | {"dropout_p": dropout_p}
        tensors = {"key_lengths": key_lengths, "score_tensors": score_tensors}
        out = attention(query, key, value, mask, **tensors, **options)
        return self.out_proj(rearrange(out, "b h n d -> b n (h d)"))

    def _check(self, name: str, tokens: Tensor) -> None:
        check_floating(name, tokens)
        if tokens.dim() != 3 or tokens.shape[2] != self.embed_dim:
            raise ValueError(
                f"{name} must be (batch, seq, {self.embed_dim}), got {tuple(tokens.shape)}"
            )

    def _check_score_of_steps(self) -> None:
        score = self.options.get("score")
        function = find_score_function(score) if isinstance(score, str) else score
        if function is not None and function.of_query:
            raise ValueError(
                f"score must not depend on the position of the query with a cache, got "
                f"{function.name!r}: pass the position to sparseflash.attention, in a score tensor"
            )

    @property
    def _projections(self) -> list[int]:
        """Features of all heads of queries, of keys, and of values."""
        keys, values = self.kv_heads * self.head_dim, self.kv_heads * self.value_dim
        return [self.num_heads * self.head_dim, keys, values]

    def extra_repr(self) -> str:
        values = "" if self.value_dim == self.head_dim else f", value_dim={self.value_dim}"
        heads = f"kv_heads={self.kv_heads}{values}"
        return f"{self.embed_dim}, {self.num_heads}, {self.pattern}, {heads}"

    def _projected(self, x: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """(query, key, value), each (batch, heads, seq, head_dim or value_dim)."""
        sizes = self._projections
        if memory is None:
            qkv = linear(x, self.in_proj_weight, self.in_proj_bias).split(sizes, 2)
        else:
            q_kv = [sizes[0], sizes[1] + sizes[2]]
            weights = self.in_proj_weight.split(q_kv)
            biases = (None, None) if self.in_proj_bias is None else self.in_proj_bias.split(q_kv)
            kv = linear(memory, weights[1], biases[1])
            qkv = (linear(x, weights[0], biases[0]), *kv.split(sizes[1:], 2))
        dims = (self.head_dim, self.head_dim, self.value_dim)
        query, key, value = (
            rearrange(x, "b n (h d) -> b h n d", d=dim) for x, dim in zip(qkv, dims, strict=True)
        )
        return query, key, value


def _parsed_pattern(
    pattern: Pattern | str | Sequence[Pattern | str] | None, num_heads: int, kv_heads: int
) -> Pattern | None:
    if pattern is None:
        return None
    if isinstance(pattern, str) or not isinstance(pattern, Sequence):
        return as_pattern(pattern)
    if len(pattern) not in (kv_heads, num_heads):
        allowed = " or ".join(map(str, sorted({kv_heads, num_heads})))
        raise ValueError(f"pattern must be one pattern or a list of {allowed}, got {len(pattern)}")
    parsed = {text: parse(text) for text in pattern if isinstance(text, str)}
    return masks.stack([parsed[p] if isinstance(p, str) else as_pattern(p) for p in pattern])


def _readable_keys(cache: KeyValueCache) -> int:
    """The number of keys that a step of few tokens reads. Key lengths mask those to come."""
    return min(cache.max_len, shared_length(cache.length))
