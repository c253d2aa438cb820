"""Ctrl-C during training: the current step is finished first."""

import signal
from collections.abc import Callable
from threading import current_thread, main_thread


class Interrupt:
    """Keeps the first Ctrl-C for the end of a step. A second one raises KeyboardInterrupt at once.

    Attributes:
        asked: Whether there was a Ctrl-C since `begin`.

    Args:
        say: Called with what a Ctrl-C will do.
    """

    def __init__(self, say: Callable[[str], object] = print):
        self.asked = False
        self._say, self._before = say, None

    def begin(self) -> None:
        """From here on Ctrl-C is kept. Python allows this in the main thread only."""
        self.asked = False
        if self._before is None and current_thread() is main_thread():
            self._before = signal.signal(signal.SIGINT, self._ask)

    def end(self) -> None:
        """Ctrl-C is again what it was before `begin`."""
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self._before = None

    def __enter__(self) -> "Interrupt":
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _ask(self, *_: object) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self._say("Stops after this step; interrupt once more to stop at once.")
