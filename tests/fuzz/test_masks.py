"""Masks of random expressions against a dense evaluation of the same expressions."""

import operator
import pickle
import random
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import masks
from masks import BlockMask, Pattern, interop
from tests.helpers.tables import decode

SIDES = (16, 32, 64)
ALIGN = ("top-left", "bottom-right")
OPERATIONS = (operator.and_, operator.or_, operator.xor, operator.sub)


class Shape(NamedTuple):
    """Of the masks of one case: tokens, and tokens of a block."""

    q_len: int
    k_len: int
    block: tuple[int, int]

    @property
    def lengths(self) -> tuple[int, int]:
        return self.q_len, self.k_len

    def dense(self, predicate: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """bool (q_len, k_len) of a predicate of tokens."""
        q, k = torch.arange(self.q_len)[:, None], torch.arange(self.k_len)[None]
        return torch.as_tensor(predicate(q, k)).expand(self.lengths)

    def dense_blocks(
        self, predicate: Callable[[Tensor, Tensor], Tensor], side: int | None = None
    ) -> Tensor:
        """bool (q_len, k_len) of a predicate of blocks, or of square ones of `side` tokens."""
        bq, bk = self.block if side is None else (side, side)
        return self.dense(lambda q, k: predicate(q // bq, k // bk))


Atom = tuple[Pattern, Tensor]


def offset(rng: random.Random, shape: Shape, of_blocks: int | None = None) -> tuple[str, int]:
    """(align, what to add to the number of a query)."""
    align = rng.choice(ALIGN)
    side = of_blocks or 1
    k, q = (-(-n // side) for n in (shape.k_len, shape.q_len))
    return align, (k - q if align == "bottom-right" else 0)


def full(rng, shape) -> Atom:
    return masks.full(), torch.ones(shape.lengths, dtype=torch.bool)


def causal(rng, shape) -> Atom:
    align, add = offset(rng, shape)
    return masks.causal(align=align), shape.dense(lambda q, k: k <= q + add)


def local(rng, shape) -> Atom:
    align, add = offset(rng, shape)
    left, right = (rng.choice((0, 1, rng.randrange(300), 2**40)) for _ in range(2))
    window = left if left == right else (left, right)
    dense = shape.dense(lambda q, k: (q + add - left <= k) & (k <= q + add + right))
    return masks.local(window, align=align), dense


def dilated(rng, shape) -> Atom:
    align, add = offset(rng, shape)
    window, dilation = rng.randrange(8), rng.randint(1, 40)

    def attends(q, k):
        distance = q + add - k
        return (distance.abs() <= window * dilation) & (distance % dilation == 0)

    return masks.dilated(window, dilation, align=align), shape.dense(attends)


def global_tokens(rng, shape) -> Atom:
    if rng.random() < 0.5:
        tokens = rng.randint(1, 40)
        chosen = range(tokens)
    else:
        tokens = chosen = rng.choices(range(shape.q_len + 20), k=rng.randint(1, 6))
    rows, columns = (torch.tensor([i in chosen for i in range(n)]) for n in shape.lengths)
    return masks.global_tokens(tokens), rows[:, None] | columns


def longformer(rng, shape) -> Atom:
    window, few = rng.randrange(50), rng.randint(1, 9)
    if shape.q_len != shape.k_len:
        return full(rng, shape)
    dense = shape.dense(lambda q, k: ((q - k).abs() <= window) | (q < few) | (k < few))
    return masks.longformer(window, few), dense


def documents(rng, shape) -> Atom:
    count = rng.randint(1, 6)
    q_parts, k_parts = (_parts(rng, n, count) for n in shape.lengths)
    which_q, which_k = (torch.repeat_interleave(torch.tensor(n)) for n in (q_parts, k_parts))
    same = which_q[:, None] == which_k
    if rng.random() < 0.5:
        return masks.documents(q_parts, k_parts), same
    starts = [torch.tensor([0, *parts]).cumsum(0) for parts in (q_parts, k_parts)]
    own_q = torch.arange(shape.q_len) - starts[0][which_q]
    own_k = torch.arange(shape.k_len) - starts[1][which_k]
    inner = masks.causal(align="top-left")
    return masks.documents(q_parts, k_parts, inner), same & (own_k <= own_q[:, None])


def _parts(rng, total: int, count: int) -> list[int]:
    """So many lengths, some of them 0, that add up to a total."""
    ends = sorted(rng.randint(0, total) for _ in range(count - 1))
    return [b - a for a, b in zip([0, *ends], [*ends, total], strict=True)]


def tree(rng, shape) -> Atom:
    nodes, prefix = shape.q_len, shape.k_len - shape.q_len
    if prefix < 0:
        return full(rng, shape)
    parents = [rng.randint(max(-1, node - 20), node - 1) for node in range(nodes)]
    above = torch.eye(nodes, dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            above[node] |= above[parent]
    return masks.tree(parents, prefix), torch.cat([above.new_ones(nodes, prefix), above], dim=1)


def strided(rng, shape) -> Atom:
    side = max(shape.block)
    align, add = offset(rng, shape, side)
    stride, window = rng.randint(1, 6), rng.randrange(3)

    def attends(i, j):
        return ((i + add - j) % stride == 0) | ((i + add - j).abs() <= window)

    return masks.strided(stride, window=window, align=align), shape.dense_blocks(attends, side)


def neighborhood2d(rng, shape) -> Atom:
    columns, radius = rng.randint(1, 5), rng.randrange(3)
    side = max(shape.block)
    nq, nk = (-(-n // side) for n in shape.lengths)

    def attends(i, j):
        i = i * nk // nq
        rows = (i // columns - j // columns).abs() <= radius
        return rows & ((i % columns - j % columns).abs() <= radius)

    return masks.neighborhood2d(columns, radius), shape.dense_blocks(attends, side)


def butterfly(rng, shape) -> Atom:
    most, side = rng.choice((None, 1, 2, 4)), max(shape.block)
    nq, nk = (-(-n // side) for n in shape.lengths)

    def attends(i, j):
        differ = i * nk // nq ^ j
        return (differ & (differ - 1) == 0) & (differ < (most or 2**30))

    return masks.butterfly(most), shape.dense_blocks(attends, side)


def own_predicate(rng, shape) -> Atom:
    a, b, modulus = rng.randint(1, 5), rng.randint(1, 5), rng.randint(2, 50)
    below = rng.randrange(modulus)

    def attends(q, k):
        return (a * q + b * k) % modulus <= below

    return masks.pattern(attends), shape.dense(attends)


def own_block_predicate(rng, shape) -> Atom:
    modulus = rng.randint(1, 5)

    def attends(i, j):
        return (i * j) % modulus == 0

    return masks.block_pattern(attends), shape.dense_blocks(attends)


def random_blocks(rng, shape) -> Atom:
    """Which blocks it has is read from the mask; that each row has so many is known."""
    density, seed = rng.choice((0.01, 0.3, 0.5, 0.9, 1)), rng.randrange(2**40)
    side = max(shape.block)
    blocks = masks.random(density, seed)(shape.lengths, side).to_blocks()
    count = max(1, round(density * blocks.shape[1]))
    assert (blocks.sum(1) == count).all()
    return masks.random(density, seed), shape.dense_blocks(lambda i, j: blocks[i, j], side)


ATOMS = (
    *(full, causal, local, dilated, global_tokens, longformer, documents, tree),
    *(strided, neighborhood2d, butterfly, own_predicate, own_block_predicate, random_blocks),
)


def expression(rng: random.Random, shape: Shape, depth: int) -> Atom:
    """A pattern of operations on patterns, and what it means."""
    if depth == 0 or rng.random() < 0.2:
        return rng.choice(ATOMS)(rng, shape)
    left, dense = expression(rng, shape, depth - 1)
    if rng.random() < 0.2:
        return ~left, ~dense
    right, other = expression(rng, shape, depth - 1)
    combine = rng.choice(OPERATIONS)
    dense = dense & ~other if combine is operator.sub else combine(dense, other)
    return combine(left, right), dense


def scattered(rng: random.Random, shape: Shape) -> Tensor:
    """bool (q_len, k_len) of which no pattern knows."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    dense = torch.rand(shape.lengths, generator=generator) < rng.choice((0.001, 0.5, 0.999))
    coarse = torch.rand(20, 20, generator=generator) < 0.5
    rows, columns = (torch.arange(n) * 20 // n for n in shape.lengths)
    return dense & coarse[rows][:, columns]


def some_shape(rng: random.Random) -> Shape:
    q_len = rng.choice((1, 16, 64, rng.randint(2, 330)))
    k_len = q_len if rng.random() < 0.5 else rng.choice((1, 128, rng.randint(2, 330)))
    return Shape(q_len, k_len, (rng.choice(SIDES), rng.choice(SIDES)))


def one_head(rng: random.Random, shape: Shape, device: str) -> tuple[BlockMask, Tensor]:
    """A mask on the device, and its pairs on the CPU."""
    if rng.random() < 0.1:
        dense = scattered(rng, shape)
        return BlockMask.from_dense(dense.to(device), shape.block), dense
    pattern, dense = expression(rng, shape, rng.randrange(5))
    if rng.random() < 0.2:
        pattern = reread(pattern)
    mask = pattern(shape.lengths, shape.block, device=device)
    assert torch.equal(mask.to_dense().cpu(), dense), (pattern, shape)
    if rng.random() < 0.2:
        dense = dense ^ (other := scattered(rng, shape))
        mask = mask ^ BlockMask.from_dense(other.to(device), shape.block)
    return mask, dense


def reread(pattern: Pattern) -> Pattern:
    """The pattern out of its text, if it has one."""
    try:
        text = masks.to_json(pattern)
    except ValueError:  # it is made of a function
        return pattern
    assert masks.from_json(text) == pattern == pickle.loads(pickle.dumps(pattern))
    return masks.from_json(text)


def any_mask(rng: random.Random, device: str) -> tuple[BlockMask, Tensor]:
    """A mask of one head or of some, with its pairs: bool (q_len, k_len) or (heads, ...)."""
    shape = some_shape(rng)
    if rng.random() < 0.7:
        return one_head(rng, shape, device)
    different = [one_head(rng, shape, device) for _ in range(rng.randint(1, 3))]
    heads = rng.choices(different, k=rng.randint(1, 4))
    mask = masks.stack([mask for mask, _ in heads])
    return mask, torch.stack([dense for _, dense in heads])


def same(mask: BlockMask, dense: Tensor) -> None:
    """The mask has these pairs and is the one canonical mask that has them."""
    mask = mask.to("cpu")
    assert torch.equal(mask.to_dense().reshape(dense.shape), dense)
    heads = dense.reshape(-1, *mask.seq_len)
    made = BlockMask.from_dense(heads if len(heads) > 1 else heads[0], mask.block_size)
    assert (mask == made, hash(mask) == hash(made)) == (True, True)
    assert (mask.nnz_blocks, mask.partial_blocks) == (made.nnz_blocks, made.partial_blocks)


def transposed(rng, mask, dense, tmp_path):
    same(mask.T, dense.mT)


def cropped(rng, mask, dense, tmp_path):
    q_len, k_len = (rng.randint(1, n) for n in mask.seq_len)
    same(mask.crop(q_len, k_len), dense[..., :q_len, :k_len])


def reblocked(rng, mask, dense, tmp_path):
    same(mask.reblock((rng.choice(SIDES), rng.choice(SIDES))), dense)


def sliced(rng, mask, dense, tmp_path):
    end = rng.randint(1, mask.seq_len[0])
    begin = rng.randrange(end)
    same(mask.slice_queries(begin, end), dense[..., begin:end, :])


def through_scipy(rng, mask, dense, tmp_path):
    for head in range(mask.num_heads):
        one = mask.head(head)
        found = BlockMask.from_scipy(one.to_scipy(), mask.block_size).crop(*mask.seq_len)
        same(found, dense.reshape(-1, *mask.seq_len)[head])


def through_torch(rng, mask, dense, tmp_path):
    layout = rng.choice((torch.sparse_bsr, torch.sparse_csr))
    one = mask.head(0)
    found = interop.from_torch(interop.to_torch(one, layout), mask.block_size).crop(*mask.seq_len)
    same(found, dense.reshape(-1, *mask.seq_len)[0])


def through_flex(rng, mask, dense, tmp_path):
    same(interop.from_flex(interop.to_flex(mask)), dense)


def through_a_file(rng, mask, dense, tmp_path):
    masks.save(mask, tmp_path / "mask.safetensors")
    same(masks.load(tmp_path / "mask.safetensors"), dense)


def through_pickle(rng, mask, dense, tmp_path):
    same(pickle.loads(pickle.dumps(mask)), dense)


def as_a_table(rng, mask, dense, tmp_path):
    table, (q_len, k_len) = mask.table("cpu"), mask.seq_len
    for lists, by_key in ((table.by_query, False), (table.by_key, True)):
        found = decode(table, lists, by_key)[0]
        assert torch.equal(found[:, :q_len, :k_len], dense.reshape(-1, q_len, k_len))
        assert int(found.sum()) == int(dense.sum()), "a bit outside the sequence is set"


def selected(rng, mask, dense, tmp_path):
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    blocks = torch.rand(mask.grid.nq, mask.grid.nk, generator=generator) < 0.5
    bq, bk = mask.block_size
    chosen = blocks.repeat_interleave(bq, 0)[: mask.seq_len[0]]
    chosen = chosen.repeat_interleave(bk, 1)[:, : mask.seq_len[1]]
    found = mask.select(blocks.to(mask.device)).to_dense().cpu()
    assert torch.equal(found.reshape(dense.shape), dense & chosen)


ON_EVERY_DEVICE = (transposed, cropped, reblocked, sliced, through_a_file, as_a_table, selected)
ON_THE_CPU = (through_scipy, through_torch, through_flex, through_pickle)


def check_mask(tmp_path, device: str, rng: random.Random) -> None:
    mask, dense = any_mask(rng, device)
    same(mask, dense)
    views = ON_EVERY_DEVICE + (ON_THE_CPU if device == "cpu" else ())
    for view in rng.sample(views, 2):
        view(rng, mask, dense, tmp_path)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # torch 2.11
@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
@pytest.mark.parametrize("cases", [150, pytest.param(300, marks=pytest.mark.slow)])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_masks_of_random_expressions(fuzz, device, cases, tmp_path):
    fuzz(partial(check_mask, tmp_path, device), cases)
