"""The Hopper backend with its kernels run on the CPU by simulated_gluon."""

import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from importlib.machinery import PathFinder, SourceFileLoader
from types import CodeType, FunctionType, ModuleType
from typing import Any
from unittest.mock import patch

import torch
import torch.fx.experimental.symbolic_shapes

# What a simulation imports is forgotten at its end. So what takes long is imported here, once:
# Triton, and what the first backward pass of torch imports.
import sparseflash.backends.triton_common.launcher  # noqa: F401
from sparseflash.backends import hopper, triton_common
from sparseflash.backends.triton_common import dropout, score_mods
from sparseflash.dispatch.autograd import run
from sparseflash.score import ScoreFunction
from sparseflash.testing import check_attention, make_inputs, poisoned_empty
from tests.helpers import simulated_gluon
from tests.helpers.calls import ALWAYS_FUSED, ALWAYS_PLANNED, call_on
from tests.helpers.planted_bugs import Bug, plant

PREFIX = f"{hopper.__name__}."
CTAS = 2


@cache
def planted_code(path: str, source: bytes, bugs: tuple[Bug, ...]) -> CodeType:
    return compile(plant(source, bugs), path, "exec")


class Planter(SourceFileLoader):
    """Loads the source of a module, bugs included; compiled files are neither read nor written."""

    def __init__(self, name: str, path: str, bugs: Sequence[Bug]):
        super().__init__(name, path)
        self.bugs = tuple(bugs)

    def get_code(self, fullname):
        path = self.get_filename(fullname)
        return planted_code(path, self.get_data(path), self.bugs)


class Finder:
    """Reloads the modules of the backend, with the bugs that are planted in each."""

    def __init__(self, bugs: Mapping[str, Sequence[Bug]]):
        self.bugs = {PREFIX + name: planted for name, planted in bugs.items()}
        self.loaded: set[str] = set()

    def find_spec(self, name: str, path=None, target=None):
        spec = PathFinder.find_spec(name, path) if name.startswith(PREFIX) else None
        if spec and isinstance(spec.loader, SourceFileLoader):
            self.loaded.add(name)
            spec.loader = Planter(name, spec.loader.path, self.bugs.get(name, ()))
        return spec


@contextmanager
def simulation(
    bugs: Mapping[str, Sequence[Bug]] | None = None,
    ctas: int = CTAS,
    packed_widths: Sequence[int] = (),
) -> Iterator[None]:
    """The backend with its kernels simulated.

    Args:
        bugs: Those to plant, by module of the backend.
        ctas: How many CTAs a launch has at most.
        packed_widths: The tile widths at which the forward kernel packs heads.
    """
    finder = Finder(bugs or {})
    shared = simulated_score_mods()
    drawn = simulated_module(dropout)
    vars(drawn).update(wide_product=simulated_gluon.wide_product)
    with (
        patch.dict(sys.modules),
        patch.dict(vars(hopper)),
        patch.object(triton_common, "score_mods", shared),  # imported by its name, or of here
        patch.object(triton_common, "dropout", drawn),
        patch.object(sys, "meta_path", [finder, *sys.meta_path]),
    ):
        for name in [name for name in sys.modules if name.startswith(PREFIX)]:
            del sys.modules[name]
        for name, module in list(vars(hopper).items()):
            if isinstance(module, ModuleType) and module.__name__ == PREFIX + name:
                delattr(hopper, name)
        sys.modules[f"{PREFIX}device.gluon_compat"] = simulated_gluon
        barriers = importlib.import_module(f"{PREFIX}device.barriers")
        vars(barriers).update(simulated_gluon.BARRIERS)
        sys.modules.update({score_mods.__name__: shared, dropout.__name__: drawn})
        launch = importlib.import_module(f"{PREFIX}launch")
        vars(launch).update(multiprocessors=lambda device: ctas)
        importlib.import_module(f"{PREFIX}passes")
        if missing := finder.bugs.keys() - finder.loaded:
            raise LookupError(f"no kernel imports {missing}")
        vars(importlib.import_module(f"{PREFIX}configs")).update(
            MIN_FUSED_BLOCKS=ALWAYS_FUSED,
            MIN_PLANNED_BLOCKS=ALWAYS_PLANNED,
            PACKED_WIDTHS=packed_widths,
            MIN_PACKED_WAVES=0.0,
        )
        hopper._passes.cache_clear()
        try:
            yield
        finally:
            hopper._passes.cache_clear()


