"""Every built-in pattern against its predicate, written a second time as plainly as can be."""

import operator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import masks
from masks._core.convert import CACHED_BYTES


def dense(predicate, q_len, k_len):
    return predicate(torch.arange(q_len)[:, None], torch.arange(k_len)[None]).expand(q_len, k_len)


TOKEN_PATTERNS = [
    (masks.full(), lambda q, k: q == q),
    (masks.causal(), lambda q, k: k <= q),
    (masks.local(13), lambda q, k: (q - k).abs() <= 13),
    (masks.local((20, 0)), lambda q, k: (k <= q) & (q - k <= 20)),
    (masks.local((0, 40)), lambda q, k: (q <= k) & (k - q <= 40)),
    (masks.dilated(4, 7), lambda q, k: ((q - k).abs() <= 28) & ((q - k) % 7 == 0)),
    (masks.dilated(3, 50), lambda q, k: ((q - k).abs() <= 150) & ((q - k) % 50 == 0)),
    (masks.global_tokens(5), lambda q, k: (q < 5) | (k < 5)),
    (
        masks.global_tokens([3, 4, 70]),
        lambda q, k: (q == 3) | (q == 4) | (q == 70) | (k == 3) | (k == 4) | (k == 70),
    ),
    (masks.longformer(9, 2), lambda q, k: ((q - k).abs() <= 9) | (q < 2) | (k < 2)),
]


@pytest.mark.parametrize("block_size", [16, (32, 16), (16, 128)])
@pytest.mark.parametrize("seq_len", [128, 177])
@pytest.mark.parametrize(
    ("pattern", "predicate"), TOKEN_PATTERNS, ids=[p.name for p, _ in TOKEN_PATTERNS]
)
def test_token_patterns(pattern, predicate, seq_len, block_size):
    mask = pattern(seq_len, block_size)
    assert torch.equal(mask.to_dense(), dense(predicate, seq_len, seq_len))
    assert mask == masks.pattern(predicate)(seq_len, block_size)


