"""A progress bar of work that may take long."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SECONDS_UNTIL_BAR = 2.0

Progress = Callable[[int, int], None]  # called with (done, total)


@contextmanager
def late_bar(label: str) -> Iterator[Progress]:
    """A bar on the terminal's standard error from SECONDS_UNTIL_BAR on, and what moves it."""
    began, bar, task = time.monotonic(), None, None

    def move(done: int, total: int) -> None:
        nonlocal bar, task
        if bar is None and time.monotonic() - began > SECONDS_UNTIL_BAR:
            from rich.console import Console  # it takes 0.1 s to import
            from rich.progress import Progress as Bar

            bar = Bar(console=Console(stderr=True), transient=True)
            task = bar.add_task(label)
            bar.start()
        if bar is not None and task is not None:
            bar.update(task, completed=done, total=total)

    try:
        yield move
    finally:
        if bar is not None:
            bar.stop()
