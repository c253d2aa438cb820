"""The self-check: compares every backend of this machine with float64."""

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice, product
from multiprocessing import get_context

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import masks
from masks.arguments import check_integer
from sparseflash import backends
from sparseflash._attention import attention
from sparseflash.backends.select import reasons_against
from sparseflash.dispatch.spec import AttentionSpec, CallFacts
from sparseflash.options import AttentionOptions
from sparseflash.testing.error_budget import check_attention, make_inputs

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HEAD_DIMS = (32, 64, 80, 128, 256)
BLOCK_SIZES = ((64, 64), (128, 128), (32, 64), (128, 64))
LENGTHS = (260, 200)
PATTERNS = (
    masks.full(),
    masks.causal(align="bottom-right"),
    masks.local(40, align="top-left"),
    masks.butterfly(),
    masks.random(0.4) - masks.global_tokens(40),  # some queries have no key
    masks.pattern(lambda q, k: (q * k) % 5 == 1),
)
Lengths = tuple[int, int]
CHECKS: tuple[tuple[masks.Pattern, Lengths], ...] = (
    *((pattern, LENGTHS) for pattern in PATTERNS),
    (masks.causal(align="bottom-right"), (3, 500)),  # few queries, as in decoding
)
# The checks of a case, in parts for parallel processes. Masks of full blocks need other kernels,
# and compiling a kernel takes longer than a check.
PARTS = (slice(0, 1), slice(1, None))


@dataclass(frozen=True)
class Case:
    """A combination of options that is checked with every pattern, forward and backward."""

    backend: str
    device: str
    dtype: torch.dtype
    head_dim: int
    block_size: tuple[int, int]
    dropout_p: float
    padded: bool

    def inputs(self, lengths: Lengths):
        return make_inputs(
            *(2, 2, *lengths, self.head_dim), kv_heads=1, dtype=self.dtype, device=self.device
        )

    def why_not(self) -> list[str]:
        """The reasons for which the backend cannot compute this case."""
        query, key, value, _ = self.inputs(LENGTHS)
        mask = PATTERNS[0](LENGTHS, self.block_size, self.device)
        options = AttentionOptions(dropout_p=self.dropout_p, backend=self.backend)
        spec = AttentionSpec.from_call(query, key, value, mask, options, CallFacts(self.padded))
        (backend,) = (b for b in backends.BACKENDS if b.name == self.backend)
        return reasons_against(backend, spec, mask)

    def run(self, pattern: masks.Pattern, lengths: Lengths) -> None:
        """Checks one pattern. Raises AssertionError if an error exceeds the error budget."""
        query, key, value, grad_out = self.inputs(lengths)
        mask = pattern(lengths, self.block_size, self.device)
        options = {}
        if self.padded:
            options["key_lengths"] = torch.tensor([0, lengths[1] - 70], device=self.device)
        if self.dropout_p:
            options |= {"dropout_p": self.dropout_p, "seed": 1}

        def attend(query, key, value):
            chosen = {"mask": mask, "backend": self.backend}
            out, lse = attention(query, key, value, return_lse=True, **chosen, **options)
            return out, lse

        check_attention(attend, query, key, value, mask, grad_out=grad_out, **options)


def selfcheck(console: Console | None = None, processes: int = 1) -> int:
    """Compares every backend of this machine with float64: out, lse and gradients.

    The cases have several dtypes, head dims, block sizes and patterns, with dropout and padded
    keys. A check fails if an error is more than about twice that of materialised attention in the
    same dtype. The results are printed as a table.

    Args:
        console: The console to which the table is printed.
        processes: Number of parallel processes, which compile kernels. If there are several, they
            are spawned, so a script must call this under `if __name__ == "__main__":`.

    Returns:
        The number of checks that failed; 1 if there was no check.

    Raises:
        TypeError, ValueError: `processes` is not an integer or below 1.
    """
    processes = check_integer("processes", processes, least=1)
    console = console or Console()
    table = Table("backend", "device", "dtype", "head dim", "block", "options", "result")
    to_check = list(cases())
    failures = int(not to_check)
    parts = list(product(to_check, PARTS))
    with _mapping(processes) as mapped:
        results = mapped(_failures, [case for case, _ in parts], [part for _, part in parts])
        tracked = track(results, "selfcheck", len(parts), console=console, transient=True)
        checked = iter(list(tracked))
    for case in to_check:
        messages = [message for _ in PARTS for message in next(checked)]
        failures += len(messages)
        options = ["dropout"] * (case.dropout_p > 0) + ["padded keys"] * case.padded
        table.add_row(
            *(case.backend, case.device, str(case.dtype).removeprefix("torch.")),
            *(str(case.head_dim), str(case.block_size), ", ".join(options)),
            "\n".join(messages) or "[green]ok",
        )
    console.print(table)
    for name, reasons in unavailable().items():
        console.print(f"{name} is not checked: {'; '.join(reasons)}")
    console.print(f"{failures} failures" if failures else "all within the error budget")
    return failures


def cases() -> Iterator[Case]:
    """The cases that the backends of this machine can compute."""
    for backend in backends.BACKENDS:
        for device in _devices():
            # Every second combination, because compiling a kernel takes longer than a check.
            combinations = [(dtype, dim) for dtype in DTYPES for dim in HEAD_DIMS][::2]
            for i, (dtype, head_dim) in enumerate(combinations):
                # Every block size and option occurs in a few cases: the first variant that the
                # backend can compute.
                variants = (_case(backend.name, device, dtype, head_dim, i + n) for n in range(12))
                yield from islice((case for case in variants if not case.why_not()), 1)


def _case(backend: str, device: str, dtype: torch.dtype, head_dim: int, i: int) -> Case:
    """The i-th of the combinations of a block size and an option."""
    block_size = BLOCK_SIZES[i % len(BLOCK_SIZES)]
    return Case(backend, device, dtype, head_dim, block_size, 0.2 * (i % 3 == 1), i % 3 == 2)


def unavailable() -> dict[str, list[str]]:
    """The backends that can compute no case, with their reasons on the first device."""
    used = {case.backend for case in cases()}
    first = partial(Case, device=_devices()[0], dtype=torch.float16, head_dim=64)
    return {
        b.name: first(b.name, block_size=(128, 128), dropout_p=0.0, padded=False).why_not()
        for b in backends.BACKENDS
        if b.name not in used
    }


def _devices() -> list[str]:
    return ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]


@contextmanager
def _mapping(processes: int) -> Iterator[Callable]:
    """`map`, or the map of a pool of processes."""
    if processes == 1:
        yield map
        return
    threads = max(1, torch.get_num_threads() // processes)
    context = get_context("spawn")
    with ProcessPoolExecutor(processes, context, torch.set_num_threads, (threads,)) as pool:
        yield pool.map


def _failures(case: Case, part: slice) -> list[str]:
    """The messages of the failed checks of one part of a case."""
    return [
        f"{pattern} at {lengths}: {why}"
        for pattern, lengths in CHECKS[part]
        if (why := _failure(partial(case.run, pattern, lengths)))
    ]


def _failure(check: Callable[[], None]) -> str:
    """Runs a check; returns the error if it fails, else an empty text."""
    try:
        check()
    except Exception as error:  # a kernel may fail in any way; the other checks must still run
        return f"{type(error).__name__}: {error}"
    return ""
