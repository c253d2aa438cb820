"""The keys and values of the tokens that were seen."""

import torch
from torch import Tensor

from masks.arguments import whole


class KeyValueCache:
    """Room for the keys and values of max_len tokens, (batch, kv_heads, max_len, head_dim).

    One for each layer and batch of sequences; for inference, without gradients.
    Raises TypeError or ValueError for sizes below 1 and a dtype that is not floating-point.
    """

    def __init__(
        self,
        batch: int,
        kv_heads: int,
        max_len: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ):
        sizes = {"batch": batch, "kv_heads": kv_heads, "max_len": max_len, "head_dim": head_dim}
        shape = tuple(whole(name, size, least=1) for name, size in sizes.items())
        if not dtype.is_floating_point:
            raise TypeError(f"dtype must be floating-point, got {dtype}")
        self._keys, self._values = (torch.zeros(shape, dtype=dtype, device=device) for _ in "kv")
        self.length = 0

    @property
    def max_len(self) -> int:
        return self._keys.shape[2]

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Adds the tokens of key and value, and returns those of all tokens so far.

        Raises ValueError when there is no room, or for tensors of another shape, dtype or device.
        """
        batch, kv_heads, _, head_dim = self._keys.shape
        end = self.length + key.shape[2]
        if (*key.shape[:2], key.shape[3]) != (batch, kv_heads, head_dim):
            raise ValueError(
                f"key must be ({batch}, {kv_heads}, tokens, {head_dim}), got {tuple(key.shape)}"
            )
        if (key.dtype, key.device) != (self._keys.dtype, self._keys.device):
            raise ValueError(
                f"key must be {self._keys.dtype} on {self._keys.device} like the cache, got "
                f"{key.dtype} on {key.device}"
            )
        if end > self.max_len:
            raise ValueError(f"cache holds {self.max_len} tokens, got {end}")
        for kept, new in ((self._keys, key), (self._values, value)):
            kept[:, :, self.length : end] = new.detach()
        self.length = end
        return self.first(end)

    def first(self, tokens: int) -> tuple[Tensor, Tensor]:
        """The keys and values of the first places, whether or not a token has come there."""
        return self._keys[:, :, :tokens], self._values[:, :, :tokens]

    def reset(self) -> None:
        """Forgets all tokens."""
        self.length = 0
