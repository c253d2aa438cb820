"""What is saved comes back, and nothing else does."""

import json
import pickle

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import masks

PATTERNS = [
    masks.full(),
    masks.causal(align="bottom-right"),
    masks.local((21, 4), align="top-left"),
    masks.strided(2, window=3, align="top-left"),
    masks.dilated(3, 4, align="top-left"),
    masks.global_tokens((0, 3, 40)),
    masks.random(1 / 3, seed=5),
    masks.documents(torch.tensor([30, 40]), (40, 61), masks.causal(align="top-left")),
    masks.tree([-1, *range(69)], prefix_len=31),
    masks.bigbird(num_random=1),
    ~(masks.butterfly(2) & masks.causal(align="top-left")) - masks.random(0.2) ^ masks.full(),
    masks.butterfly().with_block_size(64),
    masks.stack([masks.butterfly(), masks.full() | masks.random(0.5)]),
]


@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
def test_patterns(pattern, tmp_path):
    masks.save(pattern, tmp_path / "pattern")
    loaded = masks.load(tmp_path / "pattern")
    again = masks.from_json(masks.to_json(pattern))
    built = pattern((70, 101), 16)
    for other in (loaded, again):
        assert isinstance(other, masks.Pattern)
        assert (other.name, other.block_size) == (pattern.name, pattern.block_size)
        assert other((70, 101), 16) == built


@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
@pytest.mark.parametrize("block_size", [16, (32, 64)])
def test_masks(pattern, block_size, tmp_path):
    mask = pattern((70, 101), block_size)
    masks.save(mask, tmp_path / "mask")
    loaded = masks.load(tmp_path / "mask")
    assert isinstance(loaded, masks.BlockMask)
    assert loaded == mask
    assert (loaded.seq_len, loaded.block_size) == (mask.seq_len, mask.block_size)
    assert torch.equal(loaded.table().by_key.row_ptr, mask.table().by_key.row_ptr)


def test_longformer_is_its_own_recipe():
    text = masks.to_json(masks.longformer(5, 2))
    assert json.loads(text)["pattern"] == {"longformer": {"window": 5, "num_global": 2}}


def test_a_pattern_of_a_function_is_not_saved(tmp_path):
    @masks.pattern
    def butterfly(q, k):
        return q >= k

    with pytest.raises(ValueError, match="butterfly has a Python function"):
        masks.save(masks.full() & butterfly, tmp_path / "pattern")
    masks.save(butterfly(64, 16), tmp_path / "mask")
    assert masks.load(tmp_path / "mask") == masks.causal()(64, 16)


def test_a_pattern_of_too_many_levels_is_not_saved(tmp_path):
    deep = masks.full()
    for window in range(3000):
        deep = deep & masks.local(window)
    for write in (
        masks.to_json,
        pickle.dumps,
        lambda pattern: masks.save(pattern, tmp_path / "a"),
    ):
        with pytest.raises(ValueError, match=r"pattern has too many levels to be saved: \(\("):
            write(deep)


def test_an_expression_of_too_many_patterns_is_neither_saved_nor_read():
    doubled = masks.local(3)
    for window in range(40):  # what is written has twice as many patterns in each step
        doubled = (doubled & masks.local(window)) | doubled
    assert len(doubled.name) < 100_000
    assert len(repr(masks.stack([doubled, ~doubled]))) < 100_000
    with pytest.raises(ValueError, match="at most 10,000 patterns"):
        masks.to_json(doubled)
    patterns = ", ".join(['{"full": {}}'] * 10_000)
    with pytest.raises(ValueError, match=r"text cannot be read: .* at most 10,000 patterns"):
        masks.from_json(f'{{"version": 1, "pattern": {{"stack": {{"masks": [{patterns}]}}}}}}')


