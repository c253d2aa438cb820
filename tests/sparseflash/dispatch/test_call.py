"""How a call is made ready for its backend, and that every option of a caller comes there."""

import random
import sys
from dataclasses import fields
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import masks
import sparseflash
from masks.registry import MAX_ENTRIES
from sparseflash import backends
from sparseflash.arguments import _RANGES, MAX_VIEWS, lengths_in_range
from sparseflash.backends import cpu
from sparseflash.dispatch.call import NO_MEMORY, Call, Positions, empty_like
from sparseflash.dispatch.plan import compiled_pattern, find_plan, fixed_block_sizes
from sparseflash.dispatch.spec import CallFacts
from sparseflash.nn import SparseAttention
from sparseflash.score import ScoreFunction, checked_score_tensors
from tests.helpers.calls import plan_of


@pytest.fixture
def only_backend(monkeypatch):
    """Makes a copy of the backend "cpu" with other functions the only one."""

    def replaced(**functions):
        if "block_size_for" in functions:
            functions = {"forward_block_size_for": functions["block_size_for"]} | functions
        backend = SimpleNamespace(**vars(cpu) | functions)
        monkeypatch.setattr(backends, "BACKENDS", (backend,))
        compiled_pattern.cache_clear()
        return backend

    yield replaced
    compiled_pattern.cache_clear()


def test_fixed_block_sizes_hold_in_their_context_alone():
    query, mask = torch.randn(1, 1, 64, 16), masks.causal()(64, 16)

    def sizes():
        plan = find_plan(query, query, query, mask, {"backend": "cpu"}, CallFacts())
        return (plan.forward or plan).table.block_size, plan.table.block_size

    before = sizes()
    with fixed_block_sizes((16, 16), (32, 32)):
        assert sizes() == ((16, 16), (32, 32))
    assert sizes() == before != ((16, 16), (32, 32))


def test_outputs_without_data_have_the_layout_of_torch():
    chosen = random.Random(0)
    for _ in range(2000):
        shape = [chosen.choice([1, 2, 3, 8]) for _ in range(4)]
        strides, unit = [0] * 4, 1
        for dim in chosen.sample(range(4), 4):
            strides[dim] = unit
            unit *= shape[dim] * chosen.choice([1, 1, 3])
        if chosen.random() < 0.2:
            strides[chosen.randrange(4)] = 0
        example = torch.empty_strided(shape, strides, dtype=torch.float16, device="meta")
        made, expected = empty_like(example), torch.empty_like(example)
        assert (made.dtype, made.device) == (expected.dtype, expected.device)
        (made, expected), sizes = (x.stride() for x in (made, expected)), enumerate(shape)
        assert all(made[dim] == expected[dim] for dim, size in sizes if size > 1), (shape, strides)


def test_a_backend_gets_the_table_that_it_reads(only_backend):
    backend = only_backend(
        name="tiled",
        block_size_for=lambda spec, mask: (128, 128),
        describe=lambda call, mask, *tensors: {"blocks": str(call.table.block_size)},
    )
    tensors = torch.empty(3, 1, 1, 300, 16)
    mask = masks.local(40)(300, block_size=32)
    plan = plan_of(*tensors, mask)
    assert (plan.backend, plan.spec.block_size) == (backend, (32, 32))
    assert plan.table is mask.table(block_size=(128, 128))
    assert plan_of(*tensors, mask) is plan
    found = sparseflash.explain(*tensors, mask)
    assert found.configuration == {"blocks": "(128, 128)"}


def test_calls_of_many_lengths_leave_plans_to_their_signatures():
    query = torch.randn(1, 1, 64, 16)
    mask = masks.local(8)(64, block_size=16)
    plan = plan_of(query, query, query, mask)
    for length in range(1, MAX_ENTRIES + 2):
        tensor = torch.empty(1, 1, length, 8)
        plan_of(tensor, tensor, tensor, masks.full()(length, block_size=512))
    assert plan_of(query, query, query, mask) is plan


def test_a_forward_pass_may_read_a_table_of_its_own(only_backend):
    backend = only_backend(
        block_size_for=lambda spec, mask: spec.block_size,
        forward_block_size_for=lambda spec, mask: (192, 128),
    )
    query, key, value = torch.randn(3, 1, 2, 300, 16)
    mask = masks.causal()(300, block_size=64)
    plan = plan_of(query, key, value, mask)
    assert plan.forward.backend is plan.backend is backend
    assert plan.forward.spec is plan.spec
    assert plan.table is mask.table()
    assert plan.forward.table is mask.table(block_size=(192, 128))
    read = []
    forward = backend.forward
    backend.forward = lambda call, *tensors: (read.append(call.table), forward(call, *tensors))[1]
    sparseflash.attention(query, key, value, mask)
    assert read == [plan.forward.table]


