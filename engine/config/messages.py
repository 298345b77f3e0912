"""Sentences for what pydantic finds wrong in a configuration."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "list_type": "a list, such as [400, 400]",
    "tuple_type": "a list, such as [0.9, 0.999]",
    "model_type": "a section with keys",
    "model_attributes_type": "a section with keys",
    "dict_type": "a section with keys",
    "finite_number": "a finite number",
    "too_short": "a list that is not empty",
}


def sentences(failure: ValidationError, root: type[BaseModel]) -> list[str]:
    """One line per error: key path, what was found, what is allowed, the nearest valid key."""
    return [f"  {_sentence(error, root)}" for error in failure.errors(include_url=False)]


def _sentence(error: dict[str, Any], root: type[BaseModel]) -> str:
    location = [part for part in error["loc"] if not _is_union_tag(part, error["loc"])]
    path = ".".join(map(str, location))
    kind, found, context = error["type"], error["input"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown_key(path, error["loc"], root)
    if kind == "missing":
        return f"{path}: not given"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        kinds = context.get("expected_tags", "'synthetic', 'criteo_kaggle'")
        tag = found.get("kind") if isinstance(found, dict) else found
        return f"{path}.kind: found {tag!r}; write one of {kinds}"
    if kind == "value_error":
        reason = str(context.get("error", error["msg"]))
        return f"{path}: {reason}" if path else reason
    expected = _EXPECTED.get(kind)
    if expected is None:
        # pydantic's own words, such as "Input should be greater than 0".
        expected = error["msg"].replace("Input should be ", "")
        if expected.startswith(("greater", "less")):
            expected = f"a number {expected}"
    nearest = _nearest_of_literal(found, context.get("expected", ""))
    return f"{path}: found {found!r}; write {expected}{nearest}"


def _is_union_tag(part: Any, location: Sequence[Any]) -> bool:
    """pydantic puts the kind of data section into the path; users do not write it."""
    return len(location) > 1 and location[0] == "data" and part is location[1]


def _unknown_key(path: str, location: Sequence[Any], root: type[BaseModel]) -> str:
    unknown = str(location[-1])
    siblings = _keys_at(root, location[:-1])
    nearest = difflib.get_close_matches(unknown, siblings, n=1, cutoff=0.5)
    if nearest:
        hint = f"did you mean {nearest[0]!r}?"
    else:
        # The key may belong to another section.
        elsewhere = [p for p in key_paths(root) if p.split(".")[-1] == unknown]
        hint = f"did you mean {elsewhere[0]!r}?" if elsewhere else ""
    allowed = f"allowed here: {', '.join(siblings)}"
    return f"{path}: unknown key; " + " ".join(filter(None, [hint, allowed]))


def _nearest_of_literal(found: Any, expected: str) -> str:
    options = [option.strip(" '") for option in expected.replace(" or ", ", ").split(",")]
    nearest = difflib.get_close_matches(str(found), options, n=1, cutoff=0.6)
    return f"; did you mean {nearest[0]!r}?" if nearest and "'" in expected else ""


def _keys_at(model: type[BaseModel], location: Sequence[Any]) -> list[str]:
    for part in location:
        members = dict(_submodels(model))
        if part in members:
            model = members[part][0]
            variants = members[part]
        else:  # the tag of a union chooses among the variants
            model = next(v for v in variants if v.model_fields["kind"].default == part)
    return list(model.model_fields)


def _submodels(model: type[BaseModel]) -> Iterator[tuple[str, list[type[BaseModel]]]]:
    """Fields that are sections, each with the models it may be."""
    for name, field in model.model_fields.items():
        models = [m for m in _flatten(field.annotation) if _is_model(m)]
        if models:
            yield name, models


def _flatten(annotation: Any) -> list[Any]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [inner for part in typing.get_args(annotation) for inner in _flatten(part)]
    return [annotation]


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def key_paths(model: type[BaseModel], prefix: str = "") -> dict[str, tuple[Any, str]]:
    """Every key with its default and description, in order; variants of a section in turn."""
    paths: dict[str, tuple[Any, str]] = {}
    submodels = dict(_submodels(model))
    for name, field in model.model_fields.items():
        if name in submodels:
            for variant in submodels[name]:
                paths.update(key_paths(variant, f"{prefix}{name}."))
        else:
            paths.setdefault(f"{prefix}{name}", (field.default, field.description or ""))
    return paths
