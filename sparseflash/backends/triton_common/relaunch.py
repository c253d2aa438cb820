"""Repeats a launch with other tensors, by one call of the driver.

At every launch Triton inspects all arguments, queries the driver about every address and encodes
every tensor map. This takes 12 microseconds, of which the launch itself takes 3. Here the
parameters of a kernel are packed once in the form of the driver, and a launch only writes the
values that have changed.

The form in which Triton passes parameters is not public. So it is used only with versions for
which tests compare the packed parameters with the declarations of compiled kernels. The size of
every parameter is queried from the driver. If anything differs, Triton launches the kernel.

`try_relaunch` and `store` are the interface.
"""

import ctypes
import inspect
from collections.abc import Hashable, Sequence
from functools import lru_cache
from threading import Lock
from typing import Any, NamedTuple

import triton
from triton import knobs
from triton.runtime import driver

VERSIONS = ("3.6", "3.7", "3.8", "3.9")  # of Triton
SCALARS = {
    "i1": ctypes.c_int8,
    "i8": ctypes.c_int8,
    "i16": ctypes.c_int16,
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "u32": ctypes.c_uint32,
    "u64": ctypes.c_uint64,
    "fp32": ctypes.c_float,
    "fp64": ctypes.c_double,
}
MAP_ALIGNMENT = 64  # bytes
WARP_SIZE = 32

Values = tuple[int | None, ...]


class Launched(NamedTuple):
    """A compiled kernel, and all arguments of its launch, with constants."""

    compiled: Any
    arguments: tuple
    grid: tuple[int, int, int]


def try_relaunch(cache: dict, signature: Hashable, values: Values) -> bool:
    """Repeats the launch that is stored under a signature.

    Args:
        cache: The cache that was passed to `store`.
        values: Values of the arguments in which launches with equal signatures differ, in the
            order of `store`: addresses for pointers and descriptors, None for missing arguments.

    Returns:
        Whether the kernel was launched.
    """
    packed = cache.get(signature)
    return packed.repeat(values) if packed else False


