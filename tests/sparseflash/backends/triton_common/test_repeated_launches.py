"""Repeated launches have the arguments of new ones, whatever calls came before.

Random calls of `attention` run the host side of both GPU backends on CPU tensors. No kernel
starts: every launch that would be repeated is also prepared again, and both are compared.
"""

import ctypes
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget

import masks
from sparseflash import attention
from sparseflash.backends import hopper, triton
from sparseflash.backends.hopper import configs
from sparseflash.backends.hopper import launch as hopper_launch
from sparseflash.backends.hopper import passes as hopper_passes
from sparseflash.backends.triton import configs as triton_configs
from sparseflash.backends.triton import launch as triton_launch
from sparseflash.backends.triton_common import launcher, relaunch
from sparseflash.backends.triton_common.relaunch import Launched
from sparseflash.dispatch import autograd, plan
from sparseflash.score import ScoreFunction
from sparseflash.testing import STRIDES, make_inputs
from tests.helpers.calls import ALWAYS_FUSED

STEPS = 20  # calls of each mask
BATCH, HEADS, KV_HEADS, K_LEN = 2, 4, 2, 300
DTYPE = torch.float16
PATTERNS = (
    masks.full(),
    masks.causal(align="bottom-right"),
    masks.local(70, align="bottom-right"),
)
READING = ScoreFunction.from_torch(
    "near of tensors, repeated", lambda s, b, h, q, k, x, n: s + x[h] * n[b], (float, int)
)
CONTEXT, DEVICE, STREAM = 3, 0, 9


class Map:
    """A tensor map: an address, and the text of all else."""

    size = 128  # bytes

    def __init__(self, descriptor, metadata: dict):
        box = (descriptor.block_shape, getattr(descriptor, "layout", None))
        self.facts = repr((descriptor.shape, descriptor.strides, descriptor.base.dtype, box))
        self.value = descriptor.base.data_ptr()
        self._buffer = ctypes.create_string_buffer(self.size)
        self.address = ctypes.addressof(self._buffer)


def contents(parameters: list) -> list:
    """The values of packed parameters."""
    return [(x.value, getattr(x, "facts", type(x).__name__)) for x in parameters]


def types_of(arguments: tuple) -> list[str]:
    """The types for which Triton compiles a kernel with these arguments."""

    def type_of(argument) -> str:
        if argument is None:
            return "constexpr"
        if isinstance(argument, Tensor):
            return f"*{argument.dtype}"
        if hasattr(argument, "base"):
            return f"tensordesc<{argument.base.dtype}>"
        return "i64" if isinstance(argument, int) else "fp64"

    return [type_of(argument) for argument in arguments]


