"""Launches that are repeated by writing what has changed into their packed parameters."""

import ctypes
import pickle
import re
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton import knobs
from triton.backends.compiler import GPUTarget

import masks
from sparseflash import attention
from sparseflash.backends.triton_common import relaunch
from sparseflash.backends.triton_common.relaunch import Launched, store, try_relaunch
from sparseflash.dispatch.call import Plan
from sparseflash.testing import make_inputs

TYPES = {
    "query": "*bf16",
    "query_dim": "constexpr",
    "missing": "constexpr",
    "rows": "i32",
    "seed": "i64",
    "least": "u32",
    "scale": "fp32",
    "GROUP": "constexpr",
}
CONSTANT = {
    "query_dim": 1,
    "missing": None,
    "rows": 7,
    "least": 2**32 - 1,
    "scale": 0.5,
    "GROUP": 2,
}
SCRATCH = [8, 8]  # bytes of two addresses that Triton passes last
SIZES = [8, 4, 8, 4, 4, *SCRATCH]


class Driver:
    """A CUDA driver that records what it is asked to launch."""

    def __init__(self, sizes):
        self.sizes, self.launched, self.context = sizes, [], 3

    def cuFuncGetParamInfo(self, function, index, offset, size):
        if index == len(self.sizes):
            return 1
        size._obj.value = self.sizes[index]
        return 0

    def cuLaunchKernelEx(self, config, function, parameters, _):
        if self.context != 3:
            return 201
        values = [ctypes.string_at(parameters[i], size) for i, size in enumerate(self.sizes)]
        fields = [getattr(config._obj, name) for name, _ in config._obj._fields_]
        self.launched.append((function.value, fields, values))
        return 0

    def cuCtxGetCurrent(self, found):
        found._obj.value = self.context
        return 0

    def cuCtxSetCurrent(self, context):
        self.context = context
        return 0


