"""Triton's interpreter without what it does over and over: kernels compute the same, to the last bit.

At each call of a device function it searches its whole language for what to replace, though the launch has
done so; at each operation it makes the table of NumPy's types anew, and spells out types of shapes that
nobody reads; sums and products of indices it takes once more in 64 bits, for a check that is off.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any


def quicken() -> None:
    """In this process; other versions than the one that was read for this are left as they are."""
    try:
        import triton
        from triton.language import core
        from triton.runtime import interpreter
    except ImportError:
        return
    if not triton.__version__.startswith("3.6."):
        return
    nothing = interpreter._LangPatchScope()
    interpreter._patch_lang = _once_per_launch(interpreter._patch_lang, nothing)
    interpreter._get_np_dtype = _by_scalar(interpreter._get_np_dtype)
    _type_when_asked(core.tuple, core._type_for_tuple_values)
    builder = interpreter.interpreter_builder
    if not builder.options.debug:  # without it, asserts do nothing
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def _once_per_launch(patch: Callable[[Any], Any], nothing: Any) -> Callable[[Any], Any]:
    """The first to ask is the launch, which puts the language back at its end; then come its functions."""
    done: set[int] = set()  # by their globals, among which a function finds the language

    def patched(function: Any) -> Any:
        seen, launch = id(function.__globals__), not done
        if seen in done:
            return nothing
        done.add(seen)
        scope = patch(function)
        if launch:
            restore = scope.restore
            scope.restore = lambda: (done.clear(), restore())
        return scope

    return patched


def _by_scalar(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Types of blocks and pointers have no hash; a block has the type of its scalar."""
    found = functools.cache(find)

    def of(dtype: Any) -> Any:
        scalar = dtype.scalar
        return find(scalar) if scalar.is_ptr() else found(scalar)

    return of


def _type_when_asked(shapes: Any, spell: Callable[[Any], Any]) -> None:
    """Tuples of the language, shapes above all, learn their type from their values when it is read."""
    given, member = shapes.__init__, shapes.__getattr__

    def __init__(self: Any, args: Any, type: Any = None) -> None:
        if type is None:
            self.values = list(args)
        else:
            given(self, args, type)

    def __getattr__(self: Any, name: str) -> Any:
        if name != "type":
            return member(self, name)
        self.type = spell(self.values)
        return self.type

    shapes.__init__, shapes.__getattr__ = __init__, __getattr__
