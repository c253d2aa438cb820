"""The algorithms of the FlashAttention paper, step by step, with every memory access counted.

One head, in float64. Fast memory has space for M elements. All tensors are in slow memory. An
access is an element that is read from or written to slow memory. As in the paper, masks and random
numbers are not counted. For N queries and N keys of d dims the numbers of accesses are

    Algorithm 0, standard attention              4 N d + 4 N^2
    Algorithm 3, its backward pass               8 N d + 7 N^2
    Algorithms 1 and 2, FlashAttention           3 N d + 2 N + T_c (3 N d + 4 N)
    Algorithm 4, its backward pass               7 N d + T_c (5 N d + 2 N)
    Algorithm 5, block-sparse FlashAttention     3 N d + 2 N + s T_c (3 N d + 4 N)
    FlashAttention-2, tiles of queries outside   2 N d + N + s T_r 2 N d

with T_c = N / B_c, T_r = N / B_r and B_c = ceil(M / 4d): Theorems 2 and 5 and Proposition 4 with
their constants.

Reference:
    Dao, Fu, Ermon, Rudra, Ré, "FlashAttention", 2022.
"""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from masks import BlockMask
from masks.arguments import check_dtype, check_floating, check_integer, check_integers
from sparseflash.dropout import keep_mask, keep_probability

ALL = slice(None)
Tiles = tuple[int, int]  # (B_r, B_c): queries and keys of a tile
AfterBlock = Callable[[int, int, "SlowMemory"], None]


class SlowMemory:
    """Tensors by name, with counts of the elements that are read from and written to them.

    `memory[name]` is the tensor; reading it in this way is not counted.
    """

    def __init__(self, **tensors: Tensor):
        self.tensors = {name: tensor.double() for name, tensor in tensors.items()}
        self.reads = self.writes = 0

    @property
    def accesses(self) -> int:
        """The number of elements that were read and written."""
        return self.reads + self.writes

    def read(self, name: str, rows: slice = ALL) -> Tensor:
        """Reads some rows; returns a copy in fast memory."""
        rows_read = self.tensors[name][rows].clone()
        self.reads += rows_read.numel()
        return rows_read

    def write(self, name: str, value: Tensor, rows: slice = ALL) -> None:
        """Writes some rows; writing all rows makes a new tensor."""
        self.writes += value.numel()
        if rows == ALL:
            self.tensors[name] = value.clone()
        else:
            self.tensors[name][rows] = value

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]