@pytest.fixture
def driver(monkeypatch):
    fake = Driver(SIZES)
    active = SimpleNamespace(get_current_device=lambda: 1, get_current_stream=lambda device: 9)
    monkeypatch.setattr(relaunch, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(relaunch, "_driver", lambda: fake)
    monkeypatch.setattr(relaunch, "_has_parameter_info", lambda: True)
    return fake


def launched(query: torch.Tensor, seed: int, types=TYPES, **metadata) -> Launched:
    facts = {"num_ctas": 1, "launch_cooperative_grid": False, "launch_pdl": False}
    facts |= {"global_scratch_size": 0, "profile_scratch_size": 0}
    facts |= {"target": GPUTarget("cuda", 90, 32)} | metadata
    compiled: Any = SimpleNamespace(
        function=5,
        packed_metadata=(4, 1, 1024),
        src=SimpleNamespace(signature=types),
        metadata=SimpleNamespace(**facts),
    )
    values = CONSTANT | {"query": query, "seed": seed}
    return Launched(compiled, tuple(values[name] for name in types), (3, 2, 1))


def packed(query: torch.Tensor, seed: int) -> list[bytes]:
    values = (
        *(ctypes.c_uint64(query.data_ptr()), ctypes.c_int32(7), ctypes.c_int64(seed)),
        *(ctypes.c_uint32(2**32 - 1), ctypes.c_float(0.5), ctypes.c_uint64(0), ctypes.c_uint64(0)),
    )
    return [bytes(value) for value in values]


@pytest.fixture
def table():
    return masks.full()(64, block_size=64).table()


CHANGING = ("query", "missing", "seed")


def repeat(table, *tensors):
    """Makes a launch on each tensor, with its place for a seed; whether each was a repetition."""
    repeated = []
    for seed, query in enumerate(tensors):
        repeated.append(try_relaunch(table.cache, ("signature",), (query.data_ptr(), None, seed)))
        if not repeated[-1]:
            store(table.cache, ("signature",), launched(query, seed), CHANGING)
    return repeated


def test_a_launch_is_repeated_from_the_third_time_on_with_what_has_changed(driver, table):
    tensors = torch.zeros(5, 8).unbind()
    assert repeat(table, *tensors) == [False, False, True, True, True]
    config = [3, 2, 1, 4 * 32, 1, 1, 1024, 9, None, 0]  # grid, block, bytes, stream, no attributes
    wanted = [(5, config, packed(tensors[seed], seed)) for seed in (2, 3, 4)]
    assert driver.launched == wanted


def test_the_layout_of_launches_is_that_of_the_driver():
    """CUlaunchConfig of cuda.h: seven unsigned int, a pointer, a pointer, an unsigned int."""
    config = relaunch.LaunchConfig
    fields = config.shared_memory, config.stream, config.attributes, config.num_attributes
    assert [field.offset for field in fields] == [24, 32, 40, 48]
    assert ctypes.sizeof(config) == 56


def test_signatures_and_caches_are_told_apart(driver, table):
    tensors = torch.zeros(3, 8).unbind()
    repeat(table, *tensors)
    changed = (tensors[0].data_ptr(), None, 0)
    assert not try_relaunch(table.cache, ("another signature",), changed)
    assert not try_relaunch(masks.full()(64, block_size=64).table().cache, ("signature",), changed)


@pytest.mark.parametrize("owner", ["table", "mask"])
def test_what_is_copied_begins_with_no_launches(driver, owner):
    mask = masks.full()(64, block_size=64)
    repeat(mask.table(), *torch.zeros(3, 8).unbind())
    mask.cache["facts"] = 1
    original = mask if owner == "mask" else mask.table()
    assert original.cache
    assert not pickle.loads(pickle.dumps(original)).cache


@pytest.mark.parametrize(
    "metadata",
    [
        {"target": GPUTarget("hip", "gfx942", 64)},
        {"num_ctas": 2},
        {"launch_cooperative_grid": True},
        {"launch_pdl": True},
        {"global_scratch_size": 16},
        {"profile_scratch_size": 16},
    ],
)
def test_what_takes_more_than_parameters_is_left_to_triton(driver, metadata):
    assert relaunch.pack_launch(launched(torch.zeros(8), 0, **metadata), CHANGING) is None


def test_an_old_driver_leaves_launches_to_triton(driver, monkeypatch):
    assert relaunch.pack_launch(launched(torch.zeros(8), 0), CHANGING) is not None
    monkeypatch.setattr(relaunch, "_has_parameter_info", lambda: False)
    assert relaunch.pack_launch(launched(torch.zeros(8), 0), CHANGING) is None


@pytest.mark.parametrize("sizes", [[*SIZES, 8], SIZES[:-1], [8, 8, 8, 4, 4, *SCRATCH], []])
def test_a_kernel_of_other_parameters_is_left_to_triton(driver, sizes):
    driver.sizes = sizes
    assert relaunch.pack_launch(launched(torch.zeros(8), 0), CHANGING) is None


def test_a_type_of_parameter_that_is_not_known_is_left_to_triton(driver):
    types = TYPES | {"rows": "fp8"}
    assert relaunch.pack_launch(launched(torch.zeros(8), 0, types), CHANGING) is None


def test_what_cannot_be_packed_is_tried_once(driver, table, monkeypatch):
    tried = []
    monkeypatch.setattr(relaunch, "_has_parameter_info", lambda: bool(tried.append(1)))
    assert repeat(table, *torch.zeros(5, 8).unbind()) == [False] * 5
    assert tried == [1]


def test_a_launch_that_the_driver_refuses_is_left_to_triton(driver, table):
    tensors = torch.zeros(3, 8).unbind()
    repeat(table, *tensors)
    driver.context = 4
    assert not try_relaunch(table.cache, ("signature",), (tensors[0].data_ptr(), None, 0))
    assert (driver.context, len(driver.launched)) == (4, 1)


def test_a_thread_without_a_context_gets_that_of_the_kernel(driver, table):
    tensors = torch.zeros(3, 8).unbind()
    repeat(table, *tensors)
    driver.context = 0
    assert try_relaunch(table.cache, ("signature",), (tensors[0].data_ptr(), None, 0))
    assert (driver.context, len(driver.launched)) == (3, 2)


class Refusing:
    """The place of a value that the driver may refuse."""

    value: int
    refuses: bool

    def __init__(self, refuses: bool):
        self.__dict__.update(value=1, refuses=refuses)

    def __setattr__(self, name, value):
        if name == "value" and self.refuses:
            raise relaunch.DriverError
        self.__dict__[name] = value


def test_all_values_are_written_after_one_was_refused(driver):
    first, second = ctypes.c_uint64(1), Refusing(True)
    compiled = launched(torch.zeros(8), 0).compiled
    packed = relaunch.PackedLaunch(compiled, (1, 1, 1), [first], [first, second])
    driver.sizes = [8]
    assert not packed.repeat((2, 2))
    second.refuses = False
    assert packed.repeat((1, 1))
    assert first.value == 1


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_a_launch_with_hooks_is_left_to_triton(driver, table, hook):
    tensors = torch.zeros(3, 8).unbind()
    repeat(table, *tensors)
    chain, listener = getattr(knobs.runtime, hook), lambda metadata: None
    chain.add(listener)
    try:
        assert not try_relaunch(table.cache, ("signature",), (tensors[0].data_ptr(), None, 0))
    finally:
        chain.remove(listener)
    assert try_relaunch(table.cache, ("signature",), (tensors[0].data_ptr(), None, 0))


OPTIONS = {
    "plain": {},
    "dropout": {"dropout_p": 0.2},
    "padded": {"key_lengths": torch.tensor([100, 300])},
    "bias": {"bias": True},
}


def passes(mask, backend, head_dim, seed, q_len, options):
    """out, lse and the gradients of one call on tensors of its own."""
    options = dict(options)
    inputs = make_inputs(
        2, 4, q_len, 300, head_dim, kv_heads=2, dtype=torch.bfloat16, device="cuda", seed=seed
    )
    leaves = [x.requires_grad_() for x in inputs[:3]]
    if "bias" in options:
        generator = torch.Generator("cuda").manual_seed(seed)
        shape = (4, q_len + 300 - 1)
        options["bias"] = torch.randn(shape, generator=generator, device="cuda")
    if "dropout_p" in options:
        options["seed"] = seed - 2**40
    out, lse = attention(*leaves, mask, backend=backend, return_lse=True, **options)
    return out, lse, *torch.autograd.grad(out, leaves, inputs[3]), *inputs


@pytest.mark.gpu
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("q_len", [2, 260])
@pytest.mark.parametrize("head_dim", [64, 128, 192])
@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_repeated_launches_give_what_first_ones_give(backend, head_dim, q_len, option):
    if backend == "hopper" and (torch.cuda.get_device_capability() != (9, 0) or option == "bias"):
        pytest.skip("hopper cannot serve it")
    pattern = masks.local(70, align="bottom-right") | masks.global_tokens(1)
    mask = pattern((q_len, 300), block_size=128, device="cuda")
    call = (backend, head_dim)
    repeated = [passes(mask, *call, n, q_len, OPTIONS[option]) for n in range(4)]
    (plan,) = [stored for stored in mask.cache.values() if isinstance(stored, Plan)]
    assert any(isinstance(stored, relaunch.PackedLaunch) for stored in plan.cache.values())
    for n, results in enumerate(repeated):
        fresh = pattern((q_len, 300), block_size=128, device="cuda")
        first = passes(fresh, *call, n, q_len, OPTIONS[option])
        for result, wanted in zip(results, first, strict=True):
            assert torch.equal(result, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_threads_do_not_launch_on_the_tensors_of_one_another(backend):
    if backend == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("hopper cannot serve it")
    mask = masks.local(70)(300, block_size=128, device="cuda")
    inputs = [torch.randn(3, 1, 1, 300, 128, device="cuda").bfloat16() for _ in range(8)]
    wanted = [attention(*x, mask, backend=backend) for x in inputs]

    def right(n: int) -> bool:
        outs = [attention(*inputs[n], mask, backend=backend) for _ in range(200)]
        return all(torch.equal(out, wanted[n]) for out in outs)

    with ThreadPoolExecutor(len(inputs)) as pool:
        assert all(pool.map(right, range(len(inputs))))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [80, 90])
def test_parameters_are_packed_as_kernels_of_this_triton_declare_them(architecture, compiler):
    reports = compiler.reports("triton", "parameters", architecture)
    assert {report["pass"] for report in reports} == {"forward", "dq", "dkdv", "ds_sums", "decode"}
    assert any(128 in report["declared"] for report in reports) == (architecture == 90)
    for report in reports:
        assert report["packed"] == report["declared"], report["pass"]


def test_versions_of_triton_are_those_that_the_package_allows():
    project = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())
    (wanted,) = [x for x in project["project"]["dependencies"] if x.startswith("triton")]
    low, high = (int(n) for n in re.findall(r"3\.(\d+)", wanted))
    assert list(relaunch.VERSIONS) == [f"3.{minor}" for minor in range(low, high)]


def test_another_version_of_triton_launches_by_itself(driver, monkeypatch):
    monkeypatch.setattr(relaunch.triton, "__version__", "3.10.0")
    relaunch._is_known_version.cache_clear()
    try:
        assert relaunch.pack_launch(launched(torch.zeros(8), 0), CHANGING) is None
    finally:
        relaunch._is_known_version.cache_clear()
