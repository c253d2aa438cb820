"""Processes that compile kernels for calls that may follow."""

import io
import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import triton
from triton import knobs
from triton.runtime import driver

from sparseflash.backends.triton_common import compile_worker, launcher, relaunch, workers

RANK_VARIABLES = ("LOCAL_WORLD_SIZE", "LOCAL_RANK", "WORLD_SIZE")


class Process:
    """A process that writes down what is asked of it."""

    def __init__(self, kernels: list[workers.Description]):
        self.keys, self.asked = [kernel.key for kernel in kernels], []

    def wait(self, seconds):
        self.asked.append("wait")
        raise subprocess.TimeoutExpired("a process that never ends", seconds)

    def terminate(self):
        self.asked.append("terminate")


@pytest.fixture
def started(monkeypatch):
    """The processes that are started, none of which reaps itself."""
    processes = []

    def start(kernels):
        processes.append(Process(kernels))
        return processes[-1]

    monkeypatch.setattr(workers, "_start", start)
    monkeypatch.setattr(workers, "Thread", lambda **_: SimpleNamespace(start=lambda: None))
    monkeypatch.setattr(compile_worker, "is_marked", lambda key: key == "marked")
    monkeypatch.setattr(workers, "WORKERS", workers.Workers())
    monkeypatch.setenv(workers.VARIABLE, "2")
    return processes


def kernels(*keys: str) -> dict[str, workers.Description]:
    return {key: workers.Description("module", "kernel", "data", key) for key in keys}


def test_a_kernel_is_compiled_by_one_process(started):
    found = workers.WORKERS
    found.start(kernels("a", "b", "c", "marked"))
    found.start(kernels("b", "d"))
    assert [x.keys for x in started] == [["a", "c"], ["b"], ["d"]]
    found.wait({"c", "unknown"})
    assert [x.asked for x in started] == [["wait"], [], []]
    found.stop()
    assert all("terminate" in x.asked for x in started)


def test_no_process_is_started_where_the_system_has_none(started, monkeypatch):
    def fail(kernels):
        raise BlockingIOError

    monkeypatch.setattr(workers, "_start", fail)
    workers.WORKERS.start(kernels("a"))
    workers.WORKERS.wait({"a"})


def test_a_cache_that_cannot_be_written_is_read(monkeypatch, tmp_path):
    """Folders of images and of other users have kernels, but take no marks."""
    (tmp_path / "file").touch()  # also root cannot write below a file
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setenv(workers.VARIABLE, "2")
    monkeypatch.setattr(workers, "_start", None)
    key = "ab" * 32
    compile_worker.mark(key)
    workers.Workers().start(kernels(key))


def test_no_process_and_no_description_if_the_number_is_zero(log, monkeypatch):
    monkeypatch.setenv(workers.VARIABLE, "0")
    monkeypatch.setattr(workers, "describe", None)
    monkeypatch.setattr(workers, "WORKERS", None)
    own = Kernel("own")
    launcher.compile_only(lambda: launch(own), lambda: launch(Kernel("other")))
    assert own.compiled
    assert log.marked == []


@pytest.fixture
def default_number(monkeypatch):
    """The number of processes on a host with these threads, GPUs and variables."""
    for name in [*os.environ]:
        if name.startswith("SLURM_") or name in (workers.VARIABLE, *RANK_VARIABLES):
            monkeypatch.delenv(name)

    def number(threads: int, gpus: int = 8, **variables: object) -> int:
        monkeypatch.setattr(workers.os, "sched_getaffinity", lambda process: range(threads))
        monkeypatch.setattr(workers.torch.cuda, "device_count", lambda: gpus)
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))
        return workers.number_of_workers()

    return number


@pytest.mark.parametrize(
    ("threads", "ranks", "expected"), [(2, 1, 0), (16, 1, 4), (16, 2, 2), (64, 1, 6), (64, 8, 2)]
)
def test_the_default_follows_the_processor_threads(threads, ranks, expected, default_number):
    assert default_number(threads, LOCAL_WORLD_SIZE=ranks) == expected


@pytest.mark.parametrize("ranks", ["", "many", "0", "-1"])
def test_a_number_of_ranks_that_is_none_is_not_read(ranks, default_number):
    assert default_number(16, LOCAL_WORLD_SIZE=ranks) == 4