class Launches:
    """Compares every repeated launch with the new one; counts them for each kernel."""

    def __init__(self):
        self.compiled: dict[tuple, Any] = {}
        self.constants: list[dict] = []
        self.types: list[list[str]] = []
        self.repeated: dict[str, int] = {}
        self.sizes: list[int] = []
        self._started: list[tuple] = []

    def cuFuncGetParamInfo(self, function, index, offset, size):
        sizes = self.sizes
        if index == len(sizes):
            return 1
        size._obj.value = sizes[index]
        return 0

    def cuLaunchKernelEx(self, config, function, *_):
        grid = (config._obj.grid_x, config._obj.grid_y, config._obj.grid_z)
        self._started.append((function.value or 0, grid))
        return 0

    def cuCtxGetCurrent(self, found):
        found._obj.value = CONTEXT
        return 0

    def try_relaunch(self, cache, signature, values) -> bool:
        """Repeats a launch if one is stored, and lets the caller prepare it again."""
        packed = cache.get(signature)
        self._started.clear()
        if packed:
            assert packed.repeat(values)
            ((function, grid),) = self._started
            self._started = [(function, grid, contents(packed._storage))]
        return False

    def launch_and_store(self, cache, signature, kernel, prepared):
        assert launcher._COMPILATION.get() is None
        launched = self.launched(kernel, prepared)
        parameters, slots = relaunch.pack_parameters(launched) or ([], {})
        if not self._started:
            self.sizes = [relaunch.size_of(parameter) for parameter in parameters]
            relaunch.store(cache, signature, launched, prepared.changing)
            assert cache[signature] is not False, "packed"
            return
        ((function, grid, values),) = self._started
        wanted = launched.compiled.function, launched.grid, contents(parameters)
        assert (function, tuple(grid)) == wanted[:2], kernel.__name__
        assert len(values) == len(wanted[2])
        wrong = [i for i, x in enumerate(zip(values, wanted[2], strict=True)) if x[0] != x[1]]
        assert not wrong, (kernel.__name__, wrong, [*slots])
        self.repeated[kernel.__name__] = self.repeated.get(kernel.__name__, 0) + 1

    def launched(self, kernel, prepared) -> Launched:
        """The launch as it would be with a compiled kernel."""
        key, names = (kernel.__name__, prepared.variant), kernel.arg_names
        types = types_of(prepared.arguments)
        constants = {name: prepared.constants[name] for name in names[len(types) :]}
        if key not in self.compiled:
            every_type = types + ["constexpr"] * len(constants)
            target = GPUTarget("cuda", 90, 32)
            facts = {"num_ctas": 1, "launch_cooperative_grid": False, "launch_pdl": False}
            facts |= {"global_scratch_size": 0, "profile_scratch_size": 0, "target": target}
            self.compiled[key] = SimpleNamespace(
                function=len(self.compiled),
                packed_metadata=(4, 1, 1024),
                src=SimpleNamespace(signature=dict(zip(names, every_type, strict=True))),
                metadata=SimpleNamespace(**facts, tensordesc_meta=[{}] * len(types)),
            )
            self.constants.append(constants)
            self.types.append(types)
        compiled = self.compiled[key]
        # Launches of one variant share a kernel. So it is compiled for equal types and constants.
        assert self.types[compiled.function] == types, kernel.__name__
        assert self.constants[compiled.function] == constants, kernel.__name__
        return Launched(compiled, (*prepared.arguments, *constants.values()), prepared.grid)