def test_a_pattern_and_itself_are_one_pattern():
    pattern = masks.local(3).with_block_size(64)
    doubled = pattern
    for _ in range(40):
        doubled = (doubled & doubled) | doubled
    assert doubled is pattern
    assert masks.from_json(masks.to_json(doubled)) == pattern
    assert not (pattern - pattern)(64).nnz_blocks


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"version": 2, "pattern": {"full": {}}}', "version 1, got 2"),
        ('{"version": 1}', "text must have a pattern"),
        ('{"version": 1, "pattern": {"eval": {"x": 1}}}', "unknown pattern 'eval'"),
        ("[]", "version 1, got None"),
        ("full()", r"text must be written by masks, got 'full\(\)'"),
        ('{"version": 1, "pattern": 3}', "text must have a pattern, got 3"),
        ('{"version": 1, "pattern": {}}', "a pattern must be written as .*, got {}"),
        ('{"version": 1, "pattern": {"local": 3}}', "must be written as .*, got {'local': 3}"),
        (
            '{"version": 1, "pattern": {"stack": []}}',
            r"must be written as .*, got {'stack': \[\]}",
        ),
        (
            '{"version": 1, "pattern": {"full": {}, "causal": {}}}',
            "must be written as .*, got {'full': {}, 'causal': {}}",
        ),
        (
            '{"version": 1, "pattern": {"local": {"window": 3, "window": 5}}}',
            "key 'window' is given twice",
        ),
        ('{"version": 1, "version": 1, "pattern": {"full": {}}}', "key 'version' is given twice"),
        ('{"version": 1, "pattern": {"local": {"window": 0.5}}}', "window must be an integer"),
    ],
)
def test_other_texts_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        masks.from_json(text)


def test_other_files_are_refused(tmp_path):
    save_file({"weight": torch.ones(3)}, tmp_path / "weights")
    (tmp_path / "text").write_text("no tensors at all")
    for name in ("weights", "text"):
        with pytest.raises(ValueError, match=r"must have a mask|no mask that can be read"):
            masks.load(tmp_path / name)
    with pytest.raises(TypeError, match="pattern must be a Pattern, got str"):
        masks.to_json("full()")


def test_a_folder_that_is_missing_is_named(tmp_path):
    with pytest.raises(OSError, match=r"nothing/mask cannot be written"):
        masks.save(masks.full(), tmp_path / "nothing" / "mask")


def test_integers_and_arrays_of_numpy_are_saved():
    for pattern in (masks.local(np.int64(3)), masks.documents(np.array([3, 4]))):
        assert masks.from_json(masks.to_json(pattern)) == pattern


@pytest.mark.parametrize("pattern", PATTERNS, ids=repr)
def test_patterns_are_pickled(pattern):
    assert pickle.loads(pickle.dumps(pattern)) == pattern


def test_a_pattern_of_a_function_is_not_pickled():
    with pytest.raises(ValueError, match="has a Python function"):
        pickle.dumps(masks.pattern(lambda q, k: q == k))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("full", lambda t: t["full_end"].add_(100)),
        ("full", lambda t: t["full_begin"].sub_(5)),
        ("full", lambda t: t.update(full_begin=t["full_begin"].int())),
        ("full", lambda t: t.update(full_begin=t["full_begin"][1:].clone())),
        ("full_end", lambda t: t.pop("full_end")),
        ("full", lambda t: t.update(full_begin=torch.tensor([6]), full_end=torch.tensor([8]))),
        ("partial", lambda t: t["partial"].add_(1000)),
        ("partial", lambda t: t["partial"].add_(7 * 8)),  # a mask further
        ("partial", lambda t: t["partial"].sub_(7 * 8)),
        ("partial", lambda t: t.update(partial=t["partial"].int())),
        ("partial", lambda t: t["partial"].copy_(t["partial"].flip(0))),
        ("partial", lambda t: t["partial"][1:2].copy_(t["partial"][:1])),
        ("partial", lambda t: t["partial"][:1].copy_(t["full_begin"][:1])),
        (
            "partial",
            lambda t: t.update(partial=torch.tensor(7), partial_tile=torch.tensor(0)),
        ),
        ("partial", lambda t: t["partial"][-1:].fill_(7 * 8)),  # one past the last block
        (
            "partial",
            lambda t: t.update(partial=torch.tensor([7]), partial_tile=torch.tensor([0])),
        ),
        ("partial_tile", lambda t: t["partial_tile"].add_(1000)),
        ("partial_tile", lambda t: t["partial_tile"].sub_(1000)),
        ("partial_tile", lambda t: t.update(partial_tile=t["partial_tile"][1:].clone())),
        ("partial_tile", lambda t: t.update(partial_tile=t["partial_tile"].float())),
        ("bank", lambda t: t.update(bank=t["bank"].long())),
        ("bank", lambda t: t.update(bank=t["bank"][:, 1:].contiguous())),
    ],
)
def test_files_that_would_lead_kernels_astray_are_refused(name, change, tmp_path):
    mask = (masks.causal() | masks.random(0.5))(100, 16)
    masks.save(mask, tmp_path / "mask")
    tensors = load_file(tmp_path / "mask")
    with safe_open(tmp_path / "mask", framework="pt") as file:
        header = file.metadata()
    change(tensors)
    save_file(tensors, tmp_path / "mask", metadata=header)
    with pytest.raises(ValueError, match=f"^{name} of the saved mask"):
        masks.load(tmp_path / "mask")