def tile_sizes(fast_memory: int, head_dim: int) -> Tiles:
    """The tile size (B_r, B_c) for a fast memory: B_c = ceil(M / 4d), B_r = min(B_c, d).

    Then four tiles (B x d) of Q, K, V and O have M elements, and S (B_r x B_c) a quarter of M.

    Args:
        fast_memory: M, in elements, from d to N d.
        head_dim: d.

    Returns:
        (B_r, B_c), queries and keys of a tile.

    Raises:
        TypeError: An argument is not an integer.
        ValueError: M is less than d, so a row does not fit in fast memory.

    Reference:
        Algorithm 1, line 1.
    """
    fast_memory = check_integer("fast_memory", fast_memory)
    head_dim = check_integer("head_dim", head_dim, least=1)
    if fast_memory < head_dim:
        raise ValueError(
            f"fast_memory must be at least head_dim, {head_dim} elements, got {fast_memory}"
        )
    keys = -(-fast_memory // (4 * head_dim))
    return min(keys, head_dim), keys


def standard_forward(query: Tensor, key: Tensor, value: Tensor, scale: float = 1.0) -> SlowMemory:
    """Standard attention: S = scale Q K^T, P = softmax(S), O = P V, each through slow memory.

    Accesses: 2Nd + N^2, then 2 N^2, then N^2 + 2Nd.

    Args:
        query: (q_len, head_dim).
        key, value: (k_len, head_dim).
        scale: Factor of the scores.

    Returns:
        Slow memory with S, P and O.

    Reference:
        Algorithm 0.
    """
    memory = SlowMemory(Q=query, K=key, V=value)
    memory.write("S", scale * memory.read("Q") @ memory.read("K").T)
    memory.write("P", memory.read("S").softmax(-1))
    memory.write("O", memory.read("P") @ memory.read("V"))
    return memory


def standard_backward(
    query: Tensor, key: Tensor, value: Tensor, p: Tensor, grad_out: Tensor, scale: float = 1.0
) -> SlowMemory:
    """The backward pass of standard attention, which reads the P that the forward pass stored.

        dV = P^T dO;    dP = dO V^T;    dS = P * (dP - rowsum(P * dP))
        dQ = scale dS K;    dK = scale dS^T Q

    Accesses: four products of N^2 + 2Nd, and 3 N^2 for dS.

    Args:
        query, key, value: As in standard_forward.
        p: (q_len, k_len), P of the forward pass.
        grad_out: dO, like query.
        scale: As in standard_forward.

    Returns:
        Slow memory with dQ, dK and dV.

    Reference:
        Algorithm 3.
    """
    memory = SlowMemory(Q=query, K=key, V=value, P=p, dO=grad_out)
    memory.write("dV", memory.read("P").T @ memory.read("dO"))
    memory.write("dP", memory.read("dO") @ memory.read("V").T)
    p, dp = memory.read("P"), memory.read("dP")
    memory.write("dS", p * (dp - (p * dp).sum(-1, keepdim=True)))
    memory.write("dQ", scale * memory.read("dS") @ memory.read("K"))
    memory.write("dK", scale * memory.read("dS").T @ memory.read("Q"))
    return memory


def flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tiles: Tiles,
    *,
    scale: float = 1.0,
    mask: Tensor | BlockMask | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
    after_block: AfterBlock | None = None,
) -> SlowMemory:
    """FlashAttention: for every tile of keys, every tile of queries updates O, l and m.

        m~ = rowmax(S)        P~ = exp(S - m~)                 l~ = rowsum(P~)
        m' = max(m, m~)       l' = exp(m - m') l + exp(m~ - m') l~
        O' = (exp(m - m') l O + exp(m~ - m') dropout(P~) V) / l'

    After j tiles of keys, O, l and m are those of attention to these keys (Theorem 1). A query
    without a key so far has m = -inf, l = 0 and O = 0. For such queries exp(m - m') and the
    division by l are replaced, because they would give NaN.

    Args:
        query: (q_len, head_dim).
        key, value: (k_len, head_dim).
        tiles: (B_r, B_c), the result of `tile_sizes`, or the block size of a BlockMask.
        scale: Factor of the scores; 1 is Algorithm 1.
        mask: bool (q_len, k_len), True means attend: Algorithm 2. Or a BlockMask, whose empty
            blocks are skipped: Algorithm 5.
        dropout_p, seed: As in sparseflash.attention, for head 0.
        after_block: Called with the index of the tile of keys, that of queries, and slow memory.

    Returns:
        Slow memory with O, l (row sums) and m (row maxima).

    Raises:
        TypeError: A tensor, the mask or a side of a tile has another type.
        ValueError: Shapes do not match, the mask has another length, or a BlockMask has another
            block size or several heads.

    Reference:
        Algorithms 1, 2 and 5.
    """
    pairs, blocks = _checked_mask(mask, query, key, value, tiles)
    memory = SlowMemory(Q=query, K=key, V=value)
    memory.write("O", torch.zeros_like(memory["Q"]))
    memory.write("l", torch.zeros(len(query), dtype=torch.float64))
    memory.write("m", torch.full((len(query),), -math.inf, dtype=torch.float64))
    for j, columns in _tiles(len(key), tiles[1]):
        key_tile, value_tile = memory.read("K", columns), memory.read("V", columns)
        for i, rows in _tiles(len(query), tiles[0]):
            if not blocks[i, j]:
                continue
            query_tile, out = memory.read("Q", rows), memory.read("O", rows)
            row_sum, row_max = memory.read("l", rows), memory.read("m", rows)
            scores = _scores(scale * query_tile @ key_tile.T, pairs[rows, columns])
            tile_max = scores.amax(-1)
            p = torch.exp(scores - _finite(tile_max)[:, None])
            tile_sum = p.sum(-1)
            new_max = torch.maximum(row_max, tile_max)
            old = row_sum * torch.exp(row_max - _finite(new_max))
            new = torch.exp(tile_max - _finite(new_max))
            new_sum = old + new * tile_sum
            p = p * _keep_factor(rows, columns, dropout_p, seed)
            out = old[:, None] * out + new[:, None] * (p @ value_tile)
            memory.write("O", out / _divisor(new_sum)[:, None], rows)
            memory.write("l", new_sum, rows)
            memory.write("m", new_max, rows)
            if after_block is not None:
                after_block(j, i, memory)
    return memory


