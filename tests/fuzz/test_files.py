"""Damaged and hostile files, JSON texts and expressions end in one documented error, soon."""

import json
import random
import resource
import struct
import time
from functools import partial

import pytest
from safetensors import torch as safetensors

import masks
from sparseflash.distributed import ContextPlan, make_plan

SECONDS = 1.0
MEGABYTES = 200
PATTERNS = [
    "local(9) & causal()",
    "~butterfly(4) | global_tokens([1, 5])",
    "documents([5, 0, 7], pattern='local(2)')",
    "random(0.3, seed=2) ^ strided(3, window=1)",
    "tree([-1, 0, 0], prefix_len=2) - full",
]
MASKS = [
    masks.local(9)(100, 16),
    masks.stack([masks.random(0.4), masks.causal(), masks.random(0.4)])(130, (16, 32)),
    masks.full()((1, 40), 16),
]
HOSTILE = [0, -1, 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, 10**30, 1e308, -0.0, 1e999, None, True]
HOSTILE += [
    "",
    "x.py:y",
    "~" * 9000,
    "\0",
    "\ud800",
    [],
    {},
    [[]],
    {"a": 1},
    "full" + "|full" * 4000,
]


def ends_soon_in_a_value_error(read, given) -> None:
    """`read` may succeed; what it returns must be usable."""
    began, memory = time.monotonic(), peak_megabytes()
    try:
        found = read(given)
    except ValueError:
        found = None
    assert time.monotonic() - began < SECONDS
    assert peak_megabytes() - memory < MEGABYTES
    if isinstance(found, ContextPlan):
        assert repr(found)
        assert found.part(0)
    if isinstance(found, masks.BlockMask):
        assert repr(found)
        assert found.table().nbytes
        assert found == found.T.T


def peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def damaged_bytes(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        at = rng.randrange(len(changed) + 1)
        length = rng.choice((0, 1, 1, 4, 8, 100))
        new = bytes(rng.choice((0, 1, 255, rng.randrange(256))) for _ in range(rng.randrange(9)))
        changed[at : at + length] = new
    return bytes(changed)


def damaged_value(rng: random.Random, value):
    """The value with one part replaced, removed or nested."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(list(value))
        rest = {k: v for k, v in value.items() if k != key}
        if rng.random() < 0.2:
            return rest | ({rng.choice(("x", "align", "~", "stack")): value[key]})
        return rest | {key: damaged_value(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        return [*value[:at], damaged_value(rng, value[at]), *value[at + 1 :]]
    if rng.random() < 0.2:
        for _ in range(rng.choice((3, 3000))):
            value = [value]
        return value
    return rng.choice(HOSTILE)


def damaged_json(rng: random.Random, text: str) -> str:
    if rng.random() < 0.3:
        return damaged_bytes(rng, text.encode()).decode(errors="replace")
    try:
        return json.dumps(damaged_value(rng, json.loads(text)))
    except RecursionError:
        return "[" * 5000


def damaged_file(rng: random.Random, data: bytes) -> bytes:
    """A safetensors file with other bytes, or with another header of ours in it."""
    if rng.random() < 0.5:
        return damaged_bytes(rng, data)
    header, numbers = parts_of(data)
    metadata = header["__metadata__"]
    name = rng.choice(sorted(metadata))
    metadata[name] = damaged_json(rng, metadata[name])
    return file_of(header, numbers)


def parts_of(data: bytes) -> tuple[dict, bytes]:
    """Header and numbers of a safetensors file."""
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def file_of(header: dict, numbers: bytes) -> bytes:
    written = json.dumps(header, sort_keys=True).encode()
    written += b" " * (-len(written) % 8)
    return struct.pack("<Q", len(written)) + written + numbers


def damaged_tensors(rng: random.Random, data: bytes, metadata: dict[str, str]) -> bytes:
    tensors = safetensors.load(data)
    name = rng.choice(sorted(tensors))
    tensor = tensors[name].clone()
    if rng.random() < 0.2:
        del tensors[name]
    elif rng.random() < 0.3:
        tensors[name] = rng.choice((tensor[:0], tensor.double(), tensor[None], tensor.sum()))
    elif tensor.numel():
        at = rng.randrange(tensor.numel())
        limit = 2**31 - 1 if tensor.element_size() == 4 else 2**63 - 1
        near = min(limit, max(-limit, int(tensor.view(-1)[at]) + rng.choice((-1, 1))))
        new = rng.choice((-1, 0, near, limit, -limit, rng.randrange(50)))
        tensor.view(-1)[at] = max(-limit, min(new, limit))
        tensors[name] = tensor
    changed = safetensors.save({k: t.contiguous() for k, t in tensors.items()}, metadata)
    return file_of(*parts_of(changed))


@pytest.fixture(params=[60, pytest.param(2000, marks=pytest.mark.slow)])
def cases(request) -> int:
    return request.param


def test_expressions(fuzz, cases):
    def check(rng: random.Random) -> None:
        text = damaged_bytes(rng, rng.choice(PATTERNS).encode()).decode(errors="replace")
        if rng.random() < 0.1:
            text = rng.choice(("~", "(", "full|", "-", "[", "local(", "{1:")) * rng.randrange(9000)
        if ".py:" not in text:  # whoever writes such a text runs the file
            ends_soon_in_a_value_error(masks.parse, text)

    fuzz(check, cases)


def test_json_texts(fuzz, cases):
    texts = [masks.to_json(masks.parse(text)) for text in PATTERNS]
    texts.append(masks.to_json(masks.stack([masks.local(3), masks.full()]).with_block_size(16)))

    def check(rng: random.Random) -> None:
        ends_soon_in_a_value_error(masks.from_json, damaged_json(rng, rng.choice(texts)))

    fuzz(check, cases)


def saved(things, path) -> list[bytes]:
    """The file that each saves, with a header in alphabetical order: safetensors has none."""
    files = []
    for save in things:
        save(path)
        files.append(file_of(*parts_of(path.read_bytes())))
    return files


def rewrite(path, data: bytes) -> None:
    """Writes a new file: some file systems wait for the disk where an old one is emptied."""
    path.unlink()
    path.write_bytes(data)


def damaged(rng: random.Random, data: bytes) -> bytes:
    """A file with other tensors, if it has some, or other bytes."""
    header, _ = parts_of(data)
    if rng.random() < 0.5 and len(header) > 1:
        return damaged_tensors(rng, data, header["__metadata__"])
    return damaged_file(rng, data)


def test_files(fuzz, cases, tmp_path):
    path = tmp_path / "saved"
    of_masks, of_patterns = (
        saved([partial(masks.save, each) for each in some], path)
        for some in (MASKS, map(masks.parse, PATTERNS))
    )

    def check(rng: random.Random) -> None:
        data = rng.choice([*of_masks, rng.choice(of_patterns)])
        rewrite(path, damaged(rng, data))
        ends_soon_in_a_value_error(masks.load, path)

    fuzz(check, cases)


def test_plans(fuzz, cases, tmp_path):
    path = tmp_path / "saved"
    mask = masks.stack([masks.causal(), masks.local(20)])(200, 16)
    plans = [
        make_plan(mask, 3, round_tokens=32, shared_rows=[2, 5]),
        *(make_plan(mask.head(1), 2, split=split) for split in ("rows", "keys")),
    ]
    files = saved([plan.save for plan in plans], path)

    def check(rng: random.Random) -> None:
        rewrite(path, damaged(rng, rng.choice(files)))
        ends_soon_in_a_value_error(ContextPlan.load, path)

    fuzz(check, cases)
