"""The work and traffic of each rank under a context plan, as numbers, as text and as a plot."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from sparseflash.distributed.plan import ContextPlan


BLUE, ORANGE = "#0072B2", "#E69F00"  # of Okabe and Ito, for readers with colour blindness too


@dataclass(frozen=True)
class Report:
    """The work and traffic of each rank under a context plan.

    In the forward pass the ranks exchange keys and values, and for shared rows the queries, O and
    LSE. In the backward pass they return the gradients of keys and values, which have as many
    bytes, and fetch the keys and values again if round_tokens makes several rounds. For shared
    rows they exchange O, LSE, their gradients, and dQ.

    Attributes:
        strategy, split: Strategy and split of the plan.
        tokens: Number of tokens that each rank owns.
        blocks: Number of non-zero blocks that each rank computes, summed over heads of the mask.
        receive_bytes, send_bytes: Bytes that each rank receives and sends in a forward pass.
        backward_receive_bytes, backward_send_bytes: The same in a backward pass.
        copied_bytes: Bytes of keys and values that each rank copies in a forward pass: see
            ContextPlan.copied.
        shared_rows: Number of shared block rows.
        shared_bytes: The part of the bytes received by all ranks in a forward pass that belongs to
            shared rows.
        imbalance: Largest number of blocks of a rank over the mean.
        gathered_bytes: Bytes that each rank would receive if it fetched all keys and values, by an
            all-gather or ring attention.
        least_bytes: Lower bound of the mean bytes of keys and values that a rank receives, over
            all assignments with the same number of tokens for each rank. A row attends a given
            number of blocks, and a rank owns only its share of them.
    """

    strategy: str
    split: str
    tokens: list[int]
    blocks: list[int]
    receive_bytes: list[int]
    send_bytes: list[int]
    backward_receive_bytes: list[int]
    backward_send_bytes: list[int]
    copied_bytes: list[int]
    shared_rows: int
    shared_bytes: int
    imbalance: float
    gathered_bytes: list[int]
    least_bytes: int

    @property
    def share(self) -> float:
        """Bytes received over those of an all-gather or ring attention."""
        return sum(self.receive_bytes) / max(sum(self.gathered_bytes), 1)

    @property
    def least_share(self) -> float:
        """The lower bound `least_bytes` over the bytes of an all-gather or ring attention."""
        return self.least_bytes * len(self.tokens) / max(sum(self.gathered_bytes), 1)

    def __str__(self) -> str:
        lines = [f"{'rank':>5} {'tokens':>10} {'blocks':>12} {'receive MB':>11} {'send MB':>9}"]
        rows = zip(self.tokens, self.blocks, self.receive_bytes, self.send_bytes, strict=True)
        lines += [
            f"{rank:>5} {tokens:>10} {blocks:>12} {receive / 1e6:>11.2f} {send / 1e6:>9.2f}"
            for rank, (tokens, blocks, receive, send) in enumerate(rows)
        ]
        gathered = sum(self.gathered_bytes) / 1e6
        if self.shared_rows:
            lines.append(
                f"of these {self.shared_bytes / 1e6:.2f} MB are queries and results of "
                f"{self.shared_rows} shared block rows"
            )
        lines += [
            f"strategy {self.strategy}, split by {self.split}, imbalance {self.imbalance:.3f}",
            f"moves {sum(self.receive_bytes) / 1e6:.2f} MB, {self.share:.2%} of the "
            f"{gathered:.2f} MB of an all-gather or a ring",
        ]
        if any(self.copied_bytes):
            copied = sum(self.copied_bytes) / 1e6
            lines.append(f"copies {copied:.2f} MB of keys and values to send or to attend them")
        if self.least_bytes:
            least = self.least_bytes * len(self.tokens) / 1e6
            lines.append(f"equal shares of the sequence move at least {least:.2f} MB")
        return "\n".join(lines)

    def plot(self) -> "Figure":
        """Draws the blocks that each rank computes, and the bytes that it receives and sends.

        Returns:
            A matplotlib figure.
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 3), layout="constrained")
        compute, moved = figure.subplots(1, 2)
        ranks = range(len(self.blocks))
        compute.bar(ranks, self.blocks, color=BLUE)
        compute.axhline(sum(self.blocks) / len(self.blocks), color="black", lw=1, label="mean")
        compute.set(xlabel="rank", ylabel="non-zero blocks", title="Computed")
        compute.legend()
        gathered = [size / 1e6 for size in self.gathered_bytes]
        moved.step(ranks, gathered, where="mid", color="black", lw=1, label="all-gather, ring")
        for name, sizes, width, colour in (
            ("received", self.receive_bytes, 0.4, BLUE),
            ("sent", self.send_bytes, -0.4, ORANGE),
        ):
            heights = [size / 1e6 for size in sizes]
            moved.bar(ranks, heights, width, align="edge", color=colour, label=name)
        least = self.least_bytes / 1e6
        moved.axhline(least, color="black", lw=1, ls=":", label="least received on average")
        moved.legend(fontsize="small", ncols=2)
        moved.set_ylim(0, 1.3 * max(gathered) or 1)
        moved.set(xlabel="rank", ylabel="MB", title=f"Moved: {self.strategy}")
        return figure


def report_of(
    plan: "ContextPlan",
    batch: int,
    kv_heads: int,
    queries: int,
    dims: tuple[int, int],
    dtype: torch.dtype,
) -> Report:
    """The report of a plan.

    Args:
        plan: The plan.
        batch, kv_heads, dtype: Sizes and dtype of keys and values.
        queries: Batch elements times query heads.
        dims: Head dim and value dim.
    """
    head_dim, value_dim = dims
    mask, token_bytes = plan.workload.mask, batch * kv_heads * sum(dims) * dtype.itemsize
    groups, wide = plan.head_groups(kv_heads), torch.promote_types(dtype, torch.float32).itemsize
    traffic = plan.traffic(groups) * token_bytes // groups
    fetched, given = traffic.sum(1), traffic.sum(0)
    again = plan.fetches_again
    there, back = queries * head_dim * dtype.itemsize, queries * (value_dim + 1) * wide
    received, sent = (x.long() for x in plan.costs.moved_of_shared(there, back))
    there, back = 2 * back, queries * head_dim * wide
    returned, sent_back = (x.long() for x in plan.costs.moved_of_shared(there, back))
    tokens = plan.assignment.tokens.tolist()
    blocks = plan.costs.blocks.tolist()
    # Heads of a group fetch together, so a row fetches at least the keys of its densest head.
    parts = groups if mask.num_heads > 1 else 1
    of_heads = mask.blocks_per_row().unflatten(0, (parts, -1)).amax(1)
    mean_degree = float(of_heads.double().mean()) * mask.grid.bk
    least = max(mean_degree - plan.seq_len / plan.ranks, 0.0)
    return Report(
        strategy=plan.strategy,
        split=plan.split,
        tokens=tokens,
        blocks=blocks,
        receive_bytes=(fetched + received).tolist(),
        send_bytes=(given + sent).tolist(),
        backward_receive_bytes=(given + again * fetched + returned).tolist(),
        backward_send_bytes=(fetched + again * given + sent_back).tolist(),
        copied_bytes=(plan.copied(groups) * token_bytes // groups).tolist(),
        shared_rows=len(plan.shared),
        shared_bytes=int(received.sum()),
        imbalance=max(blocks) * plan.ranks / max(sum(blocks), 1),
        gathered_bytes=[(plan.seq_len - own) * token_bytes for own in tokens],
        least_bytes=int(least * token_bytes),
    )
