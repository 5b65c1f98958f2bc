"""Recipes by name, and their arguments from the command line."""

import importlib.util
import inspect
import types
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_origin

from atlas_lm.recipes.small import TASKS, cued, mad, mad_paper, mqar
from atlas_lm.recipes.text import babilong, keeper, lm, lm_bytes, needle, reader
from atlas_lm.train.recipe import Recipe

Function = Callable[..., Recipe]
RECIPES: dict[str, Function] = {
    function.__name__: function
    for function in (lm, lm_bytes, babilong, reader, keeper, needle, mqar, mad, mad_paper, cued)
}
# recipes that train a model for each of several things: the argument, and its values
PARTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "mad": ("task", TASKS),
    "mad_paper": ("task", TASKS),
}


def find_recipe(name: str) -> Function:
    """A recipe of ours, or a function of a file: `my_recipes.py:mine`."""
    if name in RECIPES:
        return RECIPES[name]
    file, _, function = name.rpartition(":")
    if not file.endswith(".py"):
        raise ValueError(
            f"recipe is {name!r}, wanted one of {', '.join(RECIPES)}, or a function of a file, "
            "e.g. my_recipes.py:mine"
        )
    found = getattr(_module(Path(file)), function, None)
    if not callable(found):
        raise ValueError(f"{file} has no function {function!r} that could be a recipe")
    made: Function = found
    return made


def _module(path: Path) -> types.ModuleType:
    if not path.is_file():
        raise ValueError(f"recipe file {path} is missing")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build_recipe(name: str, arguments: dict[str, Any]) -> Recipe:
    """The run of a recipe with these arguments, which it keeps for the record."""
    made = find_recipe(name)(**arguments)
    if not isinstance(made, Recipe):
        raise ValueError(
            f"recipe {name} returned {type(made).__name__}, wanted a Recipe (atlas_lm.train.recipe)"
        )
    return replace(made, name=name.rpartition(":")[2], arguments=arguments)


def parse_arguments(name: str, given: Sequence[str]) -> dict[str, Any]:
    """Arguments of a recipe from words like `size=60M`, each in the type that the recipe wants."""
    known = _parameters(find_recipe(name))
    found: dict[str, Any] = {}
    for word in given:
        key, sign, text = word.partition("=")
        if not sign or key not in known:
            raise ValueError(
                f"{word!r} is no argument of {name}; it takes {', '.join(f'{n}=…' for n in known)}"
            )
        found[key] = _value(key, text, known[key])
    return found


def _parameters(function: Function) -> dict[str, Any]:
    """Names and types. A recipe that hands on whatever it gets (`**changes`) takes what the one behind it
    takes: `lm_bytes` what `lm` does."""
    found: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            found[name] = parameter.annotation
            continue
        behind = [RECIPES[n] for n in function.__code__.co_names if n in RECIPES]
        for other in behind:
            found = _parameters(other) | found
    return found


def _value(name: str, text: str, kind: Any) -> Any:
    try:
        return _convert(text, kind)
    except ValueError as error:
        told = kind.__name__ if isinstance(kind, type) else str(kind)
        raise ValueError(f"{name} is {text!r}, wanted {told}") from error


def _convert(text: str, kind: Any) -> Any:
    if get_origin(kind) is tuple:
        return tuple(_convert(part, get_args(kind)[0]) for part in text.split(","))
    if get_origin(kind) is types.UnionType:
        return None if text == "none" else _convert(text, get_args(kind)[0])
    if kind is bool:
        if text not in ("true", "false"):
            raise ValueError(text)
        return text == "true"
    return kind(text) if kind in (int, float, str) else text


def describe(name: str) -> str:
    """A recipe in a few lines: what it is, and its arguments with what they are by default."""
    function = RECIPES[name]
    told = (function.__doc__ or "").partition("\n")[0]
    defaults = {
        key: parameter.default
        for key, parameter in inspect.signature(function).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    shown = " ".join(f"{key}={_written(value)}" for key, value in defaults.items())
    return f"{name}: {told}" + (f"\n    {shown}" if shown else "")


def _written(value: Any) -> str:
    """A value as it is written on the command line.

    >>> _written((4, 8)), _written(None)
    ('4,8', 'none')
    """
    if isinstance(value, tuple):
        return ",".join(map(_written, value))
    return (
        "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )
