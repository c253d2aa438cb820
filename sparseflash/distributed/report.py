"""What a context plan asks of its ranks, as numbers, as text and as a plot."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from sparseflash.distributed.plan import ContextPlan


@dataclass(frozen=True)
class Report:
    """Bytes are those of the keys and values that one forward pass moves.

    The backward pass returns as many bytes of gradients; where there are several rounds it also
    fetches the keys and values again.

    Attributes:
        strategy, split: Those of the plan.
        tokens: Tokens that each rank owns.
        blocks: Non-zero blocks that each rank computes, summed over heads of the mask.
        receive_bytes, send_bytes: Of each rank.
        shared_rows: Block rows that all ranks share. Their queries and results travel beside these
            bytes.
        imbalance: Most blocks of a rank over the mean.
        gathered_bytes: What each rank would receive if it got all keys and values, by an
            all-gather or around a ring: these move the same bytes.
        least_bytes: No assignment of as many tokens to every rank receives less on average: a row
            attends so many blocks, and a rank owns so few.
    """

    strategy: str
    split: str
    tokens: list[int]
    blocks: list[int]
    receive_bytes: list[int]
    send_bytes: list[int]
    shared_rows: int
    imbalance: float
    gathered_bytes: list[int]
    least_bytes: int

    @property
    def share(self) -> float:
        """Bytes moved over those of an all-gather or a ring."""
        return sum(self.receive_bytes) / max(sum(self.gathered_bytes), 1)

    def __str__(self) -> str:
        lines = [f"{'rank':>5} {'tokens':>10} {'blocks':>12} {'receive MB':>11} {'send MB':>9}"]
        rows = zip(self.tokens, self.blocks, self.receive_bytes, self.send_bytes, strict=True)
        lines += [
            f"{rank:>5} {tokens:>10} {blocks:>12} {receive / 1e6:>11.2f} {send / 1e6:>9.2f}"
            for rank, (tokens, blocks, receive, send) in enumerate(rows)
        ]
        gathered = sum(self.gathered_bytes) / 1e6
        if self.shared_rows:
            lines.append(f"and queries and results of {self.shared_rows} shared block rows")
        return "\n".join(
            [
                *lines,
                f"strategy {self.strategy}, split by {self.split}, imbalance {self.imbalance:.3f}",
                f"moves {sum(self.receive_bytes) / 1e6:.2f} MB, {self.share:.2%} of the "
                f"{gathered:.2f} MB of an all-gather or a ring",
                f"equal shares of the sequence move at least "
                f"{self.least_bytes * len(self.tokens) / 1e6:.2f} MB",
            ]
        )

    def plot(self) -> "Figure":
        """Blocks, and bytes received and sent, of every rank."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 3), layout="constrained")
        compute, moved = figure.subplots(1, 2)
        ranks = range(len(self.blocks))
        compute.bar(ranks, self.blocks, color="tab:blue")
        compute.axhline(sum(self.blocks) / len(self.blocks), color="black", lw=1, label="mean")
        compute.set(xlabel="rank", ylabel="non-zero blocks", title="Computed")
        compute.legend()
        gathered = [size / 1e6 for size in self.gathered_bytes]
        moved.step(ranks, gathered, where="mid", color="black", lw=1, label="all-gather, ring")
        moved.bar(ranks, [size / 1e6 for size in self.receive_bytes], 0.4, align="edge")
        moved.bar(ranks, [size / 1e6 for size in self.send_bytes], -0.4, align="edge")
        moved.legend(["all-gather, ring", "received", "sent"])
        moved.set(xlabel="rank", ylabel="MB", title=f"Moved: {self.strategy}")
        return figure


def report_of(plan: "ContextPlan", token_bytes: int, groups: int) -> Report:
    """The report of a plan whose keys and values take `token_bytes` bytes a token, of heads that
    are fetched in `groups`.
    """
    mask, traffic = plan.mask, plan.traffic(groups) * token_bytes // groups
    tokens = [len(plan.positions(rank)) for rank in range(plan.ranks)]
    blocks = plan.costs.blocks.tolist()
    # Heads of a group share what is fetched, so a row fetches at least what the densest attends.
    parts = groups if mask.num_heads > 1 else 1
    of_heads = mask.blocks_per_row().unflatten(0, (parts, -1)).amax(1)
    mean_degree = float(of_heads.double().mean()) * mask.grid.bk
    least = max(mean_degree - plan.seq_len / plan.ranks, 0.0)
    return Report(
        strategy=plan.strategy,
        split=plan.split,
        tokens=tokens,
        blocks=blocks,
        receive_bytes=traffic.sum(1).tolist(),
        send_bytes=traffic.sum(0).tolist(),
        shared_rows=len(plan.shared),
        imbalance=max(blocks) * plan.ranks / max(sum(blocks), 1),
        gathered_bytes=[(plan.seq_len - own) * token_bytes for own in tokens],
        least_bytes=int(least * token_bytes),
    )
