"""Processes that compile kernels of a call, and of those that may follow."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread
from threading import enumerate as enumerate_threads
from types import SimpleNamespace
from typing import Any

import pytest
import triton
from triton import knobs
from triton.runtime import driver

from sparseflash.backends.triton_common import compile_worker, launcher, relaunch, workers
from sparseflash.backends.triton_common.description import describe

ROOT = Path(__file__).parents[4]
RANK_VARIABLES = ("LOCAL_WORLD_SIZE", "LOCAL_RANK", "WORLD_SIZE")


class Process:
    """A process that replies when a test says so."""

    def __init__(self, packages: tuple[str, ...]):
        self.packages, self.requests, self.terminated, self.status = packages, [], False, 0
        reading, writing = os.pipe()
        self.stdout = os.fdopen(reading, "rb")
        self.replies = os.fdopen(writing, "wb", buffering=0)
        self.stdin = self

    def write(self, line: bytes):
        request = json.loads(line)
        self.requests.append(request | {"kernels": [x["key"] for x in request["kernels"]]})

    def flush(self):
        pass

    def close(self):
        pass

    def reply(self, key: str, error: str = ""):
        self.replies.write(json.dumps({"key": key, "error": error}).encode() + b"\n")

    def terminate(self):
        self.terminated = True

    def wait(self) -> int:
        return self.status


@pytest.fixture
def started(monkeypatch):
    """The processes that are started."""
    processes = []

    def start(packages):
        processes.append(Process(packages))
        return processes[-1]

    monkeypatch.setattr(workers, "_start", start)
    monkeypatch.setattr(compile_worker, "is_marked", lambda key: key == "marked")
    monkeypatch.setattr(workers, "WORKERS", workers.Workers())
    monkeypatch.setattr(workers, "MAX_WAIT", 30)
    monkeypatch.setenv(workers.VARIABLE, "2")
    before = {*enumerate_threads()}
    yield processes
    for process in processes:
        process.replies.close()
    for thread in {*enumerate_threads()} - before:
        thread.join()


def kernels(*keys: str) -> dict[str, workers.Description]:
    target = ("cuda", 90, 32)
    return {x: workers.Description("package.module", "kernel", "data", target, x) for x in keys}


def asked(process: Process) -> list[tuple]:
    return [(x["kernels"], x["nice"], x["most"]) for x in process.requests]


def test_one_process_is_asked_once_for_each_kernel(started):
    found = workers.WORKERS
    found.prepare("first")
    found.start(kernels("a", "b", "marked"), waits=True)
    found.start(kernels("b", "c", "d"))
    (process,) = started
    assert process.packages == ("first",)
    assert asked(process) == [(["a", "b"], 0, 2), (["c", "d"], workers.NICE, 2)]
    assert process.requests[0]["environment"] == {**os.environ}
    process.reply("a")
    found.wait({"a", "marked", "unknown"})
    found.start(kernels("a", "c"), waits=True)
    assert asked(process)[2:] == [(["c"], 0, 2)], "it may be in a queue, and is waited for now"
    found.stop()
    assert process.terminated


def test_a_process_is_started_for_new_kernels_or_before_the_first_call(started):
    """Not for calls of other lengths, whose kernels are known."""
    found = workers.WORKERS
    found.start(kernels("marked"), waits=True)
    assert started == []
    found.prepare("first")
    started[0].replies.close()
    while found._process is not None:
        time.sleep(0.01)
    found.prepare("first")
    assert len(started) == 1
    found.start(kernels("a"))
    assert started[1].packages == ("package",)


def test_a_call_waits_for_its_kernels_only(started):
    found = workers.WORKERS
    found.start(kernels("a"), waits=True)
    found.start(kernels("b"))
    waiting = Thread(target=found.wait, args=({"a"},))
    waiting.start()
    started[0].reply("b")
    waiting.join(0.2)
    assert waiting.is_alive()
    started[0].reply("a")
    waiting.join(30)
    assert not waiting.is_alive()


@pytest.mark.parametrize(("status", "messages"), [(0, 0), (1, 1)])
def test_the_end_of_a_process_is_logged_where_a_call_waits(started, caplog, status, messages):
    """One that ended after its idle time has no error; the call compiles in both cases."""
    workers.WORKERS.start(kernels("a", "b"))
    started[0].reply("a")
    started[0].status = status
    started[0].replies.close()
    workers.WORKERS.wait({"a", "b"})
    assert [x.message.endswith("it ended with status 1") for x in caplog.records] == [
        True
    ] * messages


def test_an_error_of_a_process_is_logged_where_a_call_waits(started, caplog):
    workers.WORKERS.start(kernels("a", "b"))
    started[0].reply("a", "MemoryError: of a")
    started[0].reply("b", "MemoryError: of b")
    workers.WORKERS.wait({"b"})
    (record,) = caplog.records
    assert "could not compile" in record.message
    assert record.message.endswith("of b")


def test_no_call_waits_for_a_process_that_has_ended(started):
    found = workers.WORKERS
    found.start(kernels("a"), waits=True)
    started[0].replies.close()
    before = time.monotonic()
    found.wait({"a"})
    assert time.monotonic() - before < 20
    found.start(kernels("b"))
    assert [asked(x) for x in started] == [[(["a"], 0, 2)], [(["b"], workers.NICE, 2)]]


def test_a_reply_that_a_killed_process_has_not_ended_is_none(started):
    found = workers.WORKERS
    found.start(kernels("a"), waits=True)
    started[0].replies.write(b'{"key": "a", "err')
    started[0].replies.close()
    before = time.monotonic()
    found.wait({"a"})
    assert time.monotonic() - before < 20


def test_a_process_that_has_ended_unnoticed_is_asked_in_vain(started, monkeypatch):
    def fail(line):
        raise BrokenPipeError

    found = workers.WORKERS
    found.prepare("first")
    monkeypatch.setattr(started[0], "write", fail)
    found.start(kernels("a"), waits=True)
    started[0].replies.close()
    found.wait({"a"})


def test_a_call_waits_no_longer_than_a_limit(started, monkeypatch):
    monkeypatch.setattr(workers, "MAX_WAIT", 0.01)
    workers.WORKERS.start(kernels("a"), waits=True)
    workers.WORKERS.wait({"a"})


def test_a_forked_process_starts_its_own(started):
    found = workers.WORKERS
    found.start(kernels("a"))
    found.forget()
    found.stop()
    assert not started[0].terminated
    found.start(kernels("a"))
    assert [asked(x) for x in started] == [[(["a"], workers.NICE, 2)]] * 2


def test_no_process_is_started_where_the_system_has_none(started, monkeypatch):
    def fail(packages):
        raise BlockingIOError

    monkeypatch.setattr(workers, "_start", fail)
    workers.WORKERS.start(kernels("a"), waits=True)
    workers.WORKERS.wait({"a"})


def test_a_cache_that_cannot_be_written_is_read(monkeypatch, tmp_path):
    """Folders of images and of other users have kernels, but take no marks."""
    (tmp_path / "file").touch()  # also root cannot write below a file
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setenv(workers.VARIABLE, "2")
    monkeypatch.setattr(workers, "_start", None)
    key = "ab" * 32
    compile_worker.mark(key)
    workers.Workers().start(kernels(key), waits=True)


def test_no_process_and_no_description_if_the_number_is_zero(log, monkeypatch):
    monkeypatch.setenv(workers.VARIABLE, "0")
    monkeypatch.setattr(launcher, "describe", None)
    monkeypatch.setattr(workers, "WORKERS", SimpleNamespace())
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
    ("threads", "ranks", "expected"),
    [(2, 1, 0), (3, 1, 0), (4, 1, 2), (16, 1, 8), (16, 2, 4), (64, 1, 12), (64, 8, 4)],
)
def test_the_default_follows_the_processor_threads(threads, ranks, expected, default_number):
    assert default_number(threads, LOCAL_WORLD_SIZE=ranks) == expected


@pytest.mark.parametrize("ranks", ["", "many", "0", "-1"])
def test_a_number_of_ranks_that_is_none_is_not_read(ranks, default_number):
    assert default_number(16, LOCAL_WORLD_SIZE=ranks) == 8


@pytest.mark.parametrize(
    ("threads", "variables", "expected"),
    [
        (64, {"SLURM_NTASKS_PER_NODE": 8, "SLURM_LOCALID": 3}, 4),
        (8, {"SLURM_NTASKS_PER_NODE": 8, "SLURM_LOCALID": 3, "SLURM_CPUS_ON_NODE": 64}, 4),
        (64, {"SLURM_NTASKS": 16, "SLURM_LOCALID": 0}, 4),
        (64, {"SLURM_NTASKS": 1, "SLURM_LOCALID": 0}, 12),
        (64, {"WORLD_SIZE": 16, "LOCAL_RANK": 0}, 4),
        (64, {"WORLD_SIZE": 4, "LOCAL_RANK": 0}, 8),
        (64, {"LOCAL_RANK": 7}, 4),
        (64, {"LOCAL_WORLD_SIZE": 4, "WORLD_SIZE": 32, "LOCAL_RANK": 0}, 8),
        (64, {"LOCAL_WORLD_SIZE": 4, "SLURM_NTASKS_PER_NODE": 1, "SLURM_CPUS_ON_NODE": 128}, 8),
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


def test_processes_compile_the_kernels_of_a_call_and_then_those_of_others(
    started, log, monkeypatch
):
    own, other, known = Kernel("own"), Kernel("other"), Kernel("known")
    more = [Kernel(f"more {i}") for i in range(9)]
    known.compiled = True
    waited = log.awaited.append
    monkeypatch.setattr(workers.WORKERS, "wait", lambda keys: waited((keys, own.compiled)))
    launcher.compile_only(lambda: launch(own), lambda: launch(own, other, known, *more))
    (process,) = started
    (own_key,) = log.marked
    (own_keys, own_nice, _), (other_keys, other_nice, _) = asked(process)
    assert (own_keys, own_nice, other_nice) == ([own_key], 0, workers.NICE)
    expected = [x and x.key for x in (describe(kernel, grid=(1,)) for kernel in (other, *more))]
    assert other_keys == expected, "in the order in which they are launched"
    assert (own.compiled, other.compiled) == (True, False)
    assert log.awaited == [({own_key}, False)], "it waits before it compiles"
    assert knobs.runtime.jit_cache_hook is None


# Runs the server of compile_worker.py with a function that compiles nothing.
SERVER = """
import os, runpy, sys, time
worker = runpy.run_path(sys.argv[1])