def store(cache: dict, signature: Hashable, launched: Launched, names: Sequence[str]) -> None:
    """Stores a launch from the second one on, because the table of a new mask may be used once.

    Args:
        names: Names of the arguments whose values `try_relaunch` gets, in this order.
    """
    if signature not in cache:
        cache[signature] = None
    elif cache[signature] is None:
        cache[signature] = pack_launch(launched, names) or False  # False: it cannot be packed


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig of the driver: grid and block, shared memory in bytes, stream, attributes."""

    _fields_ = [
        *[(f"{of}_{axis}", ctypes.c_uint) for of in ("grid", "block") for axis in "xyz"],
        ("shared_memory", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    ]


class PackedLaunch:
    """A launch with packed parameters.

    Args:
        parameters: The parameters, in the order of the kernel.
        slots: For each value that may change, its parameter; None if the kernel has none for it.
    """

    def __init__(self, compiled, grid: tuple[int, int, int], parameters: list, slots: list):
        warps, _, shared_memory = compiled.packed_metadata[:3]
        self._config = LaunchConfig(*grid, WARP_SIZE * warps, 1, 1, shared_memory)
        self._slots = slots
        self._storage = parameters
        addresses = [_address(parameter) for parameter in parameters]
        packed = (ctypes.c_void_p * len(addresses))(*addresses)
        function = ctypes.c_void_p(compiled.function)
        self._arguments = ctypes.byref(self._config), function, packed, None  # nothing to convert
        self._context, active = current_context(), active_driver()
        self._device, self._stream_of = active.get_current_device(), active.get_current_stream
        self._launch = _driver().cuLaunchKernelEx
        self._lock = Lock()  # another thread may be about to launch it on tensors of its own
        self._values = tuple([None if slot is None else slot.value for slot in slots])

    def repeat(self, values: Values) -> bool:
        """Launches it; returns False if there are launch hooks or the driver fails."""
        hooks = knobs.runtime
        if hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
            return False
        stream = self._stream_of(self._device)
        with self._lock:
            return self._start(values, stream) or (self._enter() and self._start(values, stream))

    def _start(self, values: Values, stream: int) -> bool:
        if values != self._values and not self._write(values):
            return False
        self._config.stream = stream
        return self._launch(*self._arguments) == 0

    def _write(self, values: Values) -> bool:
        """Writes the values that have changed; returns False if the driver reports an error."""
        try:
            for slot, before, value in zip(self._slots, self._values, values, strict=True):
                if value != before and slot is not None and value is not None:
                    slot.value = value
        except DriverError:
            self._values = (None,) * len(values)  # it is unknown which of them were written
            return False
        self._values = values
        return True

    def _enter(self) -> bool:
        """Enters the context of the kernel if this thread has none; returns whether it did."""
        return not current_context() and _driver().cuCtxSetCurrent(self._context) == 0


class DriverError(RuntimeError):
    """The driver reported an error before the launch."""


class TensorMap:
    """The tensor map of a descriptor, a parameter passed by value; its tensor may change."""

    size = 128  # bytes

    def __init__(self, descriptor, metadata: dict):
        self._value = descriptor.base.data_ptr()
        encoded = _encode(descriptor, metadata)
        # The map is at the end of Triton's object. Triton has no public function that returns it.
        encoded_map = id(encoded) + type(encoded).__basicsize__ - self.size
        self._buffer = (ctypes.c_char * (self.size + MAP_ALIGNMENT))()
        self.address = -(-ctypes.addressof(self._buffer) // MAP_ALIGNMENT) * MAP_ALIGNMENT
        ctypes.memmove(self.address, encoded_map, self.size)

    @property
    def value(self) -> int:
        return self._value

    @value.setter
    def value(self, address: int) -> None:
        error = _driver().cuTensorMapReplaceAddress(self.address, address)
        if error:
            raise DriverError(f"cuTensorMapReplaceAddress failed with error {error}")
        self._value = address


def pack_launch(launched: Launched, names: Sequence[str]) -> PackedLaunch | None:
    """The launch in packed form; None if it is not certain that its parameters can be packed."""
    compiled = launched.compiled
    metadata = compiled.metadata
    if metadata.target.backend != "cuda" or not _is_known_version() or not _has_parameter_info():
        return None
    scratch = (metadata.global_scratch_size, metadata.profile_scratch_size)
    special = (metadata.num_ctas > 1, metadata.launch_cooperative_grid, metadata.launch_pdl)
    if any((*scratch, *special)):
        return None
    packed = pack_parameters(launched)
    if packed is None:
        return None
    parameters, slots = packed
    if declared_sizes(compiled.function) != [size_of(parameter) for parameter in parameters]:
        return None
    return PackedLaunch(compiled, launched.grid, parameters, [slots.get(name) for name in names])


def pack_parameters(launched: Launched) -> tuple[list, dict] | None:
    """(all parameters, the parameter of each argument by name)"""
    parameters, slots = [], {}
    compiled = launched.compiled
    maps = iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())
    signature = compiled.src.signature.items()
    for (name, of_type), argument in zip(signature, launched.arguments, strict=True):
        if of_type == "constexpr":
            continue
        if of_type.startswith("*"):
            packed = [ctypes.c_uint64(argument.data_ptr())]
        elif of_type.startswith("tensordesc"):
            metadata = next(maps, None)
            if metadata is None:
                return None
            shape = [ctypes.c_int32(n) for n in argument.shape]
            strides = [ctypes.c_int64(n) for n in argument.strides]
            packed = [TensorMap(argument, metadata), *shape, *strides]
        elif of_type in SCALARS:
            packed = [SCALARS[of_type](argument)]
        else:
            return None
        slots[name] = packed[0]
        parameters += packed
    scratch = [ctypes.c_uint64(0), ctypes.c_uint64(0)]
    return [*parameters, *scratch], slots


def declared_sizes(function: int) -> list[int]:
    """The size in bytes of each parameter of a kernel, as its binary declares them."""
    offset, size, sizes = ctypes.c_size_t(), ctypes.c_size_t(), []
    parameter_info = _driver().cuFuncGetParamInfo
    while parameter_info(function, len(sizes), ctypes.byref(offset), ctypes.byref(size)) == 0:
        sizes.append(size.value)
    return sizes


def size_of(parameter) -> int:
    """The size of a packed parameter in bytes."""
    return parameter.size if isinstance(parameter, TensorMap) else ctypes.sizeof(parameter)


def _address(parameter) -> int:
    return parameter.address if isinstance(parameter, TensorMap) else ctypes.addressof(parameter)


def current_context() -> int | None:
    """The CUDA context of this thread; None if there is none."""
    found = ctypes.c_void_p()
    _driver().cuCtxGetCurrent(ctypes.byref(found))
    return found.value


def _encode(descriptor, metadata: dict):
    """Triton's tensor map of a descriptor."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    arity = len(inspect.signature(make_tensordesc_arg).parameters)  # 2 in Triton 3.6, 3 in 3.9
    return make_tensordesc_arg(*(descriptor, metadata, None)[:arity])[0]


def active_driver() -> Any:
    """The active driver of Triton, as Any: its declared type lacks the methods of a GPU."""
    return driver.active


@lru_cache(maxsize=1)
def _is_known_version() -> bool:
    return ".".join(triton.__version__.split(".")[:2]) in VERSIONS


@lru_cache(maxsize=1)
def _has_parameter_info() -> bool:
    """Whether the driver can report the parameters of a kernel, which needs CUDA 12.4."""
    return hasattr(ctypes.CDLL("libcuda.so.1"), "cuFuncGetParamInfo")


@lru_cache(maxsize=1)
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    pointer = ctypes.c_void_p
    driver.cuFuncGetParamInfo.argtypes = (pointer, ctypes.c_size_t, pointer, pointer)
    driver.cuTensorMapReplaceAddress.argtypes = (pointer, pointer)
    driver.cuCtxGetCurrent.argtypes = driver.cuCtxSetCurrent.argtypes = (pointer,)
    return driver
