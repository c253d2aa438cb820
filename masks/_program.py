"""Programs that read their command line before they import torch, which takes seconds."""

import importlib
import sys

PROGRAMS = ("masks", "sparseflash")


def is_starting() -> bool:
    """Whether Python looks for the `__main__` of one of PROGRAMS: `python -m masks`."""
    # Meanwhile "-m" stands in argv for the path that is looked for.
    return sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)] in PROGRAMS


def finish_imports() -> None:
    """Imports what packages left out because a program was starting."""
    for name in PROGRAMS:
        if name in sys.modules:
            importlib.reload(sys.modules[name])