def compile(job):
    kind = job["data"]
    if kind == "fail":
        raise MemoryError("of a kernel")
    if kind == "die":
        os.kill(os.getpid(), 9)
    with open("log", "a", buffering=1) as log:
        print(job["key"], os.getpid(), file=log)
        while kind == "wait" and not os.path.exists(job["key"]):
            time.sleep(0.01)

worker["_Server"].run.__globals__["_compile"] = compile
with worker["_Server"](0, 1) as server:
    server.run()
"""


@pytest.fixture
def server(tmp_path):
    command = [sys.executable, "-c", SERVER, compile_worker.__file__]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, cwd=tmp_path) as process:
        yield SimpleNamespace(process=process, folder=tmp_path)
        process.stdin.close()  # ends those that it has forked, too; to kill it would not
        try:
            process.wait(30)
        finally:
            process.kill()


def request(server, kinds: dict[str, str], nice: int = 0, most: int = 1) -> None:
    asked = [{"key": key, "data": kind} for key, kind in kinds.items()]
    line = json.dumps({"kernels": asked, "nice": nice, "most": most})
    server.process.stdin.write(line.encode() + b"\n")
    server.process.stdin.flush()


def running(server, count: int) -> list[str]:
    """The kernels whose processes have started, when there are so many."""
    log, end = server.folder / "log", time.monotonic() + 60
    while time.monotonic() < end:
        lines = log.read_text().splitlines() if log.exists() else []
        if len(lines) >= count:
            return [line.split()[0] for line in lines]
        time.sleep(0.01)
    raise TimeoutError


def replies(server, count: int) -> list[dict[str, str]]:
    return [json.loads(server.process.stdout.readline()) for _ in range(count)]


def test_kernels_that_a_call_waits_for_come_first_and_all_at_once(server):
    request(server, dict.fromkeys("abc", "wait"), nice=10)
    assert running(server, 1) == ["a"]
    request(server, dict.fromkeys("xyc", "wait"))
    assert sorted(running(server, 4)) == ["a", "c", "x", "y"]
    for key in "axyc":
        (server.folder / key).touch()
    assert sorted(x["key"] for x in replies(server, 4)) == ["a", "c", "x", "y"]
    assert running(server, 5)[-1] == "b"


def test_errors_and_ends_of_processes_are_replies(server):
    request(server, {"a": "fail", "b": "die", "c": "nothing"})
    found = {x["key"]: x["error"] for x in replies(server, 3)}
    assert found["a"].startswith("Traceback")
    assert found["a"].endswith("MemoryError: of a kernel\n")
    assert found["b"] == "the process ended with status -9"
    assert found["c"] == ""


def test_processes_end_with_the_one_that_asked_for_them(server):
    request(server, {"a": "wait"})
    running(server, 1)
    process = int((server.folder / "log").read_text().split()[1])
    server.process.stdin.close()
    assert server.process.wait(30) == 0
    end = time.monotonic() + 30
    while Path(f"/proc/{process}").exists() and time.monotonic() < end:
        time.sleep(0.01)
    assert not Path(f"/proc/{process}").exists()


def test_the_process_ends_when_it_has_nothing_to_compile():
    soon = 'worker["_Server"].run.__globals__["IDLE"] = 0.1\nwith worker'
    command = [sys.executable, "-c", SERVER.replace("with worker", soon), compile_worker.__file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        assert process.wait(30) == 0


@pytest.fixture
def job(monkeypatch):
    """A job, in a process whose niceness and environment it would change."""
    noted: dict = {"nice": []}
    monkeypatch.setattr(compile_worker.os, "nice", noted["nice"].append)
    monkeypatch.setattr(compile_worker.os, "environ", noted.setdefault("environment", {"A": "1"}))
    monkeypatch.setattr(driver, "set_active", lambda active: None)
    monkeypatch.setattr(compile_worker, "hash_sources", lambda module: None)
    monkeypatch.setattr(compile_worker, "mark", lambda key: noted.setdefault("marked", key))
    kernel = SimpleNamespace(preload=lambda data: noted.setdefault("compiled", data))
    kernel.device_caches, kernel.compile = [None], None
    monkeypatch.setitem(sys.modules, "here", SimpleNamespace(kernel=kernel))
    facts = {"module": "here", "name": "kernel", "data": "data", "key": "key"}
    return noted, facts | {"nice": 10, "environment": {"B": "2"}, "target": ("cuda", 90, 32)}


def test_a_kernel_is_compiled_with_the_niceness_and_the_variables_of_its_request(job):
    noted, facts = job
    compile_worker._compile(facts)
    assert noted == {"nice": [10], "environment": {"B": "2"}, "compiled": "data", "marked": "key"}


def test_a_score_function_is_not_sent_to_another_process(log):
    assert describe(Kernel("own"), grid=(1,), SCORE=Kernel("score")) is None


def test_hooks_of_others_see_their_own_kernels(log, monkeypatch):
    seen = []
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", lambda **facts: seen.append(facts))
    assert describe(Kernel("own"), grid=(1,)) is not None
    assert seen == []
    Kernel("other").warmup(grid=(1,))
    assert len(seen) == 1


# That of a process that compiles, and that of a call until it starts this one.
IMPORTS = {
    "compiles": (
        "import runpy, sys, pathlib\n"
        "worker = runpy.run_path(sys.argv[1])\n"
        "worker['_skip_packages'](pathlib.Path('sparseflash'))\n"
        "for name in ('hopper', 'triton'):\n"
        "    worker['hash_package'](f'sparseflash.backends.{name}.kernels')\n"
        "assert 'triton' in sys.modules and 'torch' not in sys.modules"
    ),
    "calls": (
        "import sys, torch\n"
        "import sparseflash.backends.triton_common.workers, sparseflash.dispatch.compile\n"
        "assert 'triton' not in sys.modules"
    ),
}


@pytest.mark.parametrize("name", IMPORTS)
def test_a_process_is_started_before_triton_and_does_without_torch(name, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    command = [sys.executable, "-c", IMPORTS[name], compile_worker.__file__]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# A program that asks for a kernel that does not exist.
ASKS = """
import logging, os, signal, sys
from sparseflash.backends.triton_common import workers

