"""What a backend is: one implementation of both passes."""

from typing import Protocol

from torch import Tensor

from masks.mask_batch import CompiledMask
from sparseflash.dispatch.call import Call, Gradients, Needs, Saved
from sparseflash.dispatch.spec import AttentionSpec


class BackendError(RuntimeError):
    """No backend, or not the one that was asked for, can serve a call."""


class Backend(Protocol):
    """One way to compute attention; a module with these names is one.

    Attributes:
        name: By which calls ask for it.
        extras: The extras of a spec that it knows; it gets no call with another one.
        compiles: Whether Triton compiles its kernels when they are first needed.
    """

    name: str
    extras: frozenset[str]
    compiles: bool

    def why_not(self, spec: AttentionSpec, mask: CompiledMask) -> list[str]:
        """The reasons for which it cannot serve a call; empty when it can."""
        ...

    def auto_skip(self, spec: AttentionSpec, mask: CompiledMask) -> list[str]:
        """The reasons for which "auto" looks for another backend although this one can serve the
        call; empty when it is the fastest.
        """
        ...

    def block_size_for(self, spec: AttentionSpec, mask: CompiledMask) -> tuple[int, int]:
        """The block size, in tokens, of the table that it reads: that of the mask, or another one
        of the same elements.
        """
        ...

    def describe(
        self, call: Call, mask: CompiledMask, query: Tensor, key: Tensor, value: Tensor
    ) -> dict[str, str]:
        """How each pass of a call would run; empty when there is one way."""
        ...

    def forward(
        self, call: Call, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Attention of checked tensors.

        Returns:
            out (batch, heads, q_len, value_dim) in the dtype of query; lse natural-log float32
            (float64 for float64 inputs), (batch, heads, q_len), contiguous.
        """
        ...

    def backward(
        self, call: Call, grad_out: Tensor, grad_lse: Tensor | None, saved: Saved, needs: Needs
    ) -> Gradients:
        """The gradients of one call.

        Args:
            saved: query, key, value, out and lse.
            needs: Whether each of the gradients is wanted.

        Returns:
            The gradients of query, key, value, bias, blocks and score tensors, None where `needs`
            says no. That of the blocks is float32 (batch, heads, nq, nk): see masks.DynamicMask.
            That of the score tensors is one tensor for all: see ScoreTensors.new_sums.
        """
        ...
