"""The protocol of backends. A backend is one implementation of both passes."""

from collections.abc import Hashable
from typing import Protocol

from torch import Tensor

from masks.lookup_table import LookupTable
from masks.mask_batch import CompiledMask
from sparseflash.dispatch.call import Call, Gradients, Needs, Saved
from sparseflash.dispatch.spec import AttentionSpec


class BackendError(RuntimeError):
    """No backend can compute a call, or the backend that was named cannot.

    The message lists the reasons of each backend. It is raised before any kernel is launched.
    """


class Backend(Protocol):
    """One implementation of attention: a module that defines these names.

    Attributes:
        name: The name by which a call selects it.
        extras: The extras that it supports; it gets no call with any other extra.
        compiles: Whether Triton compiles its kernels when they are first needed.
    """

    name: str
    extras: frozenset[str]
    compiles: bool

    def why_not(self, spec: AttentionSpec, mask: CompiledMask) -> list[str]:
        """The reasons for which the backend cannot compute a call; empty if it can."""
        ...

    def auto_skip(self, spec: AttentionSpec, mask: CompiledMask) -> list[str]:
        """The reasons for which "auto" skips the backend; empty if it is the fastest one."""
        ...

    def block_size_for(self, spec: AttentionSpec, mask: CompiledMask) -> tuple[int, int]:
        """The block size (bq, bk), in tokens, of the table that the backend reads.

        If it differs from that of the mask, the mask is re-blocked: the same pairs attend.
        """
        ...

    def forward_block_size_for(self, spec: AttentionSpec, mask: CompiledMask) -> tuple[int, int]:
        """The block size (bq, bk), in tokens, of the table that its forward pass reads."""
        ...

    def describe(
        self, call: Call, mask: CompiledMask, query: Tensor, key: Tensor, value: Tensor
    ) -> dict[str, str]:
        """How the backend would run a call, as text by subject; empty if it has no choice."""
        ...

    def compiled_for(self, spec: AttentionSpec, table: LookupTable) -> tuple[Hashable, ...]:
        """The properties of a table for which other kernels are compiled; empty if none are."""
        ...

    def computes_in_place(self, spec: AttentionSpec) -> bool:
        """Whether calls may have `more` and `results`, if the table has the blocks of the mask.

        Then no row without a block is written if spec.skips_empty_rows.
        """
        ...

    def forward(
        self, call: Call, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Computes attention of checked tensors.

        Returns:
            out (batch, heads, q_len, value_dim) in the dtype of query, and lse (batch, heads,
            q_len), a natural logarithm in float32 (float64 for float64 inputs), contiguous.
        """
        ...

    def backward(
        self, call: Call, grad_out: Tensor, grad_lse: Tensor | None, saved: Saved, needs: Needs
    ) -> Gradients:
        """The gradients of one call.

        Args:
            saved: query, key, value, out and lse.
            needs: Whether each of the gradients is needed.

        Returns:
            The gradients of query, key, value, bias, blocks and score tensors, None if `needs` is
            False. That of the blocks is float32 (batch, heads, nq, nk): see masks.DynamicMask.
            That of the score tensors is one tensor for all: see ScoreTensors.zero_gradient.
        """
        ...