signal.signal(signal.SIGCHLD, getattr(signal, sys.argv[1]))
logging.basicConfig(stream=sys.stdout)
kernel = workers.Description(
    "sparseflash.backends.triton.kernels.decode", "no_kernel", "", ("cuda", 90, 32), "ab" * 32
)
workers.WORKERS.start({kernel.key: kernel}, waits=True)
workers.WORKERS.wait({kernel.key})
"""


@pytest.mark.parametrize("ends", ["SIG_DFL", "SIG_IGN"])
def test_replies_come_whatever_modules_print_and_programs_ignore(ends, monkeypatch, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('printed by', __file__)")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv(workers.VARIABLE, "2")
    command = [sys.executable, "-c", ASKS, ends]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "has no attribute 'no_kernel'" in done.stdout
    assert done.stderr == ""


@pytest.mark.slow(60)
def test_a_process_compiles_what_a_second_mask_needs(compiler):
    reports = compiler.reports("hopper", "second", 64)
    assert reports == [{"mask": "causal", "found": True}, {"mask": "full", "found": True}]


def test_an_error_in_a_kernel_reaches_the_call(compiler):
    (report,) = compiler.reports("triton", "failing", 90)
    assert report["error"] == "BLOCK must be 32, got 16"
    assert "could not compile a kernel" in report["log"]
    assert "BLOCK must be 32" in report["log"]
