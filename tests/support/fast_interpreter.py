"""Triton's interpreter computes the same with a fraction of the Python around each operation.

It makes each type, shape and constant anew for each operation, replaces all of triton.language at
each call of each function, combines a custom reduction element by element, and computes every sum
of whole numbers twice to look for an overflow that it then reports to nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

SCALARS = {
    kind.name: kind
    for kind in vars(core).values()
    if type(kind) is core.dtype and kind.name != "void"
}
POINTER = np.dtype(np.uint64)
PLAIN = (
    int,
    float,
    bool,
    str,
    type(None),
    core.tensor,
    core.dtype,
    core.pointer_type,
    core.block_type,
)


def speed_up() -> None:
    """Once, before a kernel runs and before anything of triton.language is replaced."""
    _keep_replaced()
    _share_types()
    _share_answers()
    interpreter.interpreter_builder.options = replace(
        interpreter.interpreter_builder.options, sanitize_overflow=False
    )
    interpreter.ReduceOps.generic_reduce = _reduce_pairs


class Kept(interpreter._LangPatchScope):
    """What is replaced stays so: all kernels of this process are interpreted."""

    def restore(self) -> None:
        pass


def _keep_replaced() -> None:
    replace_all = interpreter._patch_lang
    interpreter._LangPatchScope = Kept
    interpreter._patch_attr = _replace_builtin

    @cache
    def replaced(function: Any) -> Kept:
        scope = replace_all(function)
        core.dtype.to_ir = lambda self, builder: SCALARS[self.name]
        core.block_type.to_ir = lambda self, builder: self
        return scope

    interpreter._patch_lang = replaced


def _replace_builtin(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    function = getattr(
        member, "__wrapped__", member
    )  # of a builtin, without the check of what is always given here

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return function(*args, **kwargs)

    scope.set_attr(owner, name, call)


def _share_types() -> None:
    """One set of attributes for all block types of a kind, and one shape for all of its tensors."""
    make, known = core.block_type.__init__, {}

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *[s.value if type(s) is core.constexpr else s for s in shape])
        if key not in known:
            make(self, element_ty, shape)
            known[key] = dict(vars(self), _of_tensors=_of_tensors(self))
        self.__dict__.update(known[key])

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        attributes = vars(type)
        if "_of_tensors" not in attributes:
            attributes["_of_tensors"] = _of_tensors(type)
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = attributes["_of_tensors"]

    core.block_type.__init__, core.tensor.__init__ = init_block, init_tensor


make_tensor = core.tensor.__init__


def _of_tensors(kind: Any) -> tuple[Any, Any]:
    tensor = object.__new__(core.tensor)
    make_tensor(tensor, None, kind)
    return tensor.numel, tensor.shape


def _share_answers() -> None:
    """What depends on types alone is found once, and a type equals itself."""
    unwrap, computed, answers = core._unwrap_if_constexpr, TritonSemantic.computation_type_impl, {}
    of_names = {name: interpreter._get_np_dtype(kind) for name, kind in SCALARS.items()}

    def unwrapped(value: Any) -> Any:
        kind = type(value)
        return value if kind in PLAIN else value.value if kind is core.constexpr else unwrap(value)

    def numpy_of(kind: Any) -> np.dtype:
        scalar = kind.scalar
        return POINTER if type(scalar) is core.pointer_type else of_names[scalar.name]

    def computation_type(
        self: Any, left: Any, left_is_scalar: bool, right: Any, right_is_scalar: bool, div: bool
    ):
        key = left.name, left_is_scalar, right.name, right_is_scalar, div
        if key not in answers:
            answers[key] = computed(self, left, left_is_scalar, right, right_is_scalar, div)
        return answers[key]

    core._unwrap_if_constexpr = unwrapped
    interpreter._get_np_dtype = numpy_of
    TritonSemantic.computation_type_impl = computation_type
    for kind in (core.dtype, core.block_type, core.pointer_type):
        kind.__eq__ = _equal(kind.__eq__)


def _equal(compare: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    return lambda self, other: self is other or compare(self, other)


def _reduce_pairs(self: Any, values: tuple[Any, ...]) -> list[Any]:
    """Combine neighbours, then neighbours of these, whole blocks at a time."""
    original_axis = self.axis
    values, axis = self.unravel(values, self.axis)
    kinds, numbers = [value.dtype for value in values], [value.handle.data for value in values]
    num_dims = numbers[0].ndim
    while numbers[0].shape[axis] > 1:
        left, right = (
            [
                self.to_tensor(x.take(range(first, x.shape[axis], 2), axis), kind)
                for x, kind in zip(numbers, kinds, strict=True)
            ]
            for first in (0, 1)
        )
        combined = self.combine_fn.fn(*left, *right)
        combined = combined if isinstance(combined, tuple) else (combined,)
        numbers = [each.handle.data for each in combined]
    if self.keep_dims and original_axis is None:
        numbers = [x.reshape((1,) * num_dims) for x in numbers]
    elif not self.keep_dims:
        numbers = [x.squeeze(axis) for x in numbers]
        numbers = [x if x.ndim else x.item() for x in numbers]
    return [self.to_tensor(x, kind) for x, kind in zip(numbers, kinds, strict=True)]
