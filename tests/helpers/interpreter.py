"""Triton's interpreter, made four times as fast for the tests."""

from weakref import WeakKeyDictionary

import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


class _Patches:
    """Patches each module of triton.language once a launch.

    The interpreter does so again at each call of one jitted function by another, where nothing is
    left to patch. That takes 40 % of the time of our kernels.
    """

    def __init__(self, patch):
        self.patch, self.scopes = patch, {}
        self.seen: WeakKeyDictionary = WeakKeyDictionary()  # modules that a function can see

    def __call__(self, function):
        if function not in self.seen:
            modules = (id(x) for x in function.__globals__.values() if x is tl or x is tl.core)
            self.seen[function] = frozenset(modules)
        seen = self.seen[function]
        if seen not in self.scopes:
            self.scopes[seen] = self.patch(function)
        return self

    def restore(self):
        while self.scopes:
            self.scopes.popitem()[1].restore()


def patch_once_a_launch() -> None:
    """Calls of jitted functions inside of a kernel patch triton.language no more."""
    interpreter._patch_lang = _Patches(interpreter._patch_lang)


def call_builtins_directly() -> None:
    """Builtins of Triton get the interpreter as an argument from one function, not from two.

    What patches them wraps each in a function that copies its keywords, around another that looks
    for this argument.
    """
    patch = interpreter._patch_attr

    def patch_directly(owner, name, member, *scope):
        patch(owner, name, member, *scope)  # which knows how to restore it
        function = getattr(member, "__wrapped__", member)

        def call(*arguments, **keywords):
            keywords["_semantic"] = interpreter.interpreter_semantic
            return function(*arguments, **keywords)

        setattr(owner, name, call)

    interpreter._patch_attr = patch_directly


def keep_types() -> None:
    """Types of blocks are made once for each shape, what tensors have of their type once for each
    type, types of results once for each two types, and dtypes of NumPy once for each of Triton.
    Blocks of one shape are not broadcast.

    The interpreter makes them at every operation, which takes 40 % of the time of our kernels.
    """
    dtypes, made, sizes, results = {}, {}, {}, {}
    broadcast = TritonSemantic.broadcast_impl_value
    operands = TritonSemantic.binary_op_type_checking_impl
    numpy_dtype, make = interpreter._get_np_dtype, tl.core.block_type.__init__
    make_tensor, equal = tl.core.tensor.__init__, tl.core.dtype.__eq__
    result_of = TritonSemantic.computation_type_impl

    def kept_dtype(of):
        name = of.scalar.name
        if name not in dtypes:
            dtypes[name] = numpy_dtype(of)
        return dtypes[name]

    def kept(self, element_ty, shape):
        of_shape = sizes.get(id(shape)) or [getattr(size, "value", size) for size in shape]
        key = element_ty.name, *of_shape
        if key not in made:
            make(self, element_ty, shape)
            made[key] = vars(self).copy()
            made[key] |= {"of_tensors": of_tensors(self), "sizes": of_shape}
            sizes[id(self.shape)] = of_shape  # which `made` keeps
        vars(self).update(made[key])

    def of_tensors(type):
        """The attributes of tensors of a type, but for the type and the handle."""
        tensor = object.__new__(tl.core.tensor)
        make_tensor(tensor, None, type)
        return {name: x for name, x in vars(tensor).items() if name not in ("handle", "type")}

    def kept_tensor(self, handle, type):
        attributes = vars(type)
        if "of_tensors" not in attributes:
            attributes["of_tensors"] = of_tensors(type)
        vars(self).update(attributes["of_tensors"], handle=handle, type=type)

    def kept_result(self, a_ty, a_is_scalar, b_ty, b_is_scalar, div_or_mod):
        key = a_ty.name, a_is_scalar, b_ty.name, b_is_scalar, div_or_mod
        if key not in results:
            results[key] = result_of(self, a_ty, a_is_scalar, b_ty, b_is_scalar, div_or_mod)
        return results[key]

    def kept_shapes(self, lhs, rhs):
        of_lhs = vars(lhs.type).get("sizes")
        if of_lhs is not None and of_lhs == vars(rhs.type).get("sizes"):
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    def kept_operands(self, lhs, rhs, *flags, **named):
        if isinstance(lhs, tl.core.tensor) and isinstance(rhs, tl.core.tensor):
            of_lhs, of_rhs = lhs.dtype, rhs.dtype
            if of_lhs.name == of_rhs.name and not of_lhs.is_ptr():
                divides = named.get("div_or_mod", len(flags) > 3 and flags[3])
                result = self.computation_type_impl(of_lhs, False, of_rhs, False, divides)
                if result.name == of_lhs.name:
                    return self.broadcast_impl_value(lhs, rhs)
        return operands(self, lhs, rhs, *flags, **named)

    interpreter._get_np_dtype = kept_dtype
    TritonSemantic.binary_op_type_checking_impl = kept_operands
    TritonSemantic.broadcast_impl_value = kept_shapes
    TritonSemantic.computation_type_impl = kept_result
    tl.core.block_type.__init__ = kept
    tl.core.tensor.__init__ = kept_tensor
    tl.core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)


def check_overflow(wanted: bool) -> None:
    """Whether sums and products of int32 are computed in int64 too, to see that they fit."""
    options = interpreter.interpreter_builder.options
    object.__setattr__(options, "sanitize_overflow", wanted)  # a frozen dataclass