@pytest.mark.parametrize(
    ("threads", "variables", "expected"),
    [
        (64, {"SLURM_NTASKS_PER_NODE": 8, "SLURM_LOCALID": 3}, 2),
        (8, {"SLURM_NTASKS_PER_NODE": 8, "SLURM_LOCALID": 3, "SLURM_CPUS_ON_NODE": 64}, 2),
        (64, {"SLURM_NTASKS": 16, "SLURM_LOCALID": 0}, 2),
        (64, {"SLURM_NTASKS": 1, "SLURM_LOCALID": 0}, 6),
        (64, {"WORLD_SIZE": 16, "LOCAL_RANK": 0}, 2),
        (64, {"WORLD_SIZE": 4, "LOCAL_RANK": 0}, 4),
        (64, {"LOCAL_RANK": 7}, 2),
        (64, {"LOCAL_WORLD_SIZE": 4, "WORLD_SIZE": 32, "LOCAL_RANK": 0}, 4),
        (64, {"LOCAL_WORLD_SIZE": 4, "SLURM_NTASKS_PER_NODE": 1, "SLURM_CPUS_ON_NODE": 128}, 4),
    ],
    ids=str,
)
def test_ranks_of_a_host_share_its_threads_whoever_started_them(
    threads, variables, expected, default_number
):
    """torchrun, srun with and without --ntasks-per-node, and Lightning, which says no number."""
    assert default_number(threads, **variables) == expected


@pytest.mark.parametrize(("name", "value"), [("executable", None), ("frozen", True)])
def test_a_program_that_contains_the_interpreter_is_not_started_again(name, value, monkeypatch):
    monkeypatch.setenv(workers.VARIABLE, "2")
    monkeypatch.setattr(workers.sys, name, value, raising=False)
    assert workers.number_of_workers() == 0


def test_a_wrong_number_of_processes_is_refused(monkeypatch):
    monkeypatch.setenv(workers.VARIABLE, "many")
    with pytest.raises(ValueError, match="COMPILE_WORKERS must be a number of processes"):
        workers.number_of_workers()


class Kernel(triton.JITFunction):
    """A kernel that calls the hook of Triton and is compiled at once."""

    cache_key = property(lambda self: self.__name__)

    def __init__(self, name: str):
        self.__module__, self.__name__, self.compiled = "here", name, False

    def warmup(self, *arguments, grid, **constants):
        hook: Any = knobs.runtime.jit_cache_hook
        if not self.compiled and not (hook and hook(compile={"specialization_data": "data"})):
            self.compiled = True


@pytest.fixture
def log(monkeypatch):
    """What is marked, and the keys that a call waits for."""
    log = SimpleNamespace(marked=[], awaited=[])
    target = SimpleNamespace(backend="cuda", arch=90, warp_size=32)
    active = SimpleNamespace(get_current_device=lambda: 0, get_current_target=lambda: target)
    monkeypatch.setattr(relaunch, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(launcher, "triton_key", lambda: None)
    monkeypatch.setattr(compile_worker, "hash_sources", lambda module: None)
    monkeypatch.setattr(compile_worker, "mark", log.marked.append)
    return log


def launch(*kernels: Kernel, **constants: Any) -> None:
    for kernel in kernels:
        launcher.launch(kernel, (1, 1, 1), (), (), constants)


def test_a_call_compiles_its_kernels_and_processes_those_of_others(started, log, monkeypatch):
    own, other, known = Kernel("own"), Kernel("other"), Kernel("known")
    known.compiled = True
    waited = log.awaited.append
    monkeypatch.setattr(workers.WORKERS, "wait", lambda keys: waited((keys, own.compiled)))
    launcher.compile_only(lambda: launch(own), lambda: launch(own, other, known))
    ((key,),) = [x.keys for x in started]
    (own_key,) = log.marked
    assert (own.compiled, other.compiled, key != own_key) == (True, False, True)
    assert log.awaited == [({own_key}, False)], "it waits before it compiles"
    assert knobs.runtime.jit_cache_hook is None


def test_a_process_gives_way_to_others(monkeypatch):
    found = []
    job = {"path": sys.path, "target": ("cuda", 90, 32), "kernels": []}
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(job) + "\n"))
    monkeypatch.setattr(compile_worker.os, "nice", found.append)
    monkeypatch.setattr(compile_worker, "_skip_packages", lambda root: None)
    monkeypatch.setattr(driver, "set_active", lambda active: None)
    compile_worker.main()
    assert found == [compile_worker.NICE]


def test_a_score_function_is_not_sent_to_another_process(log):
    assert workers.describe(Kernel("own"), grid=(1,), SCORE=Kernel("score")) is None


def test_hooks_of_others_see_their_own_kernels(log, monkeypatch):
    seen = []
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", lambda **facts: seen.append(facts))
    assert workers.describe(Kernel("own"), grid=(1,)) is not None
    assert seen == []
    Kernel("other").warmup(grid=(1,))
    assert len(seen) == 1


@pytest.mark.slow(60)
def test_a_process_compiles_what_a_second_mask_needs(compiler):
    reports = compiler.reports("hopper", "second", 64)
    assert reports == [
        {"mask": "causal", "found": False, "processes": 1},
        {"mask": "full", "found": True, "processes": 1},
    ]
