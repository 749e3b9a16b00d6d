"""A model of one's own by its place: `package.module:function`, found in the environment or the current folder."""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from torch import nn

from dtensor_lm.errors import ConfigError, UserError, nearest
from dtensor_lm.initial_values import abstract

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_NOT_THE_USERS = (_HERE + os.sep, sysconfig.get_paths()["stdlib"] + os.sep, "<")


def own(place: str, given: Mapping[str, Any], optional: Mapping[str, Any] | None = None) -> nn.Module:
    """The model that the function at `place` returns, on the meta device with its recorded initial values.

    The function may call `abstract` itself; otherwise it is called inside of it.

    given: keyword arguments that the function must have. optional: those that it gets where it has them.
    Raises `ConfigError` that says what is wrong at that place, and the fix.
    """
    name, _, attribute = place.partition(":")
    module = _module(place, name)
    function = _function(place, module, attribute)
    arguments = {**_arguments(place, attribute, function, given, optional or {})}
    inner: list[Any] = []

    def build() -> nn.Module:
        model = function(**arguments)
        if not isinstance(model, nn.Module):
            forgot = ": does it end without `return`?" if model is None else ": return the model"
            what = "None" if model is None else f"a {type(model).__name__}"
            raise ConfigError(f"--model {place}: {attribute} returns {what}, not an nn.Module{forgot}")
        inner.append(model.__dict__.get("_recipes"))
        return model

    try:
        model = abstract(build)
    except ConfigError as error:
        if error.title.startswith(f"--model {place}: "):
            raise
        raise _raised(place, attribute, error) from error
    except (Exception, SystemExit) as error:
        raise _raised(place, attribute, error) from error
    if inner[0] is not None:
        model._recipes = inner[0]  # what the inner `abstract` saw: it was nearer
    return model


def _module(place: str, name: str) -> ModuleType:
    if os.sep in name or name.endswith(".py"):
        path = name.removesuffix(".py").strip("./").replace(os.sep, ".")
        raise ConfigError(f"--model {place}: name the module, not its file: {path}:{place.partition(':')[2]}")
    if not name or not all(part.isidentifier() for part in name.split(".")) or place.count(":") > 1:
        raise ConfigError(f"--model {place}: a model of your own is written package.module:function")
    here = os.getcwd()
    if "" not in sys.path and here not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if name != missing and not name.startswith(f"{missing}."):
            raise _raised(place, f"import {name}", error) from error
        above = missing.rpartition(".")[0]
        if above and not hasattr(sys.modules[above], "__path__"):
            raise ConfigError(f"--model {place}: {above} is a module, and holds no other") from None
        folders = sys.modules[above].__path__ if above else [here]
        known = [f"{above}.{m.name}" if above else m.name for m in pkgutil.iter_modules(folders)]
        raise ConfigError(
            f"--model {place}: no module is called {missing!r}{nearest(missing, known)}: it must be in the folder "
            f"{here}, or installed"
        ) from None
    except (Exception, SystemExit) as error:
        raise _raised(place, f"import {name}", error) from error


def _function(place: str, module: ModuleType, attribute: str) -> Callable[..., Any]:
    functions = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
    mine = [n for n in functions if getattr(vars(module)[n], "__module__", None) == module.__name__]
    if not attribute or not hasattr(module, attribute):
        have = f"; it has {', '.join(mine)}" if mine else ""
        what = f"has no {attribute!r}{nearest(attribute, functions)}" if attribute else "needs a function after the ':'"
        raise ConfigError(f"--model {place}: {module.__name__} {what}{have}")
    found = getattr(module, attribute)
    if isinstance(found, nn.Module):
        raise ConfigError(f"--model {place}: {attribute} is a model that is built: write a function that returns it")
    if not callable(found):
        raise ConfigError(f"--model {place}: {attribute} is a {type(found).__name__}, not a function")
    function: Callable[..., Any] = found
    return function


def _arguments(
    place: str, name: str, function: Callable[..., Any], given: Mapping[str, Any], optional: Mapping[str, Any]
) -> dict[str, Any]:
    """What the function is called with."""
    parameters = inspect.signature(function).parameters.values()
    every = any(p.kind is p.VAR_KEYWORD for p in parameters)
    known = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    arguments = {**given, **{n: v for n, v in optional.items() if n in known}}
    faults = [
        f"--{n.replace('_', '-')} changes nothing: {name} has no parameter {n!r}{nearest(n, known)}; leave the option "
        "out, or give the function a parameter of this name"
        for n in given
        if n not in known and not every
    ]
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    missing = [p.name for p in parameters if p.default is p.empty and p.kind not in variable]
    if missing := [n for n in missing if n not in arguments]:
        faults.append(f"{name} needs {', '.join(missing)}: nothing gives it; give the function defaults for them")
    if faults:
        raise ConfigError(f"--model {place} cannot be called:", faults)
    return arguments


def _raised(place: str, what: str, error: BaseException) -> ConfigError:
    """An exception of the user's code, short: what it was, and the last line of theirs that it went through."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if not f.filename.startswith(_NOT_THE_USERS) and "site-packages" not in f.filename]
    at = f" ({os.path.relpath(theirs[-1].filename)}:{theirs[-1].lineno})" if theirs else ""
    if isinstance(error, SyntaxError) and error.filename:
        at = f" ({os.path.relpath(error.filename)}:{error.lineno})"
    if isinstance(error, UserError):
        return ConfigError(f"--model {place}: {what}{at}: {error.title}", error.faults)
    said = error.msg if isinstance(error, SyntaxError) else str(error).strip().split("\n")[0]
    return ConfigError(f"--model {place}: {what} raised {type(error).__name__}{f': {said}' if said else ''}{at}")