BLOCK_PATTERNS = [
    (masks.strided(3), lambda i, j: (i - j) % 3 == 0),
    (masks.strided(5, window=1), lambda i, j: ((i - j) % 5 == 0) | ((i - j).abs() <= 1)),
    (masks.butterfly(), lambda i, j: (i ^ j) & ((i ^ j) - 1) == 0),
    (masks.butterfly(4), lambda i, j: ((i ^ j) == 0) | ((i ^ j) == 1) | ((i ^ j) == 2)),
    (masks.butterfly(1), lambda i, j: i == j),
    (
        masks.neighborhood2d(3, 1),
        lambda i, j: ((i // 3 - j // 3).abs() <= 1) & ((i % 3 - j % 3).abs() <= 1),
    ),
    (masks.bigbird(3, 2, 0), lambda i, j: ((i - j).abs() <= 1) | (i < 2) | (j < 2)),
]


@pytest.mark.parametrize("seq_len", [128, 250])
@pytest.mark.parametrize(
    ("pattern", "predicate"), BLOCK_PATTERNS, ids=[p.name for p, _ in BLOCK_PATTERNS]
)
def test_block_patterns(pattern, predicate, seq_len):
    blocks = -(-seq_len // 16)
    mask = pattern(seq_len, 16)
    assert torch.equal(mask.to_blocks(), dense(predicate, blocks, blocks))
    assert mask.partial_blocks == 0
    assert mask == masks.block_pattern(predicate)(seq_len, 16)
    assert pattern(seq_len, (16, 32)) == pattern(seq_len, 32).reblock((16, 32))


@pytest.mark.parametrize("density", [0.01, 0.25, 0.6, 1.0])
def test_random_has_exactly_so_many_blocks_in_every_row(density):
    mask = masks.random(density, seed=3)(40 * 16, 16)
    assert mask.blocks_per_row().unique().tolist() == [max(1, round(density * 40))]
    assert mask == masks.random(density, seed=3)(40 * 16, 16)
    if density < 1:
        assert mask != masks.random(density, seed=4)(40 * 16, 16)


@pytest.mark.parametrize(
    ("density", "blocks", "rows"),
    [
        (1 / 2, 8, [[0, 1, 2, 3], [1, 2, 5, 7], [0, 1, 2, 6], [0, 1, 5, 6]]),
        (1 / 40, 80, [[8, 26], [11, 74], [29, 76], [31, 50]]),
    ],
)
def test_a_seed_draws_the_same_blocks_in_every_version(density, blocks, rows):
    found = masks.random(density, seed=3)(blocks * 16, 16).to_blocks()
    assert [row.nonzero().flatten().tolist() for row in found[: len(rows)]] == rows


def test_random_rows_are_uniform():
    blocks = torch.stack([masks.random(0.25, seed=s)(16 * 16, 16).to_blocks() for s in range(200)])
    often = blocks.float().mean((0, 1))
    # Each column is chosen with probability 1/4; 3200 draws have a standard deviation of 0.0077.
    assert (often - 0.25).abs().max() < 0.04


def test_bigbird_keeps_its_parts():
    mask, base = masks.bigbird(3, 1, 3, seed=1)(640, 16), masks.bigbird(3, 1, 0)(640, 16)
    assert (base - mask).nnz_blocks == 0
    assert mask.nnz_blocks > base.nnz_blocks


def test_documents():
    mask = masks.documents([5, 0, 60, 35])(100, 16)
    index = torch.repeat_interleave(torch.arange(4), torch.tensor([5, 0, 60, 35]))
    assert torch.equal(mask.to_dense(), index[:, None] == index[None])
    cross = masks.documents([5, 20], [30, 10])((25, 40), 16).to_dense()
    assert cross[:5, :30].all()
    assert cross[5:, 30:].all()
    assert int(cross.sum()) == 5 * 30 + 20 * 10


@pytest.mark.parametrize("block_size", [16, (32, 64)])
@pytest.mark.parametrize(
    "pattern",
    [
        masks.full(),
        masks.causal(align="bottom-right"),
        masks.butterfly(),
        masks.pattern(lambda q, k: (q * k) % 5 < 2),
        masks.stack([masks.full(), masks.local(7, align="top-left"), masks.random(0.5)]),
    ],
    ids=repr,
)
def test_documents_with_a_pattern_of_their_own_lengths(pattern, block_size):
    q_lengths, k_lengths = [3, 0, 40, 64, 1, 90, 7], [5, 9, 64, 30, 0, 100, 13]
    heads = pattern(16, 16).num_heads
    expected = torch.zeros(heads, sum(q_lengths), sum(k_lengths), dtype=torch.bool)
    q = k = 0
    for q_len, k_len in zip(q_lengths, k_lengths, strict=True):
        if q_len and k_len:
            own = pattern((q_len, k_len), block_size).to_dense()
            expected[:, q : q + q_len, k : k + k_len] = own
        q, k = q + q_len, k + k_len
    mask = masks.documents(q_lengths, k_lengths, pattern)((q, k), block_size)
    assert mask == masks.BlockMask.from_dense(expected, block_size)
    assert torch.equal(mask.to_dense(), expected.squeeze(0))


def test_documents_that_share_nothing():
    mask = masks.documents([5, 0], [0, 9], masks.causal())((5, 9), 16)
    assert mask.nnz_blocks == 0


def test_documents_whose_pattern_is_empty():
    nothing = masks.full() - masks.full()
    assert masks.documents([85, 48], pattern=nothing)(133, 16).nnz_blocks == 0


NINE_NODES = [-1, 0, 1, 1, 2, 2, 3, 3, 4]


def test_tree_of_nine_nodes():
    expected = torch.tensor(
        [
            [1, 0, 0, 0, 0, 0, 0, 0, 0],
            [1, 1, 0, 0, 0, 0, 0, 0, 0],
            [1, 1, 1, 0, 0, 0, 0, 0, 0],
            [1, 1, 0, 1, 0, 0, 0, 0, 0],
            [1, 1, 1, 0, 1, 0, 0, 0, 0],
            [1, 1, 1, 0, 0, 1, 0, 0, 0],
            [1, 1, 0, 1, 0, 0, 1, 0, 0],
            [1, 1, 0, 1, 0, 0, 0, 1, 0],
            [1, 1, 1, 0, 1, 0, 0, 0, 1],
        ],
        dtype=torch.bool,
    )
    assert torch.equal(masks.tree(NINE_NODES)(9, 16).to_dense(), expected)
    after = masks.tree(NINE_NODES, prefix_len=20)((9, 29), 16).to_dense()
    assert after[:, :20].all()
    assert torch.equal(after[:, 20:], expected)


@given(st.integers(1, 512), st.integers(0, 300), st.sampled_from([16, (16, 64), 128]), st.data())
@settings(max_examples=25)
def test_random_trees(nodes, prefix_len, block_size, data):
    seed = data.draw(st.integers(0, 2**31))
    reach = data.draw(st.sampled_from([1, 3, nodes]))
    generator = torch.Generator().manual_seed(seed)
    back = torch.randint(1, reach + 1, (nodes,), generator=generator)
    parents = (torch.arange(nodes) - back).clamp(min=-1).tolist()
    expected = torch.zeros(nodes, prefix_len + nodes, dtype=torch.bool)
    expected[:, :prefix_len] = True
    for node in range(nodes):
        ancestor = node
        while ancestor >= 0:
            expected[node, prefix_len + ancestor] = True
            ancestor = parents[ancestor]
    mask = masks.tree(parents, prefix_len)((nodes, prefix_len + nodes), block_size)
    assert mask == masks.BlockMask.from_dense(expected, block_size)


@pytest.mark.parametrize(
    "make", [masks.causal, lambda **o: masks.local(6, **o), lambda **o: masks.dilated(3, 4, **o)]
)
def test_alignment_is_explicit_when_lengths_differ(make):
    with pytest.raises(ValueError, match="align must be one of"):
        make()((50, 80), 16)
    square = make()(80, 16).to_dense()
    assert torch.equal(make(align="bottom-right")((50, 80), 16).to_dense(), square[30:])
    assert torch.equal(make(align="top-left")((50, 80), 16).to_dense(), square[:50])


def test_algebra_of_patterns():
    pattern = (masks.causal() & masks.local(30)) | ~masks.butterfly() - masks.strided(2)
    causal, local, butterfly, strided = (
        p(200, 16) for p in (masks.causal(), masks.local(30), masks.butterfly(), masks.strided(2))
    )
    built = (causal & local) | ~butterfly - strided
    assert pattern(200, 16) == built
    assert masks.parse("causal() & local(30) | ~butterfly - strided(2)")(200, 16) == (
        (masks.causal() & masks.local(30)) | (~masks.butterfly() - masks.strided(2))
    )(200, 16)


def test_an_operand_of_several_operations_is_built_once():
    built = []

    @masks.pattern
    def near(q, k):
        built.append(1)
        return (q - k).abs() < 5

    nested = near
    for _ in range(40):
        nested = (nested & masks.causal()) | nested
    assert nested(64, 16) == masks.local(4)(64, 16)
    times = len(built)
    built.clear()
    assert near(80, 16) == masks.local(4)(80, 16)
    assert times == len(built)


def test_patterns_may_be_nested_deeper_than_python_recurses():
    nested = masks.full()
    for _ in range(600):  # twice as many operators
        nested = masks.local(3) & (~nested)
    assert nested(32, 16) == masks.local(3)(32, 16)


def test_a_pattern_has_a_block_size_of_its_own():
    fine = masks.butterfly().with_block_size((32, 64))
    assert fine(200) == masks.butterfly()(200, (32, 64))
    assert fine(200, 16) == masks.butterfly()(200, 16)
    both = ~fine | masks.causal().with_block_size((32, 64))
    assert both(200).block_size == masks.stack([fine, both])(200).block_size == (32, 64)
    for other in (masks.butterfly(), masks.full().with_block_size(128), ~masks.strided(2)):
        with pytest.raises(ValueError, match=r"got \[.*\]; call with_block_size of the combined"):
            operator.and_(fine, other)
    with pytest.raises(ValueError, match="block_size must have sides in"):
        fine.with_block_size(48)


RULES = [operator.and_, operator.or_, operator.sub, operator.xor]


@pytest.mark.parametrize("of_blocks", [masks.butterfly(), masks.random(0.4)])
@pytest.mark.parametrize("tokens", [p for p, _ in TOKEN_PATTERNS], ids=lambda p: p.name)
def test_a_pattern_of_tokens_takes_the_block_size_of_the_other(tokens, of_blocks):
    fine = of_blocks.with_block_size((16, 32))
    blocks, pairs = fine(177).to_dense(), tokens(177).to_dense()
    for rule in RULES:
        mask, reverse = rule(fine, tokens)(177), rule(tokens, fine)(177)
        assert mask.block_size == reverse.block_size == (16, 32)
        expected = rule(blocks, pairs) if rule is not operator.sub else blocks & ~pairs
        assert torch.equal(mask.to_dense(), expected)
        expected = rule(pairs, blocks) if rule is not operator.sub else pairs & ~blocks
        assert torch.equal(reverse.to_dense(), expected)
    nested = ~(fine & ~tokens) ^ (tokens - masks.local(5))
    expected = ~(blocks & ~pairs) ^ (pairs & ~masks.local(5)(177).to_dense())
    assert torch.equal(nested(177).to_dense(), expected)
    stacked = masks.stack([tokens, fine, ~tokens])(177).to_dense()
    assert torch.equal(stacked, torch.stack([pairs, blocks, ~pairs]))


def test_documents_have_the_block_size_of_their_pattern():
    fine = masks.documents([150, 27], pattern=masks.butterfly().with_block_size(16))
    assert fine(177) == masks.documents([150, 27], pattern="butterfly()")(177, 16)
    assert (fine & masks.causal())(177).block_size == (16, 16)
    assert masks.from_json(masks.to_json(fine)) == fine


def test_a_combined_pattern_keeps_its_block_size():
    combined = masks.butterfly().with_block_size(16) & masks.causal()
    assert masks.from_json(masks.to_json(combined)) == combined
    assert combined.with_block_size(64)(200) == (masks.butterfly() & masks.causal())(200, 64)
    assert (masks.local(9) | combined)(200).block_size == (16, 16)


EVERY_PATTERN = [
    *[p for p, _ in TOKEN_PATTERNS],
    masks.documents([150, 27]),
    masks.documents([150, 27], pattern="local(9)"),
    masks.pattern(lambda q, k: (q * k) % 7 == 0),
    masks.longformer(9, 2) ^ ~masks.causal(),
    masks.stack([masks.local(3), masks.full()]),
    *[p for p, _ in BLOCK_PATTERNS],
    masks.random(0.3),
    masks.documents([150, 27], pattern="butterfly()"),
    masks.block_pattern(lambda i, j: i > j),
    masks.causal() & masks.butterfly(),
    masks.stack([masks.butterfly(1), masks.full()]),
]


@pytest.mark.parametrize("pattern", EVERY_PATTERN, ids=lambda p: p.name)
def test_pairs_of_a_pattern_of_tokens_are_those_of_every_block_size(pattern):
    made = [pattern(177, size).to_dense() for size in (16, (64, 32), 128)]
    assert all(torch.equal(made[0], other) for other in made[1:]) == pattern.of_tokens


def test_a_tree_is_a_pattern_of_tokens():
    pattern = masks.tree(NINE_NODES, prefix_len=41)
    assert pattern.of_tokens
    assert torch.equal(pattern((9, 50), 16).to_dense(), pattern((9, 50), (64, 32)).to_dense())


def test_parse_reads_a_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import masks\nREACH = 4\n"
        "@masks.pattern\ndef near(q, k):\n    return (q - k).abs() < REACH\n"
    )
    assert masks.parse(f"{file}:near")(64, 16) == masks.local(3)(64, 16)


def test_functions_of_tokens_see_on_a_cpu_what_a_cache_holds():
    seen = []

    @masks.pattern
    def causal(q, k):
        seen.append(len(q) * k.shape[1])
        return (q - k).neg_() <= 0  # an operation that is not recorded

    assert causal(1500) == masks.causal()(1500)
    assert 8 * max(seen) <= CACHED_BYTES
    # Two rows are recorded, and were asked for before where torch._dynamo was not loaded.
    assert sum(seen) - 1500**2 in (2 * 1500, 4 * 1500)


def test_integers_of_numpy_are_integers():
    assert masks.local(np.int64(3)) == masks.local(3)
    assert masks.full()(np.int64(64)) == masks.full()(64)
    assert repr(masks.local((np.int64(3), 0))) == "local((3, 0))"


@pytest.mark.parametrize(
    ("name", "message"), [("made", "has to be called first"), ("missing", "defines no 'missing'")]
)
def test_parse_says_what_a_file_lacks(name, message, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("import masks\ndef made(window):\n    return masks.local(window)\n")
    with pytest.raises(ValueError, match=message):
        masks.parse(f"{file}:{name}")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: masks.local(-1), "window must be"),
        (lambda: masks.strided(0), "stride must be"),
        (lambda: masks.butterfly(3), "max_stride must be a power of two"),
        (lambda: masks.random(0), "density must be in"),
        (lambda: masks.random(1.5), "density must be in"),
        (lambda: masks.global_tokens(0), "tokens must be at least 1"),
        (lambda: masks.dilated(3, 0), "dilation must be at least 1, got 0"),
        (lambda: masks.dilated(1.5, 2), "window must be an integer, got 1.5"),
        (lambda: masks.local((1, 2, 3)), r"window must be one integer or \(left, right\)"),
        (lambda: masks.local(True), "window must be an integer, got True"),
        (lambda: masks.random(0.5, seed="a"), "seed must be an integer, got 'a'"),
        (lambda: masks.global_tokens([1.5]), "tokens.0. must be an integer, got 1.5"),
        (lambda: masks.global_tokens([]), "tokens must be at least 1"),
        (lambda: masks.longformer(3, 0), "num_global must be at least 1"),
        (lambda: masks.documents([10.5, 1.9]), "lengths.0. must be an integer, got 10.5"),
        (lambda: masks.documents([]), "lengths must have at least one entry"),
        (lambda: masks.documents(300), "lengths must be a sequence of integers, got 300"),
        (lambda: masks.full()("300"), "seq_len must be an integer, got '300'"),
        (lambda: masks.pattern(masks.full()), r"attends must be a function .*, got full\(\)"),
        (
            lambda: masks.pattern(lambda b, h, q, k: q >= k),
            r"attends must be a function of \(q, k\), got <lambda>\(b, h, q, k\); .* masks.stack",
        ),
        (
            lambda: masks.block_pattern(lambda i: i > 1),
            r"a function of \(i, j\), got <lambda>\(i\)",
        ),
        (
            lambda: masks.causal("bottom-right"),
            r"causal takes \(\*, align=None\): too many positional arguments",
        ),
        (
            lambda: masks.longformer(1),
            r"longformer takes \(window, num_global\): missing a required argument: 'num_global'",
        ),
        (
            lambda: operator.and_(masks.causal(), masks.full()(64)),
            "two patterns or two block masks, got",
        ),
        (
            lambda: operator.sub(masks.full()(64), masks.causal()),
            "two patterns or two block masks, got",
        ),
        (lambda: operator.or_(masks.causal(), 3), "unsupported operand type"),
        (lambda: masks.stack(masks.full()), "masks must be a list with one for each head"),
        (lambda: masks.parse(3), "text must be a string, got int"),
        (lambda: masks.causal(align="middle"), "align must be one of"),
        (lambda: masks.documents([5, 6])(12), "lengths must sum to"),
        (lambda: masks.tree([-1, 1]), "parents must have an earlier node"),
        (lambda: masks.tree([]), "parents must have an earlier node"),
        (lambda: masks.tree([-1], -2), "prefix_len must be at least 0"),
        (
            lambda: masks.tree([-1, 0], 5)(7),
            r"seq_len must be \(2, 7\) for a tree .* got \(7, 7\)",
        ),
        (lambda: masks.bigbird(window=2), "window must be odd"),
        (lambda: masks.bigbird(window=-1), "window must be at least 1, got -1"),
        (lambda: masks.bigbird(num_global=-1), "num_global must be at least 0, got -1"),
        (lambda: masks.bigbird(num_random=-1), "num_random must be at least 0, got -1"),
        (lambda: masks.strided(2, window=-1), "window must be at least 0, got -1"),
        (lambda: masks.neighborhood2d(2, -1), "radius must be at least 0, got -1"),
        (lambda: masks.documents([5, 6], [11]), "as many as k_lengths"),
        (lambda: masks.documents([5, -6]), "lengths.1. must be at least 0, got -6"),
        (lambda: masks.documents([5, 6], [12, -1]), "k_lengths.1. must be at least 0, got -1"),
        (lambda: masks.pattern(lambda q, k: q + k)(64), "must return a bool tensor"),
        (
            lambda: masks.pattern(lambda q, k: (q > 0)[:3])(64),
            r"must return a tensor that broadcasts to \(64, 64\), got .*: it is called for some",
        ),
        (lambda: masks.neighborhood2d(0, 1), "columns must be at least 1, got 0"),
        (lambda: masks.block_pattern(lambda i, j: 1)(64), "must return a bool tensor"),
        (
            lambda: masks.parse("butterflies()"),
            r"unknown pattern 'butterflies'; known: .*'butterfly'",
        ),
        (lambda: masks.parse("local(open('x'))"), "must be literals"),
        (lambda: masks.parse("local("), "cannot be read"),
        (lambda: masks.parse("nowhere.py:x"), "does not exist"),
    ],
)
def test_bad_input_names_the_argument(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


@pytest.mark.parametrize(
    "make",
    [
        masks.full,
        lambda: masks.local((3, 4), align="top-left") & masks.causal(),
        lambda: ~masks.global_tokens([0, 5]) | masks.random(0.3, seed=4),
        lambda: masks.documents(torch.tensor([3, 4])),
        lambda: masks.stack([masks.full(), masks.causal()]).with_block_size(32),
    ],
)
def test_patterns_made_the_same_way_are_equal(make):
    assert make() == make()
    assert hash(make()) == hash(make())
    assert make().with_block_size(64) != make()


def test_patterns_made_otherwise_differ():
    different = [
        masks.causal(),
        masks.causal(align="top-left"),
        masks.local(3),
        masks.local((3, 0)),
        masks.local(3) & masks.causal(),
        masks.causal() & masks.local(3),
        masks.documents([3, 4]),
        masks.documents([4, 3]),
        masks.pattern(lambda q, k: q == k),
        masks.pattern(lambda q, k: q == k),
    ]
    assert len(set(different)) == len(different)
