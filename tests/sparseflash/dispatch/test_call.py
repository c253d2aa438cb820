"""How a call is made ready for its backend, and that every option of a caller comes there."""

import sys
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import masks
import sparseflash
from masks.lookup_table import LookupTable
from sparseflash.backends import BACKENDS, select
from sparseflash.dispatch.call import _compiled, block_mask, prepare, spec_of
from sparseflash.dispatch.spec import AttentionSpec
from sparseflash.nn import SparseAttention

explanation = sys.modules["sparseflash.explain"]


def forget_calls():
    """What is known of calls by their facts, and what the masks of patterns keep of them."""
    select.cache_clear()
    _compiled.cache_clear()


@pytest.fixture
def tiled(monkeypatch):
    """A backend that reads tables of blocks of 128, whatever those of the mask."""
    backend = replace(
        BACKENDS[0],
        name="tiled",
        tiling=lambda spec: (128, 128),
        describe=lambda query, key, value, table, spec: {"blocks": str(table.block_size)},
    )
    monkeypatch.setattr("sparseflash.backends.BACKENDS", (backend,))
    forget_calls()
    yield backend
    forget_calls()


def test_a_backend_gets_the_table_that_it_reads(tiled):
    tensors = torch.empty(2, 1, 1, 300, 16)
    mask = masks.local(40)(300, block_size=32)
    call = prepare(*tensors, mask)
    assert (call.backend, call.spec.block_size) == (tiled, (32, 32))
    assert call.table is mask.table(block_size=(128, 128))
    assert call.table is prepare(*tensors, mask).table
    tensors = [*tensors, tensors[0]]
    found = sparseflash.explain(mask, *tensors, measure=False)
    assert found.configuration == {"blocks": "(128, 128)"}


@pytest.fixture
def times_checked(monkeypatch):
    """How often tensors are checked."""
    checks = []
    module = sys.modules["sparseflash.attention"]
    check = module.check_tensors

    def counted(*tensors):
        checks.append(tensors)
        check(*tensors)

    monkeypatch.setattr(module, "check_tensors", counted)
    return checks


def test_what_is_the_same_for_a_kind_of_calls_is_checked_once(times_checked):
    mask = masks.local(8)(40, block_size=16)
    query, key, value = torch.randn(3, 2, 4, 40, 16)
    for _ in range(3):
        first = sparseflash.attention(query, key, value, mask)
    assert len(times_checked) == 1
    for change in ({"scale": 0.5}, {"return_lse": True, "softcap": 5.0}, {"backend": "cpu"}):
        sparseflash.attention(query, key, value, mask, **change)
    assert len(times_checked) == 4
    torch.use_deterministic_algorithms(True)
    try:
        sparseflash.attention(query, key, value, mask)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(times_checked) == 5
    other = sparseflash.attention(2 * query, key, value, mask)
    assert len(times_checked) == 5
    assert not torch.equal(first, other)


