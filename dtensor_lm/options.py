"""Values of nested dataclasses from the text of a YAML file and of a command line, with every fault at once.

A value has a place, such as `optimizer.lr`: `optimizer: {lr: ...}` in the file, `--optimizer.lr` on the
command line. Both are read here, so that the same values work in both and no fault hides another; tyro makes
the help and the object. Nothing here knows what an option means.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin

from dtensor_lm.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Kind = TypeVar("Kind", bound="DataclassInstance")
Fault = tuple[str, str]  # place, text

_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_NULL = "tag:yaml.org,2002:null"

# Fields by their place, such as "optimizer.lr"


def places_of(kind: type) -> dict[str, Any]:
    """The type of every value by its place."""
    places: dict[str, Any] = {}
    for name, hint in typing.get_type_hints(kind).items():
        if dataclasses.is_dataclass(hint):
            places |= {f"{name}.{inner}": each for inner, each in places_of(typing.cast(type, hint)).items()}
        else:
            places[name] = hint
    return places


def build(kind: type[Kind], values: Mapping[str, Any]) -> Kind:
    """The defaults of a class with the values at their places."""
    config = kind()
    for place, value in values.items():
        group, _, name = place.rpartition(".")
        if group:
            name, value = group, dataclasses.replace(getattr(config, group), **{name: value})
        config = dataclasses.replace(config, **{name: value})
    return config


def _similar(place: str, places: Iterable[str], show: Callable[[str], str]) -> str:
    """A hint ' (did you mean ...?)': the same name elsewhere, or near names of the same group."""
    group, _, name = place.rpartition(".")
    found = [known for known in places if known.rpartition(".")[2] == name]
    if not found:
        prefix = f"{group}." if group else ""
        here = {known.removeprefix(prefix).partition(".")[0] for known in places if known.startswith(prefix)}
        found = [prefix + near for near in difflib.get_close_matches(name, sorted(here), cutoff=0.6)]
    return f" (did you mean {' or '.join(map(show, found))}?)" if found else ""


# One value from its text


def _without_none(hint: Any) -> tuple[Any, bool]:
    """A type without `| None`, and whether that was there."""
    if get_origin(hint) in (types.UnionType, typing.Union):
        return next(each for each in get_args(hint) if each is not type(None)), True
    return hint, False


def _expected(hint: Any) -> str:
    base, optional = _without_none(hint)
    if get_origin(base) is Literal:
        text = f"one of {', '.join(map(str, get_args(base)))}"
    else:
        text = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}[base]
    return f"{text} or none" if optional else text


def _from_text(text: str, hint: Any) -> Any:
    """The value; raises `ValueError` if the text has another type."""
    base, _ = _without_none(hint)
    if get_origin(base) is Literal:
        return next(iter([each for each in get_args(base) if str(each) == text] or [_refuse(text)]))
    if base is bool:
        return _BOOLEANS[text.lower()] if text.lower() in _BOOLEANS else _refuse(text)
    if base is int and not re.fullmatch(r"[+-]?(0|[1-9]\d*(_\d+)*)", text):
        _refuse(text)  # YAML would read 010 as 8 and 1:30 as 90
    return base(text)


def _refuse(text: str) -> Any:
    raise ValueError(text)


# The command line


def _option(place: str) -> str:
    return "--" + place.replace("_", "-")


def as_option(place: str, value: Any, hint: Any) -> str:
    if hint is bool:
        return _option(place) if value else _option(f"no_{place}")
    return f"{_option(place)}={value}"


def _unknown(
    written: str, place: str, places: Iterable[str], absent: Mapping[str, str], kind: str, show: Callable[[str], str]
) -> str:
    if place.removeprefix("no_") in absent:
        return f"{written}: {absent[place.removeprefix('no_')]}"
    return f"{written}: unknown {kind}{_similar(place, places, show)}"


def read_arguments(
    argv: Iterable[str], places: Mapping[str, Any], absent: Mapping[str, str]
) -> tuple[dict[str, Any], str | None, list[Fault]]:
    """Values by place, the path of `--config`, (place, text) of every fault: tyro stops at the first.

    absent: by place, why an option that one may look for is not there.
    """
    values: dict[str, Any] = {}
    paths: list[str] = []
    faults: list[Fault] = []
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        name, equals, text = argument.partition("=")
        place = name.removeprefix("--").replace("-", "_")
        flag = place.removeprefix("no_")
        hint = str if place == "config" else places.get(place)
        if not argument.startswith("--"):
            faults.append(("", f"{argument!r}: unexpected argument; options start with --"))
        elif places.get(flag) is bool:
            values[flag] = flag == place
            if equals:
                faults.append((flag, f"{name} takes no value: write {_option(flag)} or {_option(f'no_{flag}')}"))
        elif hint is None:
            # Its value, if that is what follows, is part of the same fault.
            if not equals and rest and not rest[0].startswith("--"):
                rest.pop(0)
            faults.append((place, _unknown(name, place, [*places, "config"], absent, "option", _option)))
        elif not equals and (not rest or rest[0].startswith("--")):
            expected = "a YAML file" if place == "config" else _expected(hint)
            faults.append((place, f"{name}: a value is missing: expected {expected}"))
        else:
            text = text if equals else rest.pop(0)
            if place == "config":
                paths.append(text)
            elif _without_none(hint)[1] and text.lower() in ("none", "null"):
                values[place] = None
            else:
                try:
                    values[place] = _from_text(text, hint)
                except ValueError:
                    faults.append((place, f"{name} is {text!r}: expected {_expected(hint)}"))
    if len(paths) > 1:
        faults.append(("config", f"--config is given {len(paths)} times ({', '.join(paths)}): give one file"))
    return values, paths[0] if len(paths) == 1 else None, faults


def run_tyro(defaults: Kind, options: list[str], prog: str, description: str) -> Kind:
    import tyro

    shown = io.StringIO()
    try:
        with contextlib.redirect_stderr(shown):
            return tyro.cli(type(defaults), args=options, default=defaults, prog=prog, description=description)
    except SystemExit as end:
        if not end.code:
            raise
        words = re.sub(r"[^\x00-\x7f]+", " ", shown.getvalue()).split()  # without the frame around it
        raise ConfigError("these options cannot be used", [" ".join(words)]) from None


# The file


def read_file(path: str, places: Mapping[str, Any], absent: Mapping[str, str]) -> tuple[dict[str, Any], list[Fault]]:
    """Values by place, and (place, text) of every fault; from YAML's nodes, which know text and line."""
    import yaml

    values: dict[str, Any] = {}
    faults: list[Fault] = []
    groups = {place.partition(".")[0] for place in places if "." in place}

    def fault(node: Any, place: str, text: str) -> None:
        faults.append((place, f"{path}:{node.start_mark.line + 1}: {text}"))

    def read_mapping(node: Any, prefix: str) -> None:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                fault(key, f"{prefix}{key.value}", f"{prefix}{key.value} is given twice")
            seen.add(key.value)
        loader.flatten_mapping(node)  # <<: *name
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                fault(key, prefix, "a key must be the name of an option")
                continue
            place = prefix + key.value.replace("-", "_")
            if place in groups and isinstance(value, yaml.MappingNode):
                read_mapping(value, f"{place}.")
            elif place in groups:
                if value.tag != _NULL:
                    fault(value, place, f"{place} is {describe(value)}: expected a mapping of options")
            elif place not in places:
                fault(key, place, _unknown(f"{prefix}{key.value}", place, places, absent, "key", str))
            else:
                read_value(value, place)

    def read_value(node: Any, place: str) -> None:
        hint = places[place]
        base, optional = _without_none(hint)
        try:
            if node.tag == _NULL:
                values[place] = None if optional else _refuse("null")
            elif not isinstance(node, yaml.ScalarNode) or (node.style is not None and base in (int, float, bool)):
                _refuse("quoted, or not a scalar")
            else:
                # The text, not YAML's own reading: for YAML 3e-4 is text, and the word no is false.
                values[place] = _from_text(node.value, hint)
        except ValueError:
            fault(node, place, f"{place} is {describe(node)}: expected {_expected(hint)}")

    def describe(node: Any) -> str:
        if isinstance(node, yaml.ScalarNode):
            return "null" if node.tag == _NULL else f"the text {node.value!r}" if node.style else repr(node.value)
        return "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"

    try:
        if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
            return values, [("", f"{path}: is not a file")]
        with open(path, encoding="utf-8") as file:
            loader = yaml.SafeLoader(file.read())
        root = loader.get_single_node()
        if isinstance(root, yaml.MappingNode):
            read_mapping(root, "")
        elif root is not None and root.tag != _NULL:
            fault(root, "", f"the file is {describe(root)}: expected a mapping of options")
    except OSError as error:
        faults.append(("", f"{path}: cannot be read ({error.strerror})"))
    except UnicodeDecodeError:
        faults.append(("", f"{path}: is not UTF-8 text"))
    except RecursionError:
        faults.append(("", f"{path}: is nested too deeply"))
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        faults.append(("", f"{path}:{line}: invalid YAML: {error.problem}"))
    except yaml.YAMLError as error:
        faults.append(("", f"{path}: invalid YAML: {str(error).splitlines()[0]}"))
    return values, faults
