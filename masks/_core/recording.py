"""Records the operations of torch that a function of (query, key) calls."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from threading import RLock
from typing import Any, NamedTuple

from torch import Tensor, compiler
from torch.utils._python_dispatch import TorchDispatchMode


class Step(NamedTuple):
    """A recorded operation."""

    operation: Any
    arguments: tuple
    options: dict[str, Any]
    result: Any


class _Recorder(TorchDispatchMode):
    """Records every operation of torch while it is active."""

    supports_higher_order_operators = True  # torch.cond and the like, else refused

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # so that torch does not import torch._dynamo, which takes a second

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.steps.append(Step(func, args, kwargs or {}, result))
        return result


def record(
    function: Callable[[Tensor, Tensor], Any], q: Tensor, k: Tensor
) -> tuple[Any, list[Step]]:
    """Calls a function; returns its result and the operations that computed it."""
    if not _dynamo_is_loaded():
        function(q, k)  # torch.cond and the like load it
    with _one_at_a_time, _eager(), _Recorder() as recorder:
        output = function(q, k)
    return output, recorder.steps


def inputs_of(step: Step) -> list[Tensor]:
    """The tensors among the arguments of a step, also in lists."""
    arguments = [*step.arguments, *step.options.values()]
    flat = [a for item in arguments for a in (item if isinstance(item, (list, tuple)) else [item])]
    return [argument for argument in flat if isinstance(argument, Tensor)]


_one_at_a_time = RLock()  # the stance of the compiler is that of all threads


def _dynamo_is_loaded() -> bool:
    return "torch._dynamo" in sys.modules


def _eager() -> AbstractContextManager:
    """Keeps torch.cond and the like from compiling, which fails under a dispatch mode."""
    if _dynamo_is_loaded() and not compiler.is_compiling():
        with suppress(RuntimeError):  # in a function that is being compiled
            return compiler.set_stance("force_eager")
    return nullcontext()