BAD = {
    "value of another length": ({"value": torch.randn(2, 4, 41, 16)}, "value must have the shape"),
    "value of another dtype": ({"value": torch.randn(2, 4, 40, 16).half()}, "value must be torch"),
    "query of another length": ({"query": torch.randn(2, 4, 39, 16)}, "mask must have seq_len"),
    "heads that do not divide": ({"query": torch.randn(2, 6, 40, 16)}, "key heads must divide"),
    "scale": ({"scale": -1.0}, "scale must be positive"),
    "scale of another type": ({"scale": [1.0]}, "scale must be a number"),
    "dropout": ({"dropout_p": 1.0}, r"dropout_p must be in \[0, 1\)"),
    "seed": ({"seed": 0.5}, "seed must be an int"),
    "too long": ({"key_lengths": torch.tensor([41, 0])}, "key_lengths must be 0 to 40"),
    "lengths of another batch": ({"key_lengths": torch.tensor([4])}, "key_lengths must be"),
    "sinks": ({"sinks": torch.zeros(3)}, "sinks must be of shape"),
    "bias": ({"bias": torch.zeros(1, 7)}, "bias must be of shape"),
    "backend": ({"backend": "gpu"}, "backend must be 'auto' or one of"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD)
def test_a_kind_that_was_checked_lets_nothing_else_pass(change, message):
    mask = masks.local(8)(40, block_size=16)
    names = ("query", "key", "value")
    right = dict(zip(names, torch.randn(3, 2, 4, 40, 16), strict=True))
    lengths = torch.tensor([40, 7])
    for given in ({}, {"key_lengths": lengths}, {"sinks": torch.zeros(4)}, {"dropout_p": 0.5}):
        sparseflash.attention(**right, mask=mask, **given)
    with pytest.raises((TypeError, ValueError), match=message):
        sparseflash.attention(**(right | {"mask": mask} | change))


def test_a_spec_says_how_far_blocks_fill_tiles():
    tensors = torch.empty(2, 1, 1, 512, 16)

    def fills(pattern, block_size):
        mask = block_mask(pattern(512, block_size), *tensors)
        spec = spec_of(*tensors, mask, False, None, 0.0, None, 0.0, "ieee")
        return spec.fill, spec.small_fill

    assert fills(masks.full(), 16) == (1.0, 1.0)
    assert fills(masks.local(1), 256) == (1.0, 1.0)
    assert fills(masks.local(1, align="top-left"), 32)[0] < 0.8
    one_of_each_row = masks.pattern(lambda q, k: q // 32 == k // 32)
    assert fills(one_of_each_row, 32) == (0.25, 0.5)


class OnGpu(torch.Tensor):
    """A tensor of the CPU that says that it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize("capturing", [False, True])
def test_lengths_on_a_gpu_are_clamped_while_a_graph_is_captured_and_else_checked(
    capturing, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    lengths = torch.tensor([-3, 0, 10, 99]).as_subclass(OnGpu)
    tensors = torch.empty(2, 4, 1, 10, 16)
    if capturing:
        call = prepare(*tensors, masks.full(), lengths)
        assert call.key_lengths.tolist() == [0, 0, 10, 10]
        assert call.key_lengths.dtype == torch.int32
        return
    with pytest.raises(ValueError, match=r"key_lengths must be 0 to 10, got \[-3, 0, 10, 99\]"):
        prepare(*tensors, masks.full(), lengths)
    lengths = torch.tensor([10, 0, 0, -1])
    with pytest.raises(ValueError, match="key_lengths must be 0 to 10"):
        prepare(*tensors, masks.full(), lengths)


@dataclass(frozen=True)
class Passed:
    """What a backend was given in one of its passes."""

    which: str
    table: LookupTable
    key_lengths: torch.Tensor | None
    seed: int
    spec: AttentionSpec
    bias: torch.Tensor | None


@pytest.fixture
def passed(monkeypatch):
    """Everything that the backend "cpu", now the only one, is given."""
    cpu, found = BACKENDS[0], []

    def forward(query, key, value, *rest, bias=None):
        found.append(Passed("forward", *rest, bias))
        return cpu.forward(query, key, value, *rest, **({} if bias is None else {"bias": bias}))

    def backward(*arguments, bias=None):
        found.append(Passed("backward", *arguments[7:11], bias))
        return cpu.backward(*arguments, **({} if bias is None else {"bias": bias}))

    watched = (replace(cpu, forward=forward, backward=backward),)
    monkeypatch.setattr("sparseflash.backends.BACKENDS", watched)
    monkeypatch.setattr(explanation, "BACKENDS", watched)
    monkeypatch.setattr(explanation, "SECONDS", 1e-3)
    forget_calls()
    yield found
    forget_calls()


LENGTH = 40
HALF = sparseflash.ScoreFunction("half of it", lambda s, b, h, q, k: (s / 2, 0.5))
FACTS = {
    "scale": 0.3,
    "softcap": 5.0,
    "dropout_p": 0.25,
    "precision": "tf32",
    "deterministic": False,
}


def tensors(*shape):
    return [torch.randn(shape, requires_grad=True) for _ in range(3)]


class Watching(TorchDispatchMode):
    """Under a dispatch mode attention is an operator, as in a compiled graph."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("traced", [False, True])
def test_options_come_to_both_passes(passed, traced):
    bias, lengths = torch.randn(2, 2 * LENGTH - 1), torch.tensor([30])
    attend = partial(sparseflash.attention, score=HALF, bias=bias, key_lengths=lengths, seed=7)
    with Watching() if traced else torch.enable_grad():
        attend(*tensors(1, 2, LENGTH, 8), masks.local(3), **FACTS).sum().backward()
    assert [given.which for given in passed] == ["forward", "backward"]
    for given in passed:
        assert {name: getattr(given.spec, name) for name in FACTS} == FACTS
        spec = given.spec
        assert (spec.score, spec.bias, spec.has_key_lengths) == (HALF.name, True, True)
        assert (given.seed, given.key_lengths.tolist()) == (7, [30])
        assert given.key_lengths.dtype == torch.int32
        assert torch.equal(given.bias, bias)


def test_options_of_packed_sequences_come_to_the_backend(passed):
    bounds = torch.tensor([0, 15, LENGTH])
    attend = partial(sparseflash.attention_varlen, *tensors(LENGTH, 2, 8), bounds, bounds)
    out = attend(seed=7, **FACTS)
    (given,) = passed
    assert {name: getattr(given.spec, name) for name in FACTS} == FACTS
    assert given.seed == 7
    assert isinstance(out, torch.Tensor)
    _, lse = attend(sinks=torch.full((2,), 50.0), return_lse=True)
    assert (lse >= 50).all()
    with pytest.raises(ValueError, match="backend must be"):
        attend(backend="none")


def test_options_of_a_module_come_to_the_backend(passed):
    module = SparseAttention(16, 2, dropout=0.25, deterministic=False)
    x = torch.randn(1, LENGTH, 16)
    module(x)
    module.eval()(x)
    assert [given.spec.dropout_p for given in passed] == [0.25, 0.0]
    assert not any(given.spec.deterministic for given in passed)
    module.backend = "none"
    with pytest.raises(ValueError, match="backend must be"):
        module(x)


def test_options_of_an_explained_call_are_those_that_are_measured(passed):
    bias, lengths = torch.randn(2, 2 * LENGTH - 1), torch.tensor([30])
    sinks, mask = torch.zeros(2), masks.local(3)(LENGTH, 16)
    options = FACTS | {"score": HALF, "bias": bias, "key_lengths": lengths, "sinks": sinks}
    found = sparseflash.explain(mask, *tensors(1, 2, LENGTH, 8), **options)
    assert {given.which for given in passed} == {"forward", "backward"}
    for spec in (found.spec, *(given.spec for given in passed)):
        assert {name: getattr(spec, name) for name in FACTS} == FACTS
        assert (spec.score, spec.bias, spec.has_key_lengths) == (HALF.name, True, True)
