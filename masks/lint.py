"""Checks masks for likely defects. A finding names the defect, its cost and a change."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from masks._core.grid import BLOCK_SIDES
from masks._pattern import Pattern
from masks.analysis import receptive_field
from masks.analysis.counts import attended_pairs, computed_pairs, keys_per_query
from masks.analysis.graph import as_list
from masks.arguments import check_integer
from masks.block_mask import BlockMask

MAX_IMBALANCE = 4.0  # blocks in the longest row over the mean
MULTIPROCESSORS = 132  # of an H100 or H200
MIN_USEFUL_SHARE = 0.5  # attended pairs over computed ones
LARGE_BIT_TILES = 4 << 20  # bytes: as many as K and V of 8192 tokens of 128 dims in bfloat16
SHOWN_RANGES = 4  # of the layers, heads or tokens of a finding


@dataclass(frozen=True)
class Finding:
    """One likely defect of a mask.

    Attributes:
        rule: The rule that found it, one of RULES.
        layers: The layers, from 0, whose masks have the defect.
        heads: The heads, from 0; empty if the defect is one of the whole layer.
        what: The defect, with numbers.
        cost: What the defect costs.
        change: A change that removes it.
    """

    rule: str
    layers: tuple[int, ...]
    heads: tuple[int, ...]
    what: str
    cost: str
    change: str

    def __str__(self) -> str:
        where = [
            f"{name} {_ranges_text(numbers)}"
            for name, numbers in (("layer", self.layers), ("head", self.heads))
            if numbers
        ]
        lines = (f"{self.rule} ({', '.join(where)}): {self.what}", self.cost, self.change)
        return "\n  ".join(map("".join, zip(("", "costs: ", "change: "), lines, strict=True)))


def lint(
    masks: BlockMask | Sequence[BlockMask],
    *,
    within: Pattern | None = None,
    layers: int | None = None,
    ignore: Sequence[str] = (),
) -> list[Finding]:
    """Checks the masks of a model for likely defects.

    Args:
        masks: One mask for all layers, or a list with one for each layer from the input on.
        within: A pattern that contains all pairs that may attend, such as causal(). None skips
            the rule "leaks".
        layers: Number of layers of the model, for the rule "dead-layers". By default the number
            of masks. A single mask skips this rule by default.
        ignore: Names of rules to skip.

    Returns:
        The findings in the order of RULES: certain errors first.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: `ignore` has an unknown rule, there are no masks, lengths differ, or `layers`
            is below 1.
    """
    if within is not None and not isinstance(within, Pattern):
        raise TypeError(f"within must be a Pattern or None, got {within!r}")
    if isinstance(ignore, str) or not isinstance(ignore, Sequence):
        raise TypeError(f"ignore must be a list of rules, got {ignore!r}")
    if unknown := [rule for rule in ignore if rule not in [*RULES]]:
        raise ValueError(f"ignore must be a list of rules in {[*RULES]}, got {unknown}")
    given = as_list(masks)
    if layers is not None:
        layers = check_integer("layers", layers, least=1)
    elif not isinstance(masks, BlockMask):
        layers = len(given)
    context = _Context(given, within, layers)
    return [
        Finding(rule, *fields)
        for rule, find in RULES.items()
        if rule not in ignore
        for fields in find(context)
    ]


@dataclass(frozen=True)
class _Context:
    """What rules check: the masks, the pattern that contains them, and the number of layers."""

    masks: list[BlockMask]
    within: Pattern | None
    layers: int | None

    def distinct(self) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], BlockMask]]:
        """(layers, heads, mask of one head) for each distinct mask of a head of a layer."""
        for layers, mask in self.by_layer():
            for heads in _heads_of_masks(mask):
                yield layers, heads if mask.num_heads > 1 else (), mask.head(heads[0])

    def by_layer(self) -> list[tuple[tuple[int, ...], BlockMask]]:
        """(layers, mask) for each distinct mask of a layer."""
        layers: dict[BlockMask, list[int]] = {}
        for layer, mask in enumerate(self.masks):
            layers.setdefault(mask, []).append(layer)
        return [(tuple(at), mask) for mask, at in layers.items()]


_Fields = tuple[tuple[int, ...], tuple[int, ...], str, str, str]  # a Finding without its rule


def _heads_of_masks(mask: BlockMask) -> list[tuple[int, ...]]:
    """The heads of each distinct mask."""
    return [
        tuple(h for h, own in enumerate(mask.head_to_mask) if own == number)
        for number in range(mask.num_masks)
    ]


def _empty_queries(context: _Context) -> Iterator[_Fields]:
    for layers, heads, mask in context.distinct():
        empty = keys_per_query(mask)[0] == 0
        if bool(empty.any()):
            yield (
                layers,
                heads,
                f"{int(empty.sum()):,} of {len(empty):,} queries have no key: "
                f"{_token_list(empty)}",
                "their output is 0, and they have no gradient",
                "add a pattern with the diagonal, as in `... | local(0)`",
            )


def _leaks(context: _Context) -> Iterator[_Fields]:
    if context.within is None:
        return
    for layers, heads, mask in context.distinct():
        outside = mask - context.within(mask.seq_len, mask.block_size, mask.device)
        if outside.nnz_blocks:
            keys = keys_per_query(outside)[0]
            query = int((keys > 0).nonzero()[0])
            row = outside.slice_queries(query, query + 1).to_dense()[0]
            yield (
                layers,
                heads,
                f"{int(keys.sum()):,} pairs are outside of {context.within}, the first at query "
                f"{query} and key {int(row.nonzero()[0])}",
                "the model attends forbidden pairs; a language model would see its own targets",
                f"`... & {context.within}`",
            )


def _unreachable_keys(context: _Context) -> Iterator[_Fields]:
    for layers, mask in context.by_layer():
        unseen = (keys_per_query(mask.T) == 0).all(0)
        if bool(unseen.any()):
            yield (
                layers,
                (),
                f"no query of any head attends {int(unseen.sum()):,} of {len(unseen):,} keys: "
                f"{_token_list(unseen)}",
                "no query reads these tokens in this layer: their K and V are not needed",
                "add global_tokens or a window, or remove these tokens from the keys",
            )


def _long_rows(context: _Context) -> Iterator[_Fields]:
    for layers, heads, mask in context.distinct():
        for side, rows, passes in (
            ("query", mask.blocks_per_row()[0], "forward and dQ"),
            ("key", mask.T.blocks_per_row()[0], "dK and dV"),
        ):
            mean = float(rows.double().mean())
            most = int(rows.max())
            if mean == 0 or most <= MAX_IMBALANCE * mean:
                continue
            long = rows > MAX_IMBALANCE * mean
            bound = most * MULTIPROCESSORS / float(rows.sum())
            yield (
                layers,
                heads,
                f"{int(long.sum()):,} of {len(rows):,} rows of {side} blocks have more than "
                f"{MAX_IMBALANCE:g} times the mean of {mean:.1f} blocks, the longest {most:,}",
                f"in {passes} the longest row takes as long as all others together if fewer than "
                f"{bound:.1f} (batch, head) pairs share {MULTIPROCESSORS} multiprocessors",
                "use fewer global tokens, or compute them in a separate call and merge both",
            )


def _useless_pairs(context: _Context) -> Iterator[_Fields]:
    for layers, heads, mask in context.distinct():
        computed, attended = computed_pairs(mask), attended_pairs(mask)
        if not attended or attended >= MIN_USEFUL_SHARE * computed:
            continue
        smaller = [
            side
            for side in BLOCK_SIDES
            if side <= min(mask.block_size) and (side, side) != mask.block_size
        ]
        change = "order the tokens so that those that attend each other are neighbours"
        if smaller:
            shares = {side: attended / computed_pairs(mask.reblock(side)) for side in smaller}
            best = max(shares, key=lambda side: (shares[side], side))
            if shares[best] > 1.2 * attended / computed:
                change = f"blocks of {best}, in which {shares[best]:.0%} are useful; or {change}"
        yield (
            layers,
            heads,
            f"{attended / computed:.1%} of {computed:,} computed pairs attend",
            f"{computed / attended:.1f} times the FLOPs that the pattern needs",
            change,
        )


def _many_bit_tiles(context: _Context) -> Iterator[_Fields]:
    for layers, mask in context.by_layer():
        nbytes = mask.block_set.bit_tiles.numel() * 4
        if nbytes > LARGE_BIT_TILES:
            yield (
                layers,
                (),
                f"{mask.num_bit_tiles:,} distinct bit tiles of {mask.partial_blocks:,} partial "
                f"blocks take {nbytes / 2**20:.1f} MiB",
                "every pass reads them, from device memory if they do not fit into L2",
                "use a rule that repeats from block to block, whose blocks share bit tiles, or "
                "round it to blocks with block_pattern",
            )


def _equal_heads(context: _Context) -> Iterator[_Fields]:
    for layers, mask in context.by_layer():
        for heads in _heads_of_masks(mask):
            if mask.num_heads > 1 and len(heads) > 1:
                yield (
                    layers,
                    heads,
                    f"{len(heads)} of {mask.num_heads} heads have equal masks",
                    "no time or memory, but together they have the receptive field of one of them",
                    "use other seeds, strides or windows for some of them",
                )


def _dead_layers(context: _Context) -> Iterator[_Fields]:
    if context.layers is None or context.masks[0].seq_len != context.masks[0].seq_len[::-1]:
        return
    given = context.masks[0] if len(context.masks) == 1 else context.masks
    field = receptive_field(given, context.layers)
    until = field.full_after or context.layers
    added = (*field.added, *(False,) * (context.layers - field.layers))
    dead = tuple(layer for layer in range(until) if not added[layer])
    if dead:
        yield (
            dead,
            (),
            f"{len(dead)} of {context.layers} layers connect no pair that was not connected "
            f"before; {field.share[-1]:.2%} of the pairs are connected at the end",
            "the time of these layers; the receptive field does not grow",
            "use another pattern in these layers, such as far tokens after near tokens",
        )


RULES: dict[str, Callable[[_Context], Iterator[_Fields]]] = {
    "empty-queries": _empty_queries,
    "leaks": _leaks,
    "unreachable-keys": _unreachable_keys,
    "long-rows": _long_rows,
    "useless-pairs": _useless_pairs,
    "many-bit-tiles": _many_bit_tiles,
    "equal-heads": _equal_heads,
    "dead-layers": _dead_layers,
}


def _token_list(chosen: Tensor) -> str:
    return _ranges_text(torch.where(chosen)[0].tolist())


def _ranges_text(numbers: Sequence[int]) -> str:
    """0-3, 7, ...: the first SHOWN_RANGES ranges of consecutive numbers."""
    groups = groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    ranges = [[number for _, number in group] for _, group in groups]
    shown = [f"{r[0]}-{r[-1]}" if len(r) > 1 else str(r[0]) for r in ranges[:SHOWN_RANGES]]
    return ", ".join([*shown, "..."] if len(ranges) > SHOWN_RANGES else shown)