def flash_forward_by_query(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tiles: Tiles,
    *,
    scale: float = 1.0,
    mask: Tensor | BlockMask | None = None,
) -> SlowMemory:
    """FlashAttention with the loop order of our kernels: queries outside, keys inside.

    O, m and l of a tile of queries stay in fast memory during the loop over keys. Accesses:
    2Nd + N for Q, O and LSE, and 2Nd for K and V in each of T_r = N / B_r tiles of queries, times
    s if empty blocks are skipped. io_model counts the same accesses.

    Args:
        query, key, value, tiles, scale, mask: As in flash_forward.

    Returns:
        Slow memory with O and LSE.

    Raises:
        TypeError, ValueError: As flash_forward does.

    Reference:
        Dao, "FlashAttention-2", 2023, Algorithm 1.
    """
    pairs, blocks = _checked_mask(mask, query, key, value, tiles)
    empty = torch.empty(len(query), dtype=torch.float64)
    memory = SlowMemory(Q=query, K=key, V=value, O=torch.empty_like(query), LSE=empty)
    for i, rows in _tiles(len(query), tiles[0]):
        query_tile = memory.read("Q", rows)
        out, row_sum = torch.zeros_like(query_tile), torch.zeros(len(query_tile)).double()
        row_max = torch.full_like(row_sum, -math.inf)
        for j, columns in _tiles(len(key), tiles[1]):
            if not blocks[i, j]:
                continue
            scores = _scores(
                scale * query_tile @ memory.read("K", columns).T, pairs[rows, columns]
            )
            new_max = torch.maximum(row_max, scores.amax(-1))
            p = torch.exp(scores - _finite(new_max)[:, None])
            correction = torch.exp(row_max - _finite(new_max))
            row_sum = correction * row_sum + p.sum(-1)
            out = correction[:, None] * out + p @ memory.read("V", columns)
            row_max = new_max
        memory.write("O", out / _divisor(row_sum)[:, None], rows)
        memory.write("LSE", row_max + row_sum.log(), rows)
    return memory


def flash_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    forward: SlowMemory,
    grad_out: Tensor,
    tiles: Tiles,
    *,
    scale: float = 1.0,
    mask: Tensor | BlockMask | None = None,
    dropout_p: float = 0.0,
    seed: int = 0,
) -> SlowMemory:
    """The backward pass of FlashAttention, which computes P again from m and l.

        P = exp(S - m) / l              Z: 1 / keep_probability where dropout keeps, else 0
        D = rowsum(dO * O)              dS = P * (Z * dO V^T - D)
        dV += (Z * P)^T dO              dQ += scale dS K              dK += scale dS^T Q

    Args:
        query, key, value: As in flash_forward.
        forward: The result of flash_forward, with O, l and m.
        grad_out: dO, like query.
        tiles, scale, mask, dropout_p, seed: As in flash_forward.

    Returns:
        Slow memory with dQ, dK and dV.

    Raises:
        TypeError, ValueError: As flash_forward does.

    Reference:
        Algorithm 4; with a BlockMask, its block-sparse form.
    """
    pairs, blocks = _checked_mask(mask, query, key, value, tiles)
    saved = {name: forward[name] for name in ("O", "l", "m")}
    memory = SlowMemory(Q=query, K=key, V=value, dO=grad_out, **saved)
    for name in "QKV":
        memory.write(f"d{name}", torch.zeros_like(memory[name]))
    for j, columns in _tiles(len(key), tiles[1]):
        key_tile, value_tile = memory.read("K", columns), memory.read("V", columns)
        grad_key, grad_value = torch.zeros_like(key_tile), torch.zeros_like(value_tile)
        for i, rows in _tiles(len(query), tiles[0]):
            if not blocks[i, j]:
                continue
            names = ("Q", "O", "dO", "dQ", "l", "m")
            q, out, do, grad_query, row_sum, row_max = (memory.read(n, rows) for n in names)
            scores = _scores(scale * q @ key_tile.T, pairs[rows, columns])
            p = torch.exp(scores - _finite(row_max)[:, None]) / _divisor(row_sum)[:, None]
            keep_factor = _keep_factor(rows, columns, dropout_p, seed)
            delta = (do * out).sum(-1, keepdim=True)
            ds = p * (keep_factor * (do @ value_tile.T) - delta)
            grad_value += (keep_factor * p).T @ do
            grad_key += scale * ds.T @ q
            memory.write("dQ", grad_query + scale * ds @ key_tile, rows)
        memory.write("dK", grad_key, columns)
        memory.write("dV", grad_value, columns)
    return memory


