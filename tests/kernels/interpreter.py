"""Triton 3.6's interpreter, as these tests need it.

numpy 2.4 no longer makes a number of an array of one, which loops need of their bounds. And at each call of each
function the interpreter looks through all of triton.language for what it has to replace: most of the time that it took.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

from triton.runtime import interpreter


def mend() -> None:
    """Once, before a kernel runs."""
    patch_tensor = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched
    interpreter._patch_builtin = _patch_builtin


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    for name in _builtins(package):
        member = getattr(package, name)
        if interpreter.tl.core.is_builtin(member):  # not replaced by the caller already
            interpreter._patch_attr(package, name, member, builder, scope)


@cache
def _builtins(package: Any) -> list[str]:
    return [name for name, member in inspect.getmembers(package) if interpreter.tl.core.is_builtin(member)]
