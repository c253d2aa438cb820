"""Launches Triton kernels with less host time than Triton itself.

A kernel is launched in one of three ways. The first time Triton compiles it. After that `launch`
looks it up by its variant. Later launches with an equal signature reuse the launch that
`launch_and_store` stored, and change only its parameters: see relaunch.py.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from functools import lru_cache
from threading import local
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs
from triton.compiler.errors import CompilationError, CompileTimeAssertionFailure
from triton.runtime.cache import triton_key

from sparseflash.backends.triton_common import compile_worker, workers
from sparseflash.backends.triton_common.description import describe
from sparseflash.backends.triton_common.relaunch import (
    Launched,
    active_driver,
    current_context,
    store,
)


class Launch(NamedTuple):
    """A launch without its kernel: grid, arguments and compile-time constants.

    Args:
        grid: Programs along three axes.
        arguments: Arguments of the kernel, without its constants.
        variant: Key of the compiled kernel: everything for which Triton compiles another kernel.
            Triton derives it from the arguments at every launch, which takes longer than the
            launch itself.
        constants: Constant arguments by name, and options of the compiler.
        changing: Names of the arguments in which launches of one signature differ.
    """

    grid: tuple[int, int, int]
    arguments: tuple
    variant: tuple
    constants: dict[str, Any]
    changing: Sequence[str] = ()


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    arguments: tuple,
    variant: tuple,
    constants: dict[str, Any],
) -> Launched | None:
    """Launches a kernel unless its grid is empty; see Launch.

    Args:
        kernel: A function decorated by triton.jit or gluon.jit.

    Returns:
        The launch; None if the kernel was interpreted, only compiled, or not launched.

    Raises:
        ValueError: A static assertion of the kernel failed. The error has its message.
    """
    key = (kernel.__module__, kernel.__name__, variant)
    compilation = _COMPILATION.get()
    if compilation is not None:
        if isinstance(kernel, triton.JITFunction) and key not in _COMPILED:
            compile_worker.hash_sources(kernel.__module__)
            with _assertions_as_value_errors():
                compilation.add(kernel, *arguments, grid=grid, **constants)
        return None
    if 0 in grid:
        return None
    _enter_context()
    if key in _COMPILED:
        compiled, constant_arguments = _COMPILED[key]
        _start(compiled, grid, (*arguments, *constant_arguments))
        return Launched(compiled, (*arguments, *constant_arguments), grid)
    if isinstance(kernel, triton.JITFunction):
        compile_worker.hash_sources(kernel.__module__)
    with _assertions_as_value_errors():
        compiled = kernel[grid](*arguments, **constants)
    if not isinstance(kernel, triton.JITFunction):  # in the interpreter
        return None
    names = kernel.arg_names[len(arguments) :]
    constant_arguments = tuple(constants[name] for name in names)
    _COMPILED[key] = compiled, constant_arguments
    return Launched(compiled, (*arguments, *constant_arguments), grid)


@contextmanager
def _assertions_as_value_errors() -> Iterator[None]:
    """Turns an error of a static assertion into a ValueError with the message of the assertion."""
    try:
        yield
    except CompilationError as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, CompileTimeAssertionFailure):
                raise ValueError(cause.error_message) from error
            cause = cause.__cause__
        raise


_COMPILED: dict[tuple, tuple] = {}


class _Compilation(Executor):
    """Kernels that are compiled in parallel, and are ready to be launched at the end.

    At the first launch of a kernel, Triton before 3.8 has a C compiler build the function that
    launches it, and loads the kernel. Here the C compiler runs in the thread that has compiled the
    kernel, beside those of other kernels.

    It is the executor of triton.AsyncCompileMode.
    """

    def __init__(self, pool: ThreadPoolExecutor, driver: Future):
        self._pool, self._driver = pool, driver
        self._kernels: list[tuple[Any, int]] = []  # results of JITFunction.warmup, their devices

    def add(self, kernel: Any, *launch: Any, **constants: Any) -> None:
        """Starts to compile a kernel, whose arguments are those of JITFunction.warmup."""
        self._driver.result()
        made = kernel.warmup(*launch, **constants)
        self._kernels.append((made, active_driver().get_current_device()))

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        """Starts to compile a kernel in a thread, for triton.AsyncCompileMode."""
        return self._pool.submit(_compile_and_build_launcher, fn)

    def load(self) -> None:
        """Loads all kernels, when they are compiled."""
        for kernel, device in self._kernels:
            # It is None where a hook of Triton compiles it.
            if kernel is not None and hasattr(active_driver(), "launcher_cls"):
                compiled = kernel.result() if hasattr(kernel, "result") else kernel
                with torch.cuda.device(device):
                    compiled.run  # noqa: B018


def _compile_and_build_launcher(compile_kernel: Callable[[], Any]) -> Any:
    compiled, active = compile_kernel(), active_driver()
    if hasattr(active, "launcher_cls"):  # not where kernels are compiled without a device
        # Triton stores what this builds on disk, and finds it there when it loads the kernel.
        active.launcher_cls(compiled.src, compiled.metadata)
    return compiled


class _Descriptions(dict[str, workers.Description]):
    """Descriptions of the kernels of launches that are neither started nor compiled, by key.

    Args:
        driver: When Triton's driver is ready.
    """

    def __init__(self, driver: Future):
        super().__init__()
        self._driver = driver

    def add(self, kernel: Any, *launch: Any, **constants: Any) -> None:
        """Describes a kernel, whose arguments are those of JITFunction.warmup."""
        self._driver.result()
        description = describe(kernel, *launch, **constants)
        if description is not None:
            self[description.key] = description


_COMPILATION: ContextVar[_Compilation | _Descriptions | None]
_COMPILATION = ContextVar("compilation", default=None)


def is_compile_only() -> bool:
    """Whether launches start no kernel here, as in compile_only."""
    return _COMPILATION.get() is not None


def compile_only(run: Callable[[], object], other: Callable[[], object] | None = None) -> None:
    """Calls `run`; its launches compile and load their kernels in parallel and start none.

    Where this process may start others, these compile the kernels (see workers.py), and then
    threads of this one find them in Triton's cache. Otherwise the threads compile them: compiler
    passes, LLVM and ptxas release the global interpreter lock of Python.

    Args:
        run: A function that launches kernels.
        other: Another one. Processes compile its kernels, for which nothing waits here.
    """

    def compile_in_threads() -> None:
        with ThreadPoolExecutor() as pool:
            # Before the first compilation Triton hashes its files, and the first use of its driver
            # runs a C compiler. Both take long, and run beside one another and beside the import
            # of the kernels.
            hashed, driver = pool.submit(triton_key), pool.submit(active_driver)
            own = _Descriptions(driver)
            if workers.number_of_workers():
                _COMPILATION.set(own)
                run()
                workers.WORKERS.start(own, waits=True)
                if other is not None:
                    _COMPILATION.set(others := _Descriptions(driver))
                    other()
                    workers.WORKERS.start({key: x for key, x in others.items() if key not in own})
                workers.WORKERS.wait({*own})
            hashed.result()
            compilation = _Compilation(pool, driver)
            _COMPILATION.set(compilation)
            with _assertions_as_value_errors(), triton.AsyncCompileMode(compilation):
                run()
            compilation.load()
            for key in own:
                compile_worker.mark(key)

    copy_context().run(compile_in_threads)  # a copy, so that _COMPILATION is reset at the end


def launch_and_store(cache: dict, signature: Hashable, kernel: Any, prepared: Launch) -> None:
    """Launches a kernel, and stores the launch for `try_relaunch`.

    Args:
        cache: The cache of a plan, in which the launch is stored.
        signature: Launches with equal signatures differ only in the arguments Launch.changing.
        kernel: As in `launch`.
        prepared: The launch.
    """
    launched = launch(kernel, *prepared[:4])
    if launched is not None:
        store(cache, signature, launched, prepared.changing)


def _start(compiled, grid: tuple[int, int, int], arguments: tuple) -> None:
    """compiled[grid](*arguments), without the work for launch hooks if there are none."""
    hooks = knobs.runtime
    if hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
        compiled[grid](*arguments)
        return
    active = active_driver()
    stream = active.get_current_stream(active.get_current_device())
    no_hooks = (None, None, None)
    compiled.run(*grid, stream, compiled.function, compiled.packed_metadata, *no_hooks, *arguments)


_THREAD = local()


def _enter_context() -> None:
    """Gives this thread a CUDA context. Triton needs one to encode tensor maps.

    A new thread, such as that of autograd, has none until it calls the CUDA runtime. Triton enters
    the context of the device only when it loads a kernel, which another thread may have done. A
    thread that has a context makes no call here, because it may be capturing a CUDA graph.
    """
    if not hasattr(_THREAD, "entered"):
        if torch.version.cuda and torch.cuda.is_initialized() and not current_context():
            torch.cuda.mem_get_info()
        _THREAD.entered = True


@lru_cache(maxsize=64)
def multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors of a device."""
    return torch.cuda.get_device_properties(device).multi_processor_count
