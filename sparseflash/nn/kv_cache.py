"""A cache of keys and values, for decoding."""

import torch
from torch import Tensor

from masks.arguments import check_floating, check_floating_dtype, check_sizes


class KeyValueCache:
    """The keys and values of up to max_len tokens of one layer.

    They are tensors (batch, kv_heads, max_len, head_dim) and (batch, kv_heads, max_len,
    value_dim), without gradients. `length` is the number of tokens that are stored.

    Args:
        batch, kv_heads, max_len, head_dim: Sizes of the tensors; max_len in tokens.
        dtype: Floating-point dtype of both tensors.
        device: Device of both tensors.
        value_dim: Value dim; head_dim by default.

    Raises:
        TypeError, ValueError: A size is below 1, or the dtype is not floating-point.
    """

    def __init__(
        self,
        batch: int,
        kv_heads: int,
        max_len: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        *,
        value_dim: int | None = None,
    ):
        value_dim = head_dim if value_dim is None else value_dim
        sizes = {"batch": batch, "kv_heads": kv_heads, "max_len": max_len}
        check_sizes(**sizes, head_dim=head_dim, value_dim=value_dim)
        check_floating_dtype("dtype", dtype)
        self._keys, self._values = (
            torch.zeros(batch, kv_heads, max_len, dim, dtype=dtype, device=device)
            for dim in (head_dim, value_dim)
        )
        self.length = 0

    @property
    def max_len(self) -> int:
        return self._keys.shape[2]

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Appends the keys and values of new tokens.

        Args:
            key: (batch, kv_heads, tokens, head_dim).
            value: (batch, kv_heads, tokens, value_dim).

        Returns:
            The keys and the values of all stored tokens.

        Raises:
            TypeError: A tensor is not floating-point.
            ValueError: A tensor has another shape, dtype or device, or there would be more than
                max_len tokens. Nothing is appended then.
        """
        check_floating("key", key)
        check_floating("value", value)
        tokens = key.shape[2] if key.dim() == 4 else "tokens"
        named = (("key", key, self._keys), ("value", value, self._values))
        for name, tensor, stored in named:
            shape = (*stored.shape[:2], tokens, stored.shape[3])
            if tuple(tensor.shape) != shape:
                expected = ", ".join(map(str, shape))
                raise ValueError(f"{name} must be ({expected}), got {tuple(tensor.shape)}")
            if (tensor.dtype, tensor.device) != (self._keys.dtype, self._keys.device):
                raise ValueError(
                    f"{name} must be {self._keys.dtype} on {self._keys.device} like the cache, "
                    f"got {tensor.dtype} on {tensor.device}"
                )
        end = self.length + key.shape[2]
        if end > self.max_len:
            raise ValueError(f"cache can hold at most {self.max_len} tokens, got {end}")
        for _, new, stored in named:
            stored[:, :, self.length : end] = new.detach()
        self.length = end
        return self.first(end)

    def first(self, tokens: int) -> tuple[Tensor, Tensor]:
        """The keys and values of the first positions; zeros at positions without a token.

        Args:
            tokens: Number of positions.
        """
        return self._keys[:, :, :tokens], self._values[:, :, :tokens]

    def reset(self) -> None:
        """Removes all tokens."""
        self.length = 0