@pytest.fixture
def launches(monkeypatch):
    launches = Launches()
    monkeypatch.setattr(relaunch, "TensorMap", Map)
    monkeypatch.setattr(relaunch, "_driver", lambda: launches)
    monkeypatch.setattr(relaunch, "_has_parameter_info", lambda: True)
    active = SimpleNamespace(
        get_current_device=lambda: DEVICE, get_current_stream=lambda device: STREAM
    )
    monkeypatch.setattr(relaunch, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(hopper_launch, "multiprocessors", lambda device: 10)
    # As without a GPU: the tensors are on the CPU, whose properties no driver knows.
    monkeypatch.setattr(triton_configs, "interpreted", lambda: True)
    for module in (hopper_launch, hopper_passes, triton_launch):
        monkeypatch.setattr(module, "try_relaunch", launches.try_relaunch)
        monkeypatch.setattr(module, "launch_and_store", launches.launch_and_store)
    monkeypatch.setattr(hopper_passes, "launch_kernel", lambda *arguments: None)
    monkeypatch.setattr(triton_launch, "launch", lambda *arguments: None)
    monkeypatch.setattr(autograd, "compile_before_first_call", lambda *arguments: None)
    return launches


class Calls:
    """Random calls of one plan, each on new tensors.

    Args:
        backend: The one that serves them.
        mask: Their mask.
        choices: By which it chooses.
        plain: Whether they have nothing for which the fused backward pass is not taken.
    """

    def __init__(self, backend, mask, choices: random.Random, plain: bool):
        self._backend, self._mask, self._random = backend.name, mask, choices
        self._has = {
            name: not plain and choices.random() < 0.5
            for name in ("bias", "key_lengths", "dropout", "score", "softcap", "max_logits")
        }
        self._differentiates_extras = backend is triton  # hopper does not
        self._deterministic = not plain and choices.random() < 0.5
        # Of the inputs and of a gradient, and whether they begin at multiples of 16 bytes.
        self._layouts = [(*choices.choices(STRIDES, k=2), choices.random() < 0.8) for _ in "ab"]

    def run(self) -> None:
        """Calls attention once, and differentiates what it returns or not."""
        choose, q_len, has = self._random.choice, self._mask.seq_len[0], self._has
        *inputs, grad_out = self._inputs(q_len)
        for tensor, needed in zip(inputs, self._needs(), strict=True):
            tensor.requires_grad_(needed)
        options: dict[str, Any] = {"backend": self._backend, "deterministic": self._deterministic}
        if has["bias"]:
            shape = (choose([1, HEADS]), q_len + K_LEN - 1)
            options["bias"] = torch.randn(shape, requires_grad=self._differentiates_extras)
        if has["key_lengths"]:
            lengths = [self._random.randint(0, K_LEN) for _ in range(BATCH)]
            dtype = choose([torch.int32, torch.int64])
            options["key_lengths"] = torch.tensor(lengths, dtype=dtype)
        if has["dropout"]:
            options |= {"dropout_p": 0.25, "seed": choose([0, 5, -1, 2**40, -(2**63), 2**63 - 1])}
        if has["score"]:
            floats = torch.randn(HEADS, requires_grad=self._differentiates_extras)
            options |= {"score": READING, "score_tensors": [floats, torch.arange(BATCH)]}
        if has["softcap"]:
            options["softcap"] = 5.0
        out, lse, *_ = attention(
            *(*inputs, self._mask),
            return_lse=True,
            return_max_logits=has["max_logits"],
            **options,
        )
        if out.requires_grad:
            of_lse = choose([(), (torch.randn_like(lse),), (torch.ones(()).expand_as(lse),)])
            torch.autograd.backward((out, lse)[: 1 + len(of_lse)], (grad_out, *of_lse))

    def _inputs(self, q_len: int) -> tuple[Tensor, ...]:
        """query, key, value and a gradient."""
        *layouts, aligned = self._random.choice(self._layouts)
        made = [
            make_inputs(BATCH, HEADS, q_len, K_LEN, 64, kv_heads=KV_HEADS, dtype=DTYPE, strides=x)
            for x in layouts
        ]
        inputs = (*made[0][:3], made[1][3])
        if aligned:
            return inputs
        return tuple([torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape) for x in inputs])

    def _needs(self) -> tuple[bool, ...]:
        return self._random.choice([(False,) * 3, (True,) * 3, (True,) * 3, (False, True, True)])


KERNELS = {
    hopper: {"forward_kernel", "backward_dq_kernel", "backward_dkdv_kernel"}
    | {"backward_fused_kernel"},
    triton: {"forward_kernel", "decode_kernel", "query_gradient_kernel", "ds_sums_kernel"}
    | {"key_value_gradient_kernel"},
}


@pytest.fixture
def some_masks():
    made = [pattern((q_len, K_LEN), block_size=128) for pattern in PATTERNS for q_len in (260, 2)]
    made.append(masks.MaskBatch.from_masks([made[0], made[2]]))
    made.append(made[2].select(torch.ones(1, KV_HEADS, 3, 3, dtype=torch.bool)))
    return made


@pytest.mark.parametrize("backend", [hopper, triton], ids=lambda backend: backend.name)
def test_arguments_of_repeated_launches_are_those_of_new_ones(
    backend, launches, some_masks, monkeypatch, request
):
    monkeypatch.setattr(plan, "select_passes", lambda spec, mask: (backend, None))
    choices = random.Random(request.config.option.seed)
    monkeypatch.setattr(configs, "MIN_FUSED_BLOCKS", ALWAYS_FUSED)
    for number, mask in enumerate(some_masks):
        calls = Calls(backend, mask, choices, plain=number == 0)
        for _ in range(STEPS):
            calls.run()
    assert launches.repeated.keys() >= KERNELS[backend]