def simulated_score_mods() -> ModuleType:
    module = simulated_module(score_mods)
    vars(module).update(LN2=score_mods.LN2.value, LOG2E=score_mods.LOG2E.value)
    return module


def simulated_module(original: ModuleType) -> ModuleType:
    """What Triton and Gluon share, for tensors of torch."""
    spec = importlib.util.spec_from_file_location(original.__name__, original.__file__)
    module = importlib.util.module_from_spec(spec)
    simulated = {"triton": simulated_gluon.triton, "triton.language": simulated_gluon.tl}
    with patch.dict(sys.modules, simulated):
        spec.loader.exec_module(module)
    return module


def simulated_function(function: Any) -> FunctionType:
    """A function that Triton would compile, with those that it calls, for tensors of torch."""
    code, space = function.fn.__code__, function.fn.__globals__
    called = {name: space[name] for name in code.co_names if hasattr(space.get(name), "fn")}
    simulated = {name: simulated_function(x) for name, x in called.items()}
    return FunctionType(code, space | simulated | {"tl": simulated_gluon.tl})


def simulated_score(score: ScoreFunction) -> ScoreFunction:
    """A score function of ScoreFunction.from_torch, as the simulated kernels take it."""
    name = f"{score.name}, in the simulation"
    return ScoreFunction(name, score.torch, simulated_function(score.triton), score.tensors)


def check(
    pattern,
    head_dim=64,
    *,
    value_dim=None,
    lengths=(500, 400),
    block_size=128,
    heads=2,
    kv_heads=1,
    dtype=torch.bfloat16,
    strides="contiguous",
    scale=None,
    far_below_zero=False,
    key_lengths=None,
    dropout_p=0.0,
    deterministic=True,
    planned_order=False,
    bias=None,
    forward_tile=None,
    **options,
):
    """Checks both passes of a simulated call. Padded keys and values hold NaN and infinity."""
    batch = 1 if key_lengths is None else len(key_lengths)
    kinds = {"kv_heads": kv_heads, "dtype": dtype, "strides": strides}
    kinds["value_dim"] = head_dim if value_dim is None else value_dim
    query, key, value, grad_out = make_inputs(batch, heads, *lengths, head_dim, **kinds)
    if far_below_zero:
        query, key = query.abs() * 6, -key.abs() * 6
    mask = pattern(lengths, block_size)
    if key_lengths is not None:
        options["key_lengths"] = torch.tensor(key_lengths)
    if bias is not None:
        options["bias"] = bias(heads, sum(lengths) - 1)
    if dropout_p:
        options |= {"dropout_p": dropout_p, "seed": -(2**40) - 3}
    if scale:
        options |= {"scale": scale}
    attention = partial(
        run,
        call_on(
            *(hopper, query, key, mask, value),
            deterministic=deterministic,
            planned_order=planned_order,
            forward_tile=forward_tile,
            **options,
        ),
    )
    if key_lengths is not None:
        attention = partial(run_padded, attention, options["key_lengths"])
    with poisoned_empty():  # in the backward pass too
        check_attention(attention, query, key, value, mask, grad_out=grad_out, **options)


def run_padded(attention, key_lengths, query, key, value):
    """Attention of keys and values that no sum may read past their lengths."""
    token = torch.arange(key.shape[2])
    padding = (token >= key_lengths[:, None])[:, None, :, None]
    anything = torch.tensor([torch.nan, torch.inf, -torch.inf, 3e38])[token % 4].view(-1, 1)
    # A sum, so that padded keys get the gradients that kernels write.
    added = torch.where(padding, anything, 0.0).to(key.dtype)
    return attention(query, key + added, value + added)