def _tiles(length: int, side: int) -> Iterator[tuple[int, slice]]:
    """(index, tokens) of each tile; the last tile ends with the sequence."""
    for number, begin in enumerate(range(0, length, side)):
        yield number, slice(begin, min(begin + side, length))


def _scores(products: Tensor, pairs: Tensor) -> Tensor:
    return products.masked_fill(~pairs, -math.inf)


def _finite(maximum: Tensor) -> Tensor:
    """Row maxima to subtract; 0 for rows without a key, because -inf - -inf is NaN."""
    return maximum.masked_fill(maximum == -math.inf, 0.0)


def _divisor(row_sum: Tensor) -> Tensor:
    """Row sums to divide by; 1 for rows without a key, because 0 / 0 is NaN."""
    return row_sum.masked_fill(row_sum == 0, 1.0)


def _keep_factor(rows: slice, columns: slice, dropout_p: float, seed: int) -> Tensor:
    """The factor of each pair: 1 / keep_probability if dropout keeps it, else 0."""
    if dropout_p == 0:
        return torch.ones((), dtype=torch.float64)
    q, k = (torch.arange(tokens.start, tokens.stop) for tokens in (rows, columns))
    keep = keep_mask(seed, torch.zeros(1, dtype=torch.long), q.unsqueeze(1), k, dropout_p)
    return keep.double() / keep_probability(dropout_p)


def _checked_mask(
    mask: Tensor | BlockMask | None, query: Tensor, key: Tensor, value: Tensor, tiles: Tiles
) -> tuple[Tensor, Tensor]:
    """bool (q_len, k_len), and bool (T_r, T_c): the pairs, and the tiles that are not skipped."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        check_floating(name, tensor)
    sides = check_integers("tiles", tiles, least=1)
    if len(sides) != 2:
        raise ValueError(f"tiles must be (B_r, B_c), got {tiles!r}")
    if query.dim() != 2 or key.shape != value.shape or query.shape[1:] != key.shape[1:]:
        shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
        raise ValueError(
            f"query must be (q_len, head_dim), key and value (k_len, head_dim), got {shapes}"
        )
    lengths = (len(query), len(key))
    blocks = torch.ones([-(-n // side) for n, side in zip(lengths, sides, strict=True)]).bool()
    if mask is None:
        return torch.ones(lengths, dtype=torch.bool), blocks
    if isinstance(mask, BlockMask):
        if mask.block_size != tuple(sides) or mask.num_heads != 1:
            raise ValueError(
                f"mask must have one head and blocks like the tiles, {tiles}, got {mask}"
            )
        mask, blocks = mask.to_dense(), mask.to_blocks()
    check_dtype("mask", mask, torch.bool)
    if mask.shape != lengths:
        raise ValueError(f"mask must be {lengths}, got {tuple(mask.shape)}")
    return mask, blocks