@pytest.mark.parametrize(
    "head_to_mask", [[], [1], [0, 2], [0, -1], [10**12], [0, 1.0], ["0"], [None]]
)
def test_heads_without_a_mask_are_refused(head_to_mask, tmp_path):
    masks.save(masks.causal()(100, 16), tmp_path / "mask")
    with safe_open(tmp_path / "mask", framework="pt") as file:
        header = json.loads(file.metadata()["masks"])
    written = {"masks": json.dumps(header | {"head_layer": head_to_mask})}
    save_file(load_file(tmp_path / "mask"), tmp_path / "mask", metadata=written)
    with pytest.raises(ValueError, match=r"^head_layer of the saved mask"):
        masks.load(tmp_path / "mask")


def test_a_mask_comes_to_a_device_and_nothing_else_is_saved(tmp_path):
    masks.save(masks.causal()(100, 16), tmp_path / "mask")
    there = masks.load(tmp_path / "mask", "meta")
    assert isinstance(there, masks.BlockMask)
    assert there.block_set.bit_tiles.device.type == "meta"
    with pytest.raises(TypeError, match="mask must be a Pattern or a BlockMask, got DynamicMask"):
        masks.save(masks.DynamicMask.from_blocks(torch.ones(2, 2) > 0), tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.fixture
def hostile(tmp_path):
    """(the name of a pattern in a file that leaves a trace when it is run, the trace)"""
    trace = tmp_path / "ran"
    file = tmp_path / "hostile.py"
    file.write_text(f"import masks\nopen({str(trace)!r}, 'w').close()\nfound = masks.local(3)\n")
    return f"{file}:found", trace


def _documents(pattern: str) -> str:
    arguments = {"lengths": [4], "k_lengths": None, "pattern": pattern}
    return json.dumps({"version": 1, "pattern": {"documents": arguments}})


def test_reading_runs_no_file(hostile, tmp_path):
    name, trace = hostile
    hidden = f"documents([4], pattern={name[:-8]!r} {name[-8:]!r})"
    for text in (name, hidden):
        written = _documents(text)
        save_file({}, tmp_path / "pattern", metadata={"masks": written})
        for read in (
            lambda written=written: masks.from_json(written),
            lambda: masks.load(tmp_path / "pattern"),
            lambda text=text: masks.parse(f"documents([4], pattern={text!r})"),
        ):
            with pytest.raises(ValueError, match="must not name a Python file"):
                read()
    assert not trace.exists()


def test_a_text_in_documents_is_resolved_once(hostile):
    name, trace = hostile
    pattern = masks.documents([4], pattern=name)
    assert trace.exists()
    trace.unlink()
    assert pattern == masks.documents([4], pattern=masks.local(3))
    assert masks.from_json(masks.to_json(pattern)) == pattern
    assert masks.from_json(_documents("local(3)")) == pattern
    assert not trace.exists()


def test_documents_of_a_function_in_a_file_are_not_saved(tmp_path):
    (tmp_path / "own.py").write_text(
        "import masks\n@masks.pattern\ndef near(q, k):\n    return q - k < 2\n"
    )
    with pytest.raises(
        ValueError, match=r"near has a Python function, .* pattern\(seq_len\), can be"
    ):
        masks.to_json(masks.documents([4], pattern=f"{tmp_path / 'own.py'}:near"))


@pytest.mark.parametrize(
    "text",
    [
        '{"version":1,"pattern":' + "[" * 100_000,
        '{"version":1,"pattern":' + '{"~":{"of":' * 3000 + '{"full":{}}' + "}}" * 3000 + "}",
        '{"version":1,"pattern":{"local":{"window":1e400}}}',
        '{"version":1,"pattern":{"local":{"window":' + "9" * 5000 + "}}}",
        '{"version":1,"pattern":{"local":[3]}}',
        '{"version":1,"pattern":{"stack":{"masks":[1]}}}',
        '{"version":[' + "1," * 5000 + "1]}",
    ],
    ids=range(7),
)
def test_texts_that_hold_no_pattern(text):
    with pytest.raises(ValueError, match=r"^(pattern of )?text .{1,400}$"):
        masks.from_json(text)


def test_texts_with_the_former_name_of_the_block_size_are_read():
    text = '{"version":1,"pattern":{"in_blocks":{"pattern":{"full":{}},"block_size":[16,32]}}}'
    assert masks.from_json(text) == masks.full().with_block_size((16, 32))
