"""Launches again what was launched before, on other tensors, at the price of a call to the driver.

Triton takes all arguments apart at every launch, asks the driver about every address and encodes
every tensor map: 12 microseconds, of which a bare launch is 3. Here the parameters of a kernel
stay packed as the driver takes them, and a launch writes into them what has changed.
"""

import ctypes
import inspect
from collections.abc import Sequence
from functools import lru_cache
from threading import Lock
from typing import Any

from triton import knobs
from triton.runtime import driver

from masks.lookup_table import LookupTable
from sparseflash.backends.compiled import Launched

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
LANES = 32

Changed = Sequence[int | None]


def again(table: LookupTable, kind: tuple, changed: Changed) -> bool:
    """Launches what is known of a kind of launches; False if nothing is, or the driver refuses.

    Launches with a table that are of one kind differ in nothing but the numbers in `changed`.
    """
    known = table.cache.get(kind)
    return bool(known) and known(changed)


def remember(table: LookupTable, kind: tuple, launched: Launched, changing: Sequence[str]) -> None:
    """Keeps a launch from its second time on: the tables of masks that change see it once.

    changing: the names of those arguments whose values `again` is given, in its order.
    """
    if kind not in table.cache:
        table.cache[kind] = None
    elif table.cache[kind] is None:
        table.cache[kind] = relaunch(launched, changing) or False  # not to be tried again


class Relaunch:
    """One launch, packed.

    parameters: in the order of the kernel; slots: for each value that may change the parameter
    that holds it, None for what the kernel was compiled without.
    """

    def __init__(self, compiled, grid: tuple[int, int, int], parameters: list, slots: list):
        warps, _, shared_memory = compiled.packed_metadata[:3]
        self._function = compiled.function
        self._shape = (*grid, LANES * warps, 1, 1, shared_memory)
        self._slots = slots
        self._kept = parameters
        addresses = [_address(parameter) for parameter in parameters]
        self._parameters = (ctypes.c_void_p * len(addresses))(*addresses)
        self._context = _current_context()
        self._launch = _driver().cuLaunchKernel
        self._lock = Lock()  # another thread may be about to launch it on tensors of its own

    def __call__(self, changed: Changed) -> bool:
        """Whether it was launched: not where somebody listens to launches, or the driver fails."""
        hooks = knobs.runtime
        if hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
            return False
        active: Any = driver.active
        stream = active.get_current_stream(active.get_current_device())
        with self._lock:
            return self._start(changed, stream) or (self._enter() and self._start(changed, stream))

    def _start(self, changed: Changed, stream: int) -> bool:
        try:
            for slot, value in zip(self._slots, changed, strict=True):
                if slot is not None and value is not None and slot.value != value:
                    slot.value = value
        except DriverError:
            return False
        return self._launch(self._function, *self._shape, stream, self._parameters, None) == 0

    def _enter(self) -> bool:
        """Whether this thread had no context, and has that of the kernel now."""
        return not _current_context() and _driver().cuCtxSetCurrent(self._context) == 0


class DriverError(RuntimeError):
    """The driver refuses what is not a launch."""


