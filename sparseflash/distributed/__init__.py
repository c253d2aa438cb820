"""Context parallelism: attention over a sequence that is sharded over ranks."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparseflash.distributed.attention import context_parallel_attention
    from sparseflash.distributed.copies import Copies
    from sparseflash.distributed.plan import ContextPlan
    from sparseflash.distributed.planning import make_plan
    from sparseflash.distributed.report import Report
    from sparseflash.distributed.transport import gather

__all__ = [
    "ContextPlan",
    "Copies",
    "Report",
    "context_parallel_attention",
    "gather",
    "make_plan",
]

_MODULES = {
    "ContextPlan": "plan",
    "Copies": "copies",
    "Report": "report",
    "context_parallel_attention": "attention",
    "gather": "transport",
    "make_plan": "planning",
}


def __getattr__(name: str):
    """A public name, imported at its first use: torch takes seconds, and `--help` needs none."""
    if name not in _MODULES:
        raise AttributeError(f"module 'sparseflash.distributed' has no attribute {name!r}")
    return getattr(import_module(f"sparseflash.distributed.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