@pytest.fixture
def counts(monkeypatch):
    """How often tensors are checked, and backends selected."""
    counts = {"check_tensors": 0, "select_passes": 0}
    module = sys.modules["sparseflash.dispatch.plan"]
    monkeypatch.setattr(module, "_checked", {})

    def counted(name, function):
        def call(*arguments):
            counts[name] += 1
            return function(*arguments)

        return call

    for name in counts:
        monkeypatch.setattr(module, name, counted(name, getattr(module, name)))
    return counts


def test_equal_tensors_are_checked_once_and_signatures_planned_once(counts):
    mask = masks.local(8)(40, block_size=16)
    query, key, value = torch.randn(3, 2, 4, 40, 16)
    for _ in range(3):
        first = sparseflash.attention(query, key, value, mask)
    assert counts == {"check_tensors": 1, "select_passes": 1}
    for change in ({"scale": 0.5}, {"return_lse": True, "softcap": 5.0}, {"backend": "cpu"}):
        sparseflash.attention(query, key, value, mask, **change)
    assert counts == {"check_tensors": 1, "select_passes": 4}
    torch.use_deterministic_algorithms(True)
    try:
        sparseflash.attention(query, key, value, mask)
    finally:
        torch.use_deterministic_algorithms(False)
    other = sparseflash.attention(2 * query, key, value, mask)
    assert not torch.equal(first, other)
    assert counts == {"check_tensors": 1, "select_passes": 5}
    sparseflash.attention(*(x[:1] for x in (query, key, value)), mask)
    assert counts == {"check_tensors": 2, "select_passes": 6}


