"""Sentences for what pydantic finds wrong in a configuration."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

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
    location = list(error["loc"])
    tag = _union_tag(location, root)
    if tag is not None:
        # pydantic puts the kind of a section into the path; users do not write it there.
        del location[1]
    path = ".".join(map(str, location))
    kind, found, context = error["type"], error["input"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown_key(path, location, tag, root)
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


def _union_tag(location: Sequence[Any], root: type[BaseModel]) -> str | None:
    """The kind of the section that an error is in, where the section has several."""
    variants = dict(_submodels(root)).get(location[0], []) if len(location) > 1 else []
    kinds = [v.model_fields["kind"].default for v in variants if "kind" in v.model_fields]
    return location[1] if location[1:] and location[1] in kinds else None


def _unknown_key(path: str, location: Sequence[Any], tag: str | None, root: type[BaseModel]) -> str:
    unknown = str(location[-1])
    siblings = _keys_at(root, location[:-1], tag)
    nearest = difflib.get_close_matches(unknown, siblings, n=1, cutoff=0.5)
    if nearest:
        hint = f"did you mean {nearest[0]!r}? "
    else:
        # The key may belong to another section.
        elsewhere = [k.path for k in all_keys(root) if k.path.split(".")[-1] == unknown]
        hint = f"did you mean {elsewhere[0]!r}? " if elsewhere and path not in elsewhere else ""
    kind = f" with kind: {tag}" if tag else ""
    return f"{path}: unknown key{kind}; {hint}allowed here: {', '.join(siblings)}"


def _nearest_of_literal(found: Any, expected: str) -> str:
    options = [option.strip(" '") for option in expected.replace(" or ", ", ").split(",")]
    nearest = difflib.get_close_matches(str(found), options, n=1, cutoff=0.6)
    return f"; did you mean {nearest[0]!r}?" if nearest and "'" in expected else ""


def _keys_at(model: type[BaseModel], location: Sequence[Any], tag: str | None) -> list[str]:
    for part in location:
        variants = dict(_submodels(model))[part]
        model = variants[0]
        if tag is not None and len(variants) > 1:
            model = next(v for v in variants if v.model_fields["kind"].default == tag)
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


class Key(NamedTuple):
    """A key of the configuration.

    Attributes:
        path: for example `train.epochs`.
        default: its default.
        description: what it means, with its unit.
        kind: the kind of section that has it, where only one has.
    """

    path: str
    default: Any
    description: str
    kind: str | None


def all_keys(model: type[BaseModel], prefix: str = "", kind: str | None = None) -> list[Key]:
    """Every key, in order; the keys of all kinds of a section in turn."""
    keys = []
    submodels = dict(_submodels(model))
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        if name not in submodels or field.description:
            keys.append(Key(path, field.default, field.description or "", kind))
        for variant in submodels.get(name, []):
            chosen = variant.model_fields.get("kind")
            tag = kind if chosen is None else chosen.default
            keys += all_keys(variant, f"{path}.", tag)
    return keys
