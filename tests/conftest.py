"""Fixtures of every test, and the rules that say which tests run on this machine."""

import gc
import os
import random
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from tests.helpers.compiler import Compiler
from tests.helpers.ranks import Ranks

RECORDS = Path(__file__).parent / "records"
HAS_GPU = torch.cuda.is_available()

# Triton reads this when it is first imported; without a GPU its kernels run in the interpreter.
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
    from tests.helpers import interpreter

    interpreter.call_builtins_directly()
    interpreter.patch_once_a_launch()
    interpreter.keep_types()

# xdist's workers share the cores; torch's default is one thread per core for each of them, and for
# each process that a test starts.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
    os.environ["SPARSEFLASH_COMPILE_WORKERS"] = "0"

# The time of one example says nothing on a shared machine.
settings.register_profile("sparseflash", deadline=None)
settings.load_profile("sparseflash")


def pytest_addoption(parser):
    parser.addoption(
        "--seed", default="0", help="of the first case of each fuzzer: a number, or 'random'"
    )
    parser.addoption("--fuzz-cases", type=int, help="how many cases each fuzzer tries")
    parser.addoption(
        "--every-kernel",
        action="store_true",
        help="compile all kernels that ship, not only those that calls take first",
    )


@pytest.hookimpl(tryfirst=True)  # before xdist tells its workers
def pytest_configure(config):
    seed = config.option.seed
    config.option.seed = random.randrange(2**31) if seed == "random" else int(seed)
    if config.option.numprocesses:
        # Workers inherit it. NumPy reads it when it is imported: later its threads exist, and wait
        # for work in a loop that takes the cores from other workers.
        os.environ["OMP_NUM_THREADS"] = "1"


def pytest_report_header(config) -> str:
    return f"fuzzers: --seed {config.option.seed}"


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Of what is imported and collected little is garbage; to look for it takes a quarter longer,
    and later at each collection of garbage.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure():
    gc.unfreeze()  # libraries report what they find at the end as leaked


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by marker
def pytest_collection_modifyitems(items):
    for item in items:
        if RECORDS in item.path.parents:
            item.add_marker(pytest.mark.records)
        if takes_the_gpu(item):
            item.add_marker(pytest.mark.gpu)
        if item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.get_closest_marker("slow_interpreted") and not HAS_GPU and "triton" in item.name:
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("interpret") and HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="Triton compiles for the GPU here"))
    items.sort(key=seconds, reverse=True)  # no worker is left with a long test at the end


def takes_the_gpu(item) -> bool:
    """Whether there is a GPU, and the test's module says that its tests then run there."""
    module = getattr(item, "module", None)
    device = str(getattr(module, "DEVICE", "cpu"))
    return HAS_GPU and (hasattr(module, "HAS_GPU") or device.startswith("cuda"))


def seconds(item) -> int:
    """That a test takes, by its marker: slow(seconds) or compiles(seconds)."""
    marker = item.get_closest_marker("slow") or item.get_closest_marker("compiles")
    return marker.args[0] if marker and marker.args else 0


if not HAS_GPU:

    @pytest.fixture(autouse=True)
    def overflow(request):
        """Slow tests look for overflow in interpreted kernels, which doubles their time."""
        interpreter.check_overflow(request.node.get_closest_marker("slow") is not None)


@pytest.fixture
def one_thread():
    """Small steps of training spend their time waiting for one another's threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def ranks_of(count: int):
    """A fixture: processes that share a sequence, started once for the tests of a file."""

    @pytest.fixture(scope="module")
    def started(tmp_path_factory):
        ranks = Ranks(count, tmp_path_factory.mktemp("ranks") / "meeting")
        yield ranks
        ranks.close()

    return started


@pytest.fixture(scope="session")
def compiler():
    """Compiles kernels where others are interpreted."""
    compiler = Compiler()
    yield compiler
    compiler.close()


one_rank, two_ranks, four_ranks = map(ranks_of, (1, 2, 4))


@pytest.fixture(params=["two_ranks", "four_ranks"], ids=["2 ranks", "4 ranks"])
def ranks(request) -> Ranks:
    return request.getfixturevalue(request.param)


@pytest.fixture(autouse=True)
def seed() -> int:
    """Seeds torch before every test, and says with what."""
    if HAS_GPU:
        torch.manual_seed(0)
    else:
        # That would keep the stack of the call for each kind of device, and take a millisecond.
        torch.default_generator.manual_seed(0)
    return 0
