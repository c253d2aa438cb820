"""Launches of kernels that are known already."""

from types import SimpleNamespace
from typing import Any

import pytest
from triton import knobs

from sparseflash.backends import compiled as launches


class Compiled:
    """A compiled kernel that writes down how it is started."""

    function, packed_metadata = "function", "metadata"

    def __init__(self):
        self.started = []

    def __getitem__(self, grid):
        return lambda *arguments: self.started.append(("told", grid, arguments))

    def run(self, *arguments):
        self.started.append(("at once", arguments))


@pytest.fixture
def compiled(monkeypatch):
    active = SimpleNamespace(get_current_device=lambda: 1, get_current_stream=lambda device: 7)
    monkeypatch.setattr(launches, "driver", SimpleNamespace(active=active))
    made = Compiled()
    monkeypatch.setattr(launches, "_COMPILED", {("here", "kernel", ("bf16",)): (made, (64,))})
    return made


def launch(grid):
    kernel: Any = SimpleNamespace(__module__="here", __name__="kernel")
    launches.launch(kernel, grid, (1, 2), ("bf16",), {})


def test_a_known_kernel_starts_at_once(compiled):
    launch((3, 2, 1))
    handles = (7, "function", "metadata", None, None, None)
    assert compiled.started == [("at once", (3, 2, 1, *handles, 1, 2, 64))]


def test_an_empty_grid_starts_nothing(compiled):
    launch((3, 0, 1))
    assert compiled.started == []


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_who_listens_to_launches_is_told(compiled, hook):
    chain, listener = getattr(knobs.runtime, hook), lambda metadata: None
    chain.add(listener)
    try:
        launch((3, 2, 1))
    finally:
        chain.remove(listener)
    assert compiled.started == [("told", (3, 2, 1), (1, 2, 64))]
