"""Launches of kernels that are known already."""

import inspect
from contextlib import nullcontext
from threading import Barrier, Thread, get_ident
from types import SimpleNamespace
from typing import Any

import pytest
import triton
from triton import knobs
from triton.runtime import _async_compile

from sparseflash.backends.triton_common import compile_worker, launcher, relaunch


class Compiled:
    """A compiled kernel that writes down how it is started."""

    function, packed_metadata = "function", "metadata"

    def __init__(self):
        self.started = []

    def __getitem__(self, grid):
        return lambda *arguments: self.started.append(("with hooks", grid, arguments))

    def run(self, *arguments):
        self.started.append(("without hooks", arguments))


@pytest.fixture
def compiled(monkeypatch):
    target = SimpleNamespace(backend="cuda", arch=90, warp_size=32)
    active = SimpleNamespace(
        get_current_device=lambda: 1,
        get_current_stream=lambda device: 7,
        get_current_target=lambda: target,
    )
    monkeypatch.setattr(relaunch, "driver", SimpleNamespace(active=active))
    for name in ("hash_sources", "mark"):
        monkeypatch.setattr(compile_worker, name, lambda argument: None)
    compiled = Compiled()
    known = {("here", "kernel", ("bf16",)): (compiled, (64,))}
    monkeypatch.setattr(launcher, "_COMPILED", known)
    return compiled


KNOWN: Any = SimpleNamespace(__module__="here", __name__="kernel")


def launch(grid, kernel: Any = KNOWN):
    launcher.launch(kernel, grid, (1, 2), ("bf16",), {})


def test_a_known_kernel_starts_at_once(compiled):
    launch((3, 2, 1))
    handles = (7, "function", "metadata", None, None, None)
    assert compiled.started == [("without hooks", (3, 2, 1, *handles, 1, 2, 64))]


def test_an_empty_grid_starts_nothing(compiled):
    launch((3, 0, 1))
    assert compiled.started == []


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_launch_hooks_are_called(compiled, hook):
    chain, listener = getattr(knobs.runtime, hook), lambda metadata: None
    chain.add(listener)
    try:
        launch((3, 2, 1))
    finally:
        chain.remove(listener)
    assert compiled.started == [("with hooks", (3, 2, 1), (1, 2, 64))]


class LoadedElsewhere:
    """A kernel whose first launch is in this thread, and that `warmup` has loaded in another."""

    __module__, __name__ = "here", "other"

    def __getitem__(self, grid):
        assert getattr(launcher._THREAD, "entered", False), "Triton encodes tensor maps here"
        return lambda *arguments, **constants: None


@pytest.mark.parametrize("kernel", [[], [LoadedElsewhere()]], ids=["launched before", "loaded"])
@pytest.mark.parametrize("context", [None, 3])
def test_every_thread_without_a_context_enters_one_once(compiled, monkeypatch, context, kernel):
    entered = []
    monkeypatch.setattr(launcher.torch.version, "cuda", "13.0")
    monkeypatch.setattr(launcher.torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(launcher.torch.cuda, "mem_get_info", lambda: entered.append(get_ident()))
    monkeypatch.setattr(launcher, "current_context", lambda: context)

    def twice():
        launch((3, 2, 1), *kernel)
        launch((3, 2, 1), *kernel)

    threads = [Thread(target=twice) for _ in range(2)]
    for thread in threads:
        thread.start()
        thread.join()
    assert len(entered) == (0 if context else 2)


class Uncompiled(triton.JITFunction):
    """A kernel that Triton has not compiled, and that writes down what is asked of it."""

    cache_key = property(lambda self: "source")

    def __init__(self):
        self.__module__, self.__name__, self.asked = "here", "kernel", []

    def warmup(self, *arguments, grid, **constants):
        hook: Any = knobs.runtime.jit_cache_hook
        if hook is not None:  # which only asks what would be compiled
            return hook(compile={"specialization_data": "data"}) and None
        self.asked.append((arguments, grid, constants))


@pytest.mark.parametrize("error", [None, ZeroDivisionError])
def test_kernels_are_compiled_without_a_launch(compiled, error):
    kernel = Uncompiled()

    def run():
        launcher.launch(kernel, (3, 2, 1), (1, 2), ("bf16",), {})  # is known
        launcher.launch(kernel, (3, 2, 1), (1, 2), ("fp16",), {"BLOCK": 64})
        if error:
            raise error

    with pytest.raises(error) if error else nullcontext():
        launcher.compile_only(run)
    assert kernel.asked == [((1, 2), (3, 2, 1), {"BLOCK": 64})]
    assert compiled.started == []
    launch((3, 2, 1))
    assert len(compiled.started) == 1


class Compilable(Uncompiled):
    """A kernel that is compiled as Triton compiles one, by a function of the test."""

    def __init__(self, compile_kernel):
        super().__init__()
        self.compile_kernel = compile_kernel

    def warmup(self, *arguments, grid, **constants):
        super().warmup(*arguments, grid=grid, **constants)
        if knobs.runtime.jit_cache_hook is not None:
            return None
        mode, nothing = _async_compile.active_mode.get(), lambda kernel: None
        after = [nothing] * (len(inspect.signature(mode.submit).parameters) - 2)
        return mode.submit(object(), self.compile_kernel, *after)


class Loadable(SimpleNamespace):
    """A compiled kernel that writes down where it is loaded."""

    src, metadata = "source", "metadata"

    @property
    def run(self):
        self.log.append(("loaded", self.name, get_ident()))


def test_kernels_are_ready_to_be_launched_when_they_are_compiled(compiled, monkeypatch):
    """Each launcher is built in the thread of its kernel, two of them at the same time."""
    log, together = [], Barrier(2, timeout=30)

    def build(source, metadata):
        together.wait()
        log.append(("built", source, get_ident()))

    monkeypatch.setattr(relaunch.driver.active, "launcher_cls", build, raising=False)
    monkeypatch.setattr(launcher.torch.cuda, "device", lambda index: nullcontext())
    kernels = [Compilable(lambda name=name: Loadable(name=name, log=log)) for name in "ab"]
    launcher.compile_only(lambda: [launcher.launch(x, (1, 1, 1), (), (), {}) for x in kernels])
    assert [x[:2] for x in log] == [*[("built", "source")] * 2, ("loaded", "a"), ("loaded", "b")]
    assert {log[2][2], log[3][2]} == {get_ident()}
    assert get_ident() not in (log[0][2], log[1][2])


def test_an_error_of_a_compilation_is_raised(compiled):
    def fail():
        raise ZeroDivisionError

    kernel = Compilable(fail)
    with pytest.raises(ZeroDivisionError):
        launcher.compile_only(lambda: launcher.launch(kernel, (1, 1, 1), (), (), {}))