BAD = {
    "value of another length": ({"value": torch.randn(2, 4, 41, 16)}, "value must share batch"),
    "value of another dtype": ({"value": torch.randn(2, 4, 40, 16).half()}, "value must be torch"),
    "query of another length": ({"query": torch.randn(2, 4, 39, 16)}, "mask must have seq_len"),
    "heads that do not divide": ({"query": torch.randn(2, 6, 40, 16)}, "key heads must divide"),
    "scale": ({"scale": -1.0}, "scale must be positive"),
    "scale of another type": ({"scale": [1.0]}, "scale must be a number"),
    "deterministic": ({"deterministic": 1}, "deterministic must be a bool, got 1"),
    "planned order": ({"planned_order": 0}, "planned_order must be a bool, got 0"),
    "dropout": ({"dropout_p": 1.0}, r"dropout_p must be in \[0, 1\)"),
    "seed": ({"seed": 0.5}, "seed must be an int"),
    "too long": ({"key_lengths": torch.tensor([41, 0])}, "key_lengths must be 0 to 40"),
    "lengths of another batch": ({"key_lengths": torch.tensor([4])}, "key_lengths must be"),
    "sinks": ({"sinks": torch.zeros(3)}, "sinks must have shape"),
    "bias": ({"bias": torch.zeros(1, 7)}, "bias must have shape"),
    "backend": ({"backend": "gpu"}, "backend must be 'auto' or one of"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD)
def test_a_signature_that_was_checked_lets_no_other_call_pass(change, message):
    mask = masks.local(8)(40, block_size=16)
    names = ("query", "key", "value")
    right = dict(zip(names, torch.randn(3, 2, 4, 40, 16), strict=True))
    lengths = torch.tensor([40, 7])
    others = ({"sinks": torch.zeros(4)}, {"dropout_p": 0.5}, {"key_lengths": lengths})
    booleans = ({"deterministic": True}, {"planned_order": False})
    for given in ({}, *others, *booleans):
        sparseflash.attention(**right, mask=mask, **given)
    with pytest.raises((TypeError, ValueError), match=message):
        sparseflash.attention(**(right | {"mask": mask} | change))


class OnGpu(torch.Tensor):
    """A tensor of the CPU that says that it is on a GPU."""

    is_cuda, device = True, torch.device("cuda")


@pytest.mark.parametrize("capturing", [False, True])
def test_lengths_on_a_gpu_are_clamped_while_a_graph_is_captured_and_else_checked(
    capturing, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    lengths = torch.tensor([-3, 0, 10, 99]).as_subclass(OnGpu)
    device = torch.device("cpu")
    if capturing:
        clamped = lengths_in_range(lengths, 10, device)
        assert clamped.tolist() == [0, 0, 10, 10]
        assert clamped.dtype == torch.int32
        return
    for _ in range(2):
        with pytest.raises(ValueError, match=r"must be 0 to 10, got \[-3, 0, 10, 99\]"):
            lengths_in_range(lengths, 10, device)
    lengths = torch.tensor([10, 0, 0, -1])
    with pytest.raises(ValueError, match="key_lengths must be 0 to 10"):
        lengths_in_range(lengths, 10, device)


def test_lengths_on_a_gpu_are_read_once_and_after_each_change(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    read, tolist, device = [], OnGpu.tolist, torch.device("cpu")
    monkeypatch.setattr(OnGpu, "tolist", lambda lengths: read.append(1) or tolist(lengths))
    lengths = torch.tensor([3, 10]).as_subclass(OnGpu)
    for k_len in (10, 10, 11):  # layers
        lengths_in_range(lengths, k_len, device)
    assert len(read) == 1
    with pytest.raises(ValueError, match=r"must be 0 to 9, got \[3, 10\]"):
        lengths_in_range(lengths, 9, device)
    lengths.data.fill_(99)  # a change that torch does not count
    assert tolist(lengths_in_range(lengths, 10, device)) == [10, 10]
    lengths += 1
    with pytest.raises(ValueError, match=r"must be 0 to 10, got \[100, 100\]"):
        lengths_in_range(lengths, 10, device)
    batch, read[:] = torch.tensor([[3, 10], [11, 12]]).as_subclass(OnGpu), []
    for _ in range(2):  # steps of a model that makes a new view in each
        lengths_in_range(batch[0], 10, device)
    assert len(read) == 1
    with pytest.raises(ValueError, match=r"must be 0 to 10, got \[11, 12\]"):
        lengths_in_range(batch[1], 10, device)
    batch[0, 0] = 11
    with pytest.raises(ValueError, match=r"must be 0 to 10, got \[11, 10\]"):
        lengths_in_range(batch[0], 10, device)
    long = torch.full((2 * MAX_VIEWS,), 10).as_subclass(OnGpu)
    for i in range(len(long)):  # other views of one tensor in each step
        lengths_in_range(long[i : i + 1], 10, device)
    assert len(_RANGES[long[:1]._base]) <= MAX_VIEWS
    with torch.inference_mode():
        lengths, read[:] = torch.tensor([3, 10]).as_subclass(OnGpu), []
    for _ in range(2):
        lengths_in_range(lengths, 10, device)
    assert len(read) == 2  # their changes are not counted


def test_lengths_on_the_cpu_are_refused_while_a_graph_is_captured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ValueError, match="must be on the CUDA device while a CUDA graph"):
        lengths_in_range(torch.tensor([3, 10]), 10, torch.device("cuda"))


def test_positions_that_a_graph_made_are_made_again_for_other_calls(monkeypatch):
    first = torch.tensor([0, 32, 64]).as_subclass(OnGpu)
    positions = Positions(first, first, 100, heads=8, first_head=4)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    captured = positions.of_blocks()
    assert captured.tolist() == [100, 8, 4, 0, 32, 64, 0, 32, 64]
    captured.zero_()  # as the memory of a graph before its first replay
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert positions.of_blocks()[:3].tolist() == [100, 8, 4]
    assert positions.of_blocks() is positions.of_blocks()


def test_a_call_with_other_memory_is_the_same_call():
    names = [each.name for each in fields(Call)]
    call = Call(*(object() for _ in names))  # pyright: ignore[reportArgumentType]
    others = ("more", "results", "max_logits", "gradients", "shared")
    memory: dict[str, Any] = {name: object() for name in others}
    found = call.with_memory(**memory)
    for name in names:
        expected = memory.get(name, getattr(call, name))
        assert getattr(found, name) is expected, name
    assert call.with_memory(None).gradients is NO_MEMORY


@pytest.fixture
def passed(only_backend):
    """Every (pass, call) that the backend "cpu", now the only one, is given."""
    found = []

    def forward(call, *tensors):
        found.append(("forward", call))
        return cpu.forward(call, *tensors)

    def backward(call, *rest):
        found.append(("backward", call))
        return cpu.backward(call, *rest)

    only_backend(forward=forward, backward=backward)
    return found


LENGTH = 40
HALF = sparseflash.ScoreFunction("half of it", lambda s, b, h, q, k: (s / 2, 0.5))
FACTS = {
    "scale": 0.3,
    "softcap": 5.0,
    "dropout_p": 0.25,
    "precision": "tf32",
    "deterministic": False,
    "planned_order": True,
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
    assert [which for which, _ in passed] == ["forward", "backward"]
    for _, given in passed:
        spec = given.spec
        assert {name: getattr(spec, name) for name in FACTS} == FACTS
        assert (spec.score, spec.bias, spec.has_key_lengths) == (HALF.name, True, True)
        assert (given.seed, given.key_lengths.tolist()) == (7, [30])
        assert given.key_lengths.dtype == torch.int32
        assert torch.equal(given.bias, bias)


def test_options_of_packed_sequences_come_to_the_backend(passed):
    bounds = torch.tensor([0, 15, LENGTH])
    attend = partial(sparseflash.attention_varlen, *tensors(LENGTH, 2, 8), bounds, bounds)
    out = attend(seed=7, **FACTS)
    ((_, given),) = passed
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
    assert [given.spec.dropout_p for _, given in passed] == [0.25, 0.0]
    assert not any(given.spec.deterministic for _, given in passed)
    module.options["backend"] = "none"
    with pytest.raises(ValueError, match="backend must be"):
        module(x)


def test_options_of_an_explained_call_are_those_that_are_measured(passed, monkeypatch):
    monkeypatch.setattr("sparseflash._explain.SECONDS", 0.0)
    bias, lengths = torch.randn(2, 2 * LENGTH - 1), torch.tensor([30])
    sinks, mask = torch.zeros(2), masks.local(3)(LENGTH, 16)
    options = FACTS | {"score": HALF, "bias": bias, "key_lengths": lengths, "sinks": sinks}
    found = sparseflash.explain(*tensors(1, 2, LENGTH, 8), mask, measure=True, **options)
    assert {which for which, _ in passed} == {"forward", "backward"}
    for spec in (found.spec, *(given.spec for _, given in passed)):
        assert {name: getattr(spec, name) for name in FACTS} == FACTS
        assert (spec.score, spec.bias, spec.has_key_lengths) == (HALF.name, True, True)


def sums_of_scores(score, batch, head, query, key, slopes):
    return score - slopes[head] * (query - key).abs()


SLOPES = sparseflash.ScoreFunction.from_torch("slopes of split calls", sums_of_scores, (float,))


@pytest.fixture
def fast_without_sums(monkeypatch):
    """Two backends: a faster one that computes no sums of dS, and one that does; and which of them
    ran which pass.
    """
    ran = []

    def named(name, extras):
        def forward(*arguments):
            ran.append(("forward", name))
            return cpu.forward(*arguments)

        def backward(*arguments):
            ran.append(("backward", name))
            return cpu.backward(*arguments)

        functions = {"name": name, "extras": extras, "forward": forward, "backward": backward}
        return SimpleNamespace(**vars(cpu) | functions)

    sums = {extra for extra in cpu.extras if extra.startswith("gradient of ")}
    assert len(sums) == 3
    own = (named("fast", cpu.extras - sums), named("complete", cpu.extras))
    monkeypatch.setattr(backends, "BACKENDS", own)
    monkeypatch.setattr("sparseflash._explain.SECONDS", 0.0)
    compiled_pattern.cache_clear()
    yield ran
    compiled_pattern.cache_clear()


@pytest.mark.parametrize("of", ["bias", "score tensors", "blocks", "nothing"])
def test_a_faster_backend_computes_all_but_sums_of_ds_if_it_lacks_these_alone(
    fast_without_sums, of
):
    tensors = [x.requires_grad_() for x in torch.randn(3, 2, 4, 40, 16).double().unbind()]
    mask, options, extra = masks.local(9)(40, 16), {}, []
    if of == "bias":
        extra = [torch.randn(4, 79).double().requires_grad_()]
        options["bias"] = extra[0]
    elif of == "score tensors":
        extra = [torch.rand(4).double().requires_grad_()]
        options |= {"score": SLOPES, "score_tensors": extra}
    elif of == "blocks":
        extra = [torch.randn(2, 4, 3, 3).requires_grad_()]
        mask = mask.select_topk(extra[0], 2)
    found, grads = [], []
    for _ in range(2):  # the second call finds the plan
        out, lse, most = sparseflash.attention(
            *tensors, mask, return_lse=True, return_max_logits=True, **options
        )
        grads.append(torch.autograd.grad(out.square().sum() + lse.sum(), [*tensors, *extra]))
        found.append((out, lse, most))
    backend = "complete" if of == "blocks" else "fast"
    two = of in ("bias", "score tensors")
    passes = [("forward", backend), ("backward", backend)]
    assert fast_without_sums == (passes + [("backward", "complete")] * two) * 2
    explained = sparseflash.explain(*tensors, mask, **options)
    assert explained.backend == backend
    shown = "by the backend complete" if two else None
    assert explained.configuration.get("gradients of bias and score tensors") == shown
    assert backend not in explained.why_not
    assert sparseflash.explain(*tensors, mask, **options, measure=True).measured is not None
    if extra:
        fast_without_sums.clear()
        out = sparseflash.attention(*(x.detach() for x in tensors), mask, **options)
        torch.autograd.grad(out.sum(), extra)
        assert fast_without_sums == [("forward", backend), ("backward", "complete")]
    with torch.no_grad():
        sparseflash.attention(*tensors, mask, **options)
    assert fast_without_sums[-1] == ("forward", "fast")
    expected = sparseflash.attention(
        *tensors, mask, return_lse=True, return_max_logits=True, backend="complete", **options
    )
    of_expected = torch.autograd.grad(
        expected[0].square().sum() + expected[1].sum(), [*tensors, *extra]
    )
    for results in found:
        torch.testing.assert_close(results, expected)
    for each in grads:
        torch.testing.assert_close(each, of_expected)
    if extra:
        with pytest.raises(sparseflash.BackendError, match="fast: does not support gradient of"):
            sparseflash.attention(*tensors, mask, backend="fast", **options)


TABLE_OF_HEADS = ScoreFunction.from_torch(
    "table of heads", lambda s, b, head, q, k, table: s + table[head, k % 5], (float,)
)


@pytest.mark.parametrize("backend", ["cpu", "triton"])
@pytest.mark.parametrize("q_len", [20, 3])  # the second one by kernels of few queries
def test_a_call_with_some_heads_is_a_part_of_the_call_with_all_of_them(backend, q_len):
    """Dropout and score functions depend on the index of a head among all heads."""
    device = "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"
    batch, heads, kv_heads, k_len, block = 2, 4, 2, 32, 16
    options = {"dropout_p": 0.3, "score": TABLE_OF_HEADS, "backend": backend}
    mask = masks.random(0.7, seed=1)((q_len, k_len), block, device=device)
    first = [torch.arange(0, n, block, device=device) for n in (q_len, k_len)]
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, generator=generator).to(device)

    query, grad_out = (normal(batch, heads, q_len, 16) for _ in range(2))
    key, value = (normal(batch, kv_heads, k_len, 16) for _ in range(2))
    bias, table = normal(heads, 2 * k_len - 1), normal(heads, 5)

    def results(number, groups):
        mine = slice(number * heads // groups, (number + 1) * heads // groups)
        of_keys = slice(number * kv_heads // groups, (number + 1) * kv_heads // groups)
        tensors = (query[:, mine], key[:, of_keys], value[:, of_keys])
        tensors = [x.contiguous() for x in tensors]
        reads = [table.clone().requires_grad_()]
        own_bias = bias[mine].contiguous().requires_grad_()
        facts = CallFacts.of(mask, False, own_bias, False, reads)._replace(positions=True)
        plan = find_plan(*tensors, mask, options, facts)
        call = Call(plan, seed=5, bias=own_bias.detach())
        call.positions = Positions(*first, k_len).with_heads(heads, mine.start)
        lengths = q_len, k_len
        score = TABLE_OF_HEADS.name
        call.score_tensors = checked_score_tensors(score, reads, query, lengths, False)
        with torch.no_grad():
            out, lse = call.forward(*tensors)
            saved, needs = (*tensors, out, lse), (True, True, True, True, False, True)
            grads = call.backward(grad_out[:, mine].contiguous(), None, saved, needs)
        return out, lse, *grads[:3], grads[3], grads[5]

    whole = results(0, 1)
    *of_heads, biases, reads = zip(results(0, 2), results(1, 2), strict=True)
    found = [*(torch.cat(both, 1) for both in of_heads), torch.cat(biases), sum(reads)]
    for mine, expected in zip(found, whole, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)
