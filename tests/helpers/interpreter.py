"""Triton's interpreter, made three times as fast for the tests."""

import triton.language as tl
from triton.runtime import interpreter


class _Patches:
    """Patches each module of triton.language once a launch.

    The interpreter does so again at each call of one jitted function by another, where nothing is
    left to patch. That takes 40 % of the time of our kernels.
    """

    def __init__(self, patch):
        self.patch, self.scopes = patch, {}

    def __call__(self, function):
        seen = frozenset(id(x) for x in function.__globals__.values() if x is tl or x is tl.core)
        if seen not in self.scopes:
            self.scopes[seen] = self.patch(function)
        return self

    def restore(self):
        while self.scopes:
            self.scopes.popitem()[1].restore()


def patch_once_a_launch() -> None:
    """Calls of jitted functions inside of a kernel patch triton.language no more."""
    interpreter._patch_lang = _Patches(interpreter._patch_lang)


def keep_types() -> None:
    """Types of blocks are made once for each shape, and dtypes of NumPy once for each of Triton.

    The interpreter asks for them at every operation, which takes 20 % of the time of our kernels.
    """
    dtypes, made = {}, {}
    numpy_dtype, make = interpreter._get_np_dtype, tl.core.block_type.__init__

    def kept_dtype(of):
        name = of.scalar.name
        if name not in dtypes:
            dtypes[name] = numpy_dtype(of)
        return dtypes[name]

    def kept(self, element_ty, shape):
        key = element_ty.name, *(getattr(size, "value", size) for size in shape)
        if key not in made:
            make(self, element_ty, shape)
            made[key] = vars(self).copy()
        vars(self).update(made[key])

    interpreter._get_np_dtype = kept_dtype
    tl.core.block_type.__init__ = kept


def check_overflow(wanted: bool) -> None:
    """Whether sums and products of int32 are computed in int64 too, to see that they fit."""
    options = interpreter.interpreter_builder.options
    object.__setattr__(options, "sanitize_overflow", wanted)  # a frozen dataclass
