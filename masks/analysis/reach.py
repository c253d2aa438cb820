"""Receptive fields: which tokens are connected after each layer of a model."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from masks.analysis.graph import TokenGraph, as_list, is_causal, token_graph
from masks.arguments import check_integer, check_integers
from masks.block_mask import BlockMask
from masks.progress import Progress, late_bar

DEFAULT_LAYERS = 32  # of a model with a single mask
MAX_LAYERS = 1 << 16
FOLLOWED_CLASSES = 1 << 15  # with more classes, keys are sampled
SAMPLES = 512
CONFIDENCE = 0.95
STATE_WORDS = 1 << 24  # 64-bit words of a state of propagation: 128 MiB
COUNTED_AT_ONCE = 1 << 24  # bits


@dataclass(frozen=True)
class ReceptiveField:
    """Connected pairs after each of `layers` layers. All counts are of tokens or of layers.

    Attributes:
        seq_len: Length of the sequence, in tokens.
        classes: Number of classes of tokens.
        layers: Layers that were computed. Fewer than asked for if further ones add no pair.
        causal: Whether shares are relative to the pairs with key <= query, not to all pairs.
        share: Share of the pairs that are connected after 1, 2, ..., `layers` layers. A token is
            connected with itself.
        interval: The 95 % confidence interval (low, high) of each share. If `exact`, both are the
            share.
        exact: Whether all keys were followed, not a sample of them.
        followed: Number of keys that were followed.
        full_after: Least number of layers after which all pairs of the followed keys are
            connected; None if they never are.
        added: Whether each layer connects pairs that were not connected before it.
        mean_path: Mean hops of the connected pairs of two different tokens; None without such
            pairs.
        longest_path: Most hops of a connected pair.
        unreached: Tokens that no other token attends in any layer.
        blind: Tokens that attend no other token in any layer.
    """

    seq_len: int
    classes: int
    layers: int
    causal: bool
    share: tuple[float, ...]
    interval: tuple[tuple[float, float], ...]
    exact: bool
    followed: int
    full_after: int | None
    added: tuple[bool, ...]
    mean_path: float | None
    longest_path: int
    unreached: int
    blind: int


def receptive_field(
    masks: BlockMask | Sequence[BlockMask],
    layers: int | None = None,
    *,
    samples: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> ReceptiveField:
    """The share of pairs of tokens that are connected after each layer, and their hops.

    R_l = R_{l-1} or A_l (I or R_{l-1}), a boolean matrix product; R_0 = 0. A_l has the pairs that
    any head of layer l attends.

    The result is exact to the pair with up to 32,768 classes of tokens, as for 1M tokens in full
    blocks of 128 or any mask of 32K tokens. Otherwise keys are drawn at random, and the interval
    of each share is an empirical Bernstein bound.

    Args:
        masks: One square mask for all layers, or a list with one for each layer from the input
            on.
        layers: Number of layers, 1 to 65,536. By default the number of masks, or 32 for a single
            mask.
        samples: Number of keys to draw. By default all keys up to 32,768 classes, else 512.
        seed: Seed of the random numbers.
        progress: Called with (steps done, most steps) after each step. By default a bar is shown
            on the standard error after two seconds.

    Returns:
        The receptive field.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: Masks are not square or differ in length, or a number is out of range.

    Reference:
        Maurer and Pontil 2009, Empirical Bernstein bounds and sample variance penalization.
    """
    stack = _stack_of(masks, layers)
    seed = check_integer("seed", seed, least=0)
    graph = token_graph(stack)
    causal = is_causal(stack)
    keys, weight = _keys_to_follow(graph, samples, seed, causal)
    exact = weight is not None
    with late_bar("following tokens") as bar:
        shown = bar if progress is None else progress
        count = _connected(graph, graph.class_of_token[keys], shown)
    visible = graph.tokens - keys if causal else np.full(len(keys), graph.tokens)
    complete = np.flatnonzero((count >= visible).all(1))
    if weight is None:
        seen = count / visible
        deviation = _bernstein(seen) * [[-1], [0], [1]]
        low, share, high = np.clip(seen.mean(1) + deviation, 0, 1)
        weight = 1 / visible
    else:
        mean = (graph.tokens + causal) / (1 + causal)  # queries that may see a key
        share = low = high = (count * weight).sum(1) / (mean * graph.tokens)
    added_pairs = (np.diff(count, axis=0, prepend=1) * weight).sum(1)
    hops_of = np.arange(1, len(count) + 1)
    seeing, attended = _connected_to_others(graph)
    return ReceptiveField(
        seq_len=graph.tokens,
        classes=graph.classes,
        layers=len(count),
        causal=causal,
        share=tuple(share.tolist()),
        interval=tuple(zip(low.tolist(), high.tolist(), strict=True)),
        exact=exact,
        followed=graph.tokens if exact else len(keys),
        full_after=int(complete[0]) + 1 if len(complete) else None,
        added=tuple((added_pairs > 0).tolist()),
        mean_path=float(added_pairs @ hops_of / added_pairs.sum()) if added_pairs.any() else None,
        longest_path=int(hops_of[added_pairs > 0].max(initial=0)),
        unreached=int(graph.weight[~attended].sum()),
        blind=int(graph.weight[~seeing].sum()),
    )


def hops(
    masks: BlockMask | Sequence[BlockMask],
    tokens: Sequence[int],
    layers: int | None = None,
    *,
    seen_by: bool = False,
) -> np.ndarray:
    """The number of hops from each of `tokens` to every token of the sequence.

    Args:
        masks, layers: As in receptive_field.
        tokens: Indices of queries after the last layer.
        seen_by: Whether `tokens` are keys before the first layer instead. Then the hops are those
            from every token to them.

    Returns:
        int32 (len(tokens), seq_len): 0 for the token itself, -1 for a token that is not connected.
        Hops count layers from the last one down, or with `seen_by` from the first one up.

    Raises:
        TypeError, ValueError: As in receptive_field, or a token is outside the sequence.
    """
    stack = _stack_of(masks, layers)
    if not seen_by:
        transposed = {mask: mask.T for mask in dict.fromkeys(stack)}
        stack = [transposed[mask] for mask in reversed(stack)]
    tokens = check_integers("tokens", tokens, least=0)
    if not tokens or max(tokens) >= stack[0].seq_len[0]:
        raise ValueError(f"tokens must be from 0 to {stack[0].seq_len[0] - 1}, got {tokens}")
    graph = token_graph(stack)
    hops_of_class = np.full((len(tokens), graph.classes), -1, dtype=np.int32)
    for layer, bits in enumerate(_states(graph, graph.class_of_token[tokens]), 1):
        seen = _unpacked(bits)[:, : len(tokens)].T.astype(bool)
        hops_of_class[seen & (hops_of_class < 0)] = layer
    hops_of_token = hops_of_class[:, graph.class_of_token]
    hops_of_token[np.arange(len(tokens)), tokens] = 0
    return hops_of_token


@dataclass(frozen=True)
class PixelReach:
    """The receptive field of a pixel after 1, 2, ... layers, in pixels.

    Attributes:
        up, down, left, right: Distance to the farthest connected row or column on that side.
        radius: Largest r such that all pixels within r rows and r columns are connected; at most
            the distance to the farthest pixel.
        share: Share of the pixels of the image that are connected.
    """

    up: tuple[int, ...]
    down: tuple[int, ...]
    left: tuple[int, ...]
    right: tuple[int, ...]
    radius: tuple[int, ...]
    share: tuple[float, ...]


def pixel_reach(
    masks: BlockMask | Sequence[BlockMask],
    image: tuple[int, int],
    layers: int | None = None,
    *,
    tile: tuple[int, int] | None = None,
    pixel: tuple[int, int] | None = None,
) -> PixelReach:
    """The receptive field of a pixel of an image whose pixels are the tokens.

    Args:
        masks, layers: As in receptive_field, with as many tokens as pixels.
        image: (height, width) of the image, in pixels.
        tile: (height, width) of a tile, in pixels; it divides the image. Tokens run tile by tile,
            and row by row within a tile. By default they run row by row through the image.
        pixel: (row, column) of the pixel. By default the middle of the image.

    Returns:
        The receptive field of the pixel.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: Sizes do not fit, or the pixel is outside the image.
    """
    stack = _stack_of(masks, layers)
    height, width = _check_pair("image", image, least=1)
    if height * width != stack[0].seq_len[0]:
        raise ValueError(
            f"image must have {stack[0].seq_len[0]} pixels like the mask, got {height} x {width}"
        )
    row, column = (height // 2, width // 2) if pixel is None else _check_pair("pixel", pixel)
    if not (0 <= row < height and 0 <= column < width):
        raise ValueError(f"pixel must be in an image of {height} x {width}, got {pixel}")
    order = pixels_in_order(height, width, (1, width) if tile is None else tile)
    token = int(np.flatnonzero(order == row * width + column)[0])
    hop_count = hops(stack, [token])[0]
    offset = np.stack([order // width - row, order % width - column])
    distance = np.abs(offset).max(0)
    seen_after = [(hop_count >= 0) & (hop_count <= layer) for layer in range(1, len(stack) + 1)]

    def farthest(axis: int, sign: int) -> tuple[int, ...]:
        return tuple(int((sign * offset[axis][seen]).max()) for seen in seen_after)

    return PixelReach(
        up=farthest(0, -1),
        down=farthest(0, 1),
        left=farthest(1, -1),
        right=farthest(1, 1),
        radius=tuple(int(distance[~s].min(initial=distance.max() + 1)) - 1 for s in seen_after),
        share=tuple(float(seen.mean()) for seen in seen_after),
    )


def _check_pair(name: str, sizes: tuple[int, int], least: int = 0) -> list[int]:
    numbers = check_integers(name, sizes, least)
    if len(numbers) != 2:
        raise ValueError(f"{name} must be two integers, got {sizes}")
    return numbers


def pixels_in_order(height: int, width: int, tile: tuple[int, int]) -> np.ndarray:
    """row * width + column of the pixel of each token: int64 (height * width,).

    Args:
        height, width: Sizes of the image, in pixels.
        tile: (height, width) of a tile. Tokens run tile by tile.

    Raises:
        ValueError: `tile` does not divide the image.
    """
    down, right = _check_pair("tile", tile, least=1)
    if height % down or width % right:
        raise ValueError(f"tile must divide an image of {height} x {width}, got {tile}")
    pixels = np.arange(height * width).reshape(height // down, down, width // right, right)
    return pixels.transpose(0, 2, 1, 3).ravel()


def _stack_of(masks: BlockMask | Sequence[BlockMask], layers: int | None) -> list[BlockMask]:
    """The mask of each layer."""
    given = as_list(masks)
    if layers is None:
        layers = DEFAULT_LAYERS if isinstance(masks, BlockMask) else len(given)
    layers = check_integer("layers", layers, least=1, most=MAX_LAYERS)
    return [given[layer % len(given)] for layer in range(layers)]


def _keys_to_follow(
    graph: TokenGraph, samples: int | None, seed: int, causal: bool
) -> tuple[np.ndarray, np.ndarray | None]:
    """(one token of each class, tokens of each class); or (random tokens, None).

    Keys are drawn with a probability in proportion to the number of queries that may attend them.
    So the mean of their shares estimates the share of all pairs.
    """
    if samples is None and graph.classes <= FOLLOWED_CLASSES:
        return np.unique(graph.class_of_token, return_index=True)[1], graph.weight
    samples = SAMPLES if samples is None else check_integer("samples", samples, least=2)
    if samples >= graph.tokens:
        return np.unique(graph.class_of_token, return_index=True)[1], graph.weight
    may_see = np.arange(graph.tokens, 0, -1.0) if causal else np.ones(graph.tokens)
    drawn = np.random.default_rng(seed).choice(graph.tokens, samples, p=may_see / may_see.sum())
    return np.sort(drawn), None


def _states(graph: TokenGraph, followed: np.ndarray) -> Iterator[np.ndarray]:
    """After each layer uint64 (classes, words): bit i is set if a class is connected to
    followed[i].

    At least one hop counts. The iteration ends early if all masks are the same object and a layer
    adds nothing.
    """
    words = -(-len(followed) // 64)
    own_bits = np.zeros((graph.classes, words), dtype=np.uint64)
    number = np.arange(len(followed))
    bit = np.uint64(1) << (number % 64).astype(np.uint64)
    np.bitwise_or.at(own_bits, (followed, number // 64), bit)
    bits = np.zeros_like(own_bits)
    repeated = len(set(map(id, graph.layers))) == 1
    for layer in graph.layers:
        after = bits | layer.attended_bits(bits | own_bits)
        if repeated and np.array_equal(after, bits):
            return
        bits = after
        yield bits


def _connected(graph: TokenGraph, followed: np.ndarray, progress: Progress) -> np.ndarray:
    """The tokens connected to each followed class, itself included: (layers, followed)."""
    at_once = 64 * max(1, STATE_WORDS // graph.classes)
    parts = [followed[i : i + at_once] for i in range(0, len(followed), at_once)]
    steps = len(graph.layers)
    counts = []
    for done, part in enumerate(parts):
        rows = [np.ones(len(part))]
        for layer, bits in enumerate(_states(graph, part), 1):
            rows.append(_count_queries(graph, bits, part))
            progress(done * steps + layer, len(parts) * steps)
        counts.append(rows[1:] or rows)
        progress((done + 1) * steps, len(parts) * steps)
    longest = max(map(len, counts))
    return np.concatenate(
        [np.stack(rows + rows[-1:] * (longest - len(rows))) for rows in counts], axis=1
    )


def _count_queries(graph: TokenGraph, bits: np.ndarray, followed: np.ndarray) -> np.ndarray:
    at_once = min(1 << 15, max(1, COUNTED_AT_ONCE // (64 * bits.shape[1])))
    total = np.zeros(64 * bits.shape[1])
    for i in range(0, graph.classes, at_once):
        # Sums of at most 2**15 weights of at most 512 tokens are exact in float32.
        weight = graph.weight[i : i + at_once].astype(np.float32)
        total += weight @ _unpacked(bits[i : i + at_once]).astype(np.float32)
    number = np.arange(len(followed))
    sees_itself = bits[followed, number // 64] >> (number % 64).astype(np.uint64) & np.uint64(1)
    return total[: len(followed)] + (sees_itself == 0)


def _unpacked(bits: np.ndarray) -> np.ndarray:
    """uint64 (rows, words) -> uint8 (rows, 64 * words)."""
    octets = np.ascontiguousarray(bits.astype("<u8")).view(np.uint8)
    return np.unpackbits(octets, axis=1, bitorder="little")


def _connected_to_others(graph: TokenGraph) -> tuple[np.ndarray, np.ndarray]:
    """(attends another token in any layer, is attended by another token), each bool (classes,)."""
    layers = {id(layer): layer for layer in graph.layers}.values()
    ones = graph.weight.astype(np.float64)
    seeing = [layer.attended_sums(ones) > layer.attends_itself for layer in layers]
    seen = [layer.attending_sums(ones) > layer.attends_itself for layer in layers]
    return np.any(seeing, axis=0), np.any(seen, axis=0)


def _bernstein(values: np.ndarray) -> np.ndarray:
    """Half-widths (layers,) of confidence intervals of the means of values (layers, samples)."""
    n, log = values.shape[1], np.log(4 / (1 - CONFIDENCE))
    return np.sqrt(2 * values.var(1, ddof=1) * log / n) + 7 * log / (3 * (n - 1))