class TensorMap:
    """A tensor map, the descriptor that a kernel gets by value, of a tensor that moves."""

    size = 128  # bytes

    def __init__(self, descriptor, metadata: dict):
        self._value = descriptor.base.data_ptr()
        made = _encode(descriptor, metadata)
        # Triton's object ends in the map, and nothing but its own launcher reads it from there.
        encoded = id(made) + type(made).__basicsize__ - self.size
        self._room = (ctypes.c_char * (self.size + MAP_ALIGNMENT))()
        self.address = -(-ctypes.addressof(self._room) // MAP_ALIGNMENT) * MAP_ALIGNMENT
        ctypes.memmove(self.address, encoded, self.size)

    @property
    def value(self) -> int:
        return self._value

    @value.setter
    def value(self, address: int) -> None:
        failed = _driver().cuTensorMapReplaceAddress(self.address, address)
        if failed:
            raise DriverError(f"cuTensorMapReplaceAddress failed with error {failed}")
        self._value = address


def relaunch(launched: Launched, changing: Sequence[str]) -> Relaunch | None:
    """A launch that can be repeated; None where its parameters cannot be packed with certainty.

    The driver is asked for the sizes of all parameters: a kernel that takes others than Triton is
    known to pass goes on to be launched by Triton.
    """
    compiled = launched.compiled
    metadata = compiled.metadata
    if metadata.target.backend != "cuda" or not _knows_parameters():
        return None
    scratch = (metadata.global_scratch_size, metadata.profile_scratch_size)
    special = (metadata.num_ctas > 1, metadata.launch_cooperative_grid, metadata.launch_pdl)
    if any((*scratch, *special)):
        return None
    packed = _pack(launched)
    if packed is None:
        return None
    parameters, slots = packed
    if parameter_sizes(compiled.function) != [_size(parameter) for parameter in parameters]:
        return None
    return Relaunch(compiled, launched.grid, parameters, [slots.get(name) for name in changing])


def _pack(launched: Launched) -> tuple[list, dict] | None:
    """(the parameters, those of them that are arguments by their names)"""
    parameters, slots = [], {}
    compiled = launched.compiled
    maps = iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())
    kinds = compiled.src.signature.items()
    for (name, kind), argument in zip(kinds, launched.arguments, strict=True):
        if kind == "constexpr":
            continue
        if kind.startswith("*"):
            packed = [ctypes.c_uint64(argument.data_ptr())]
        elif kind.startswith("tensordesc"):
            metadata = next(maps, None)
            if metadata is None:
                return None
            shape = [ctypes.c_int32(n) for n in argument.shape]
            strides = [ctypes.c_int64(n) for n in argument.strides]
            packed = [TensorMap(argument, metadata), *shape, *strides]
        elif kind in SCALARS:
            packed = [SCALARS[kind](argument)]
        else:
            return None
        slots[name] = packed[0]
        parameters += packed
    scratch = [ctypes.c_uint64(0), ctypes.c_uint64(0)]
    return [*parameters, *scratch], slots


def parameter_sizes(function: int) -> list[int]:
    """Bytes of each parameter of a kernel, as its binary declares them."""
    offset, size, sizes = ctypes.c_size_t(), ctypes.c_size_t(), []
    ask = _driver().cuFuncGetParamInfo
    while ask(function, len(sizes), ctypes.byref(offset), ctypes.byref(size)) == 0:
        sizes.append(size.value)
    return sizes


def _size(parameter) -> int:
    return parameter.size if isinstance(parameter, TensorMap) else ctypes.sizeof(parameter)


def _address(parameter) -> int:
    return parameter.address if isinstance(parameter, TensorMap) else ctypes.addressof(parameter)


def _current_context() -> int | None:
    found = ctypes.c_void_p()
    _driver().cuCtxGetCurrent(ctypes.byref(found))
    return found.value


def _encode(descriptor, metadata: dict):
    """Triton's tensor map of a descriptor."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    takes = len(inspect.signature(make_tensordesc_arg).parameters)  # 2 in Triton 3.6, 3 in 3.9
    return make_tensordesc_arg(*(descriptor, metadata, None)[:takes])[0]


@lru_cache(maxsize=1)
def _knows_parameters() -> bool:
    """Whether the driver can be asked for the parameters of a kernel: from CUDA 12.4 on."""
    return hasattr(ctypes.CDLL("libcuda.so.1"), "cuFuncGetParamInfo")


@lru_cache(maxsize=1)
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    pointer, number = ctypes.c_void_p, ctypes.c_uint
    driver.cuLaunchKernel.argtypes = (pointer, *[number] * 7, pointer, pointer, pointer)
    driver.cuFuncGetParamInfo.argtypes = (pointer, ctypes.c_size_t, pointer, pointer)
    driver.cuTensorMapReplaceAddress.argtypes = (pointer, pointer)
    driver.cuCtxGetCurrent.argtypes = driver.cuCtxSetCurrent.argtypes = (pointer,)
    return driver
