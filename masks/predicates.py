"""Block masks from functions of tokens or of blocks, evaluated at every pair."""

import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock

import torch
from torch import Tensor

from masks._core import convert
from masks._core.elementwise import ElementwiseFunction
from masks._core.grid import Grid
from masks._core.intervals import concatenate, from_bool_matrix
from masks._core.ranges import Spans
from masks.block_mask import BlockMask
from masks.builders import BLOCKS_AT_ONCE, from_runs
from masks.progress import late_bar

PAIRS_FOR_THREADS = 1 << 24  # fewer are read before threads have started


def from_predicate(
    grid: Grid, name: str, attends: Callable[[Tensor, Tensor], Tensor]
) -> BlockMask:
    """The mask of attends(q, k), a function of int64 token indices (n, 1) and (1, k_len).

    Evaluated strip by strip, on all cores of a CPU, with a progress bar when it takes long.
    """
    with _modes_of_masks(grid.device):
        return _from_pairs(grid, name, attends)


def _from_pairs(grid: Grid, name: str, attends: Callable[[Tensor, Tensor], Tensor]) -> BlockMask:
    q = torch.arange(grid.q_len, device=grid.device)[:, None]
    k = torch.arange(grid.k_len, device=grid.device)[None]
    recorded = ElementwiseFunction(attends)
    _evaluate(name, recorded.record, q[:2], k, (min(grid.q_len, 2), grid.k_len))
    is_elementwise = recorded.prepare(q, k)
    pair_bytes = recorded.pair_bytes() if is_elementwise else torch.int64.itemsize
    decide = packed = None
    if is_elementwise:
        width = convert.span(grid)
        decide = recorded.decisions(width)
        packed = recorded.packed(-(-grid.k_len // width) * width)

    def pairs(_: int, rows: slice, spans: Spans | None = None) -> Tensor:
        keys = spans.first.numel() * spans.width if spans else grid.k_len
        shape = (rows.stop - rows.start, keys)
        if is_elementwise:
            return recorded.pairs(rows, spans).expand(shape)
        return _evaluate(name, attends, q[rows], k, shape)

    threads = grid.device.type == "cpu" and grid.q_len * grid.k_len > PAIRS_FOR_THREADS
    run = _in_threads if threads else map
    read = functools.partial(_with_progress, f"reading {name}", run)
    return BlockMask(
        convert.from_strips(
            grid,
            pairs,
            pair_bytes=pair_bytes,
            run=read,
            decide=decide,
            read_packed=packed.pairs if packed else None,
        )
    )


def from_block_predicate(
    grid: Grid, name: str, attends: Callable[[Tensor, Tensor], Tensor]
) -> BlockMask:
    """The mask of attends(i, j), a function of int64 block indices (n, 1) and (1, nk)."""
    parts = []
    with _modes_of_masks(grid.device):
        j = torch.arange(grid.nk, device=grid.device)[None]
        rows = torch.arange(grid.nq, device=grid.device)[:, None]
        for i in rows.split(max(1, BLOCKS_AT_ONCE // grid.nk)):
            blocks = _evaluate(name, attends, i, j, (len(i), grid.nk))
            parts.append(from_bool_matrix(blocks[None]).shift(int(i[0]) * grid.row_stride))
    return from_runs(grid, concatenate(parts))


@contextmanager
def _modes_of_masks(device: torch.device) -> Iterator[None]:
    """The modes of torch in which functions are called: no autocast, no gradients.

    A new thread begins without autocast and inference mode, so a mask is the same whichever thread
    evaluates it.
    """
    no_autocast = torch.autocast(device.type, enabled=False)
    with torch.inference_mode(False), torch.no_grad(), no_autocast:
        yield


def _in_threads(read: Callable, strips: list) -> Iterator:
    """map with a thread for each core, in each of which torch uses no other threads."""

    def start() -> None:
        torch.set_num_threads(1)  # of this thread, and of threads started while it runs
        torch.set_grad_enabled(False)  # of this thread; see _modes_of_masks

    with _SINGLE as threads, ThreadPoolExecutor(threads, initializer=start) as pool:
        yield from pool.map(read, strips)


class _SingleThreaded:
    """A context in which torch uses one thread: all cores are busy, and more would wait.

    Several threads may be in it at the same time. The last one to leave restores the number.
    """

    def __init__(self):
        self._lock, self._inside, self._threads = Lock(), 0, 0

    def __enter__(self) -> int:
        """Returns the number of threads that torch used before."""
        with self._lock:
            if not self._inside:
                self._threads = torch.get_num_threads()
            self._inside += 1
            torch.set_num_threads(1)
            return self._threads

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                torch.set_num_threads(self._threads)


_SINGLE = _SingleThreaded()


def _with_progress(label: str, run: Callable, read: Callable, strips: list) -> Iterator:
    """run(read, strips), with a progress bar if it takes long."""
    with late_bar(label) as progress:
        for done, result in enumerate(run(read, strips), 1):
            progress(done, len(strips))
            yield result


def _evaluate(name: str, attends: Callable, q: Tensor, k: Tensor, shape: tuple) -> Tensor:
    """attends(q, k), checked and expanded to `shape`."""
    before = q._version, k._version
    try:
        answer = attends(q, k)
    except RuntimeError as error:
        if "ambiguous" not in str(error):
            raise
        raise ValueError(
            f"pattern {name} must use & | ~ and torch.where, not and, or, not and if: {error}"
        ) from error
    if (q._version, k._version) != before:
        raise ValueError(f"pattern {name} must not change its arguments in place")
    return _checked(name, answer, shape)


def _checked(name: str, answer, shape: tuple[int, int]) -> Tensor:
    if not isinstance(answer, Tensor) or answer.dtype != torch.bool:
        got = answer.dtype if isinstance(answer, Tensor) else type(answer).__name__
        raise TypeError(f"pattern {name} must return a bool tensor, got {got}")
    try:
        return answer.expand(shape)
    except RuntimeError:
        raise ValueError(
            f"pattern {name} must return a tensor that broadcasts to {shape}, got "
            f"{tuple(answer.shape)}: it is called for some of the rows at a time"
        ) from None
