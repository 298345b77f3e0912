"""Sentences for what pydantic finds wrong in a configuration."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, ValidationError

from stampede.settings.shown import cut, shown

# More mistakes than this are not mended at once.
_MOST = 20

# To compare texts takes a time that grows with the square of their length.
_LONGEST_KEY = 100

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
    errors = failure.errors(include_url=False)
    lines = [f"  {cut(_sentence(error, root))}" for error in errors[:_MOST]]
    return lines + [f"  and {len(errors) - _MOST} more"] * (len(errors) > _MOST)


def _sentence(error: dict[str, Any], root: type[BaseModel]) -> str:
    found_at = _locate(error["loc"], root)
    path = ".".join(found_at.keys)
    kind, found, context = error["type"], error["input"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown_key(path, found_at, root)
    if kind == "missing":
        return f"{path}: not given"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        discriminator = context.get("discriminator", "kind").strip("'")
        tag = found.get(discriminator) if isinstance(found, dict) else found
        expected = context.get("expected_tags", "")
        nearest = _nearest_of_literal(tag, expected)
        return f"{path}.{discriminator}: found {shown(tag)}; write one of {expected}{nearest}"
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
    return f"{path}: found {shown(found)}; write {expected}{nearest}"


class _Place(NamedTuple):
    """Where an error is, as a user wrote it.

    Attributes:
        keys: the path.
        model: the section that has, or lacks, the last key; None below the sections.
        chosen: `kind: criteo_kaggle` and the like, where the section has several kinds.
    """

    keys: list[str]
    model: type[BaseModel] | None
    chosen: str


def _locate(location: Sequence[Any], root: type[BaseModel]) -> _Place:
    model: type[BaseModel] | None = root
    keys: list[str] = []
    chosen = ""
    parts = list(location)
    while parts:
        part = parts.pop(0)
        keys.append(str(part))
        variants = dict(_submodels(model)).get(part, []) if model is not None else []
        if not variants or not parts:
            # A key of this section; what follows lies within its value.
            keys += map(str, parts)
            break
        if _by_name(model, part):
            keys.append(str(parts.pop(0)))
            if not parts:
                break
        model = variants[0]
        discriminator = _discriminator(variants)
        if discriminator is not None:
            # pydantic puts the kind of a section into the path; users do not write it there.
            tag = parts.pop(0)
            model = next(v for v in variants if tag in _tags(v, discriminator))
            chosen = f"{discriminator}: {tag}"
    return _Place(keys, model, chosen)


def _unknown_key(path: str, place: _Place, root: type[BaseModel]) -> str:
    unknown, siblings = place.keys[-1], list(place.model.model_fields)
    nearest = difflib.get_close_matches(unknown[:_LONGEST_KEY], siblings, n=1, cutoff=0.5)
    if nearest:
        hint = f"did you mean {nearest[0]!r}? "
    else:
        # The key may belong to another section.
        elsewhere = [k.path for k in all_keys(root) if k.path.split(".")[-1] == unknown]
        hint = f"did you mean {elsewhere[0]!r}? " if elsewhere and path not in elsewhere else ""
    kind = f" with {place.chosen}" if place.chosen else ""
    return f"{path}: unknown key{kind}; {hint}allowed here: {', '.join(siblings) or 'none'}"


def _nearest_of_literal(found: Any, expected: str) -> str:
    if not isinstance(found, str) or "'" not in expected:
        return ""
    options = [option.strip(" '") for option in expected.replace(" or ", ", ").split(",")]
    nearest = difflib.get_close_matches(found[:_LONGEST_KEY], options, n=1, cutoff=0.6)
    return f"; did you mean {nearest[0]!r}?" if nearest else ""


def _submodels(model: type[BaseModel]) -> Iterator[tuple[str, list[type[BaseModel]]]]:
    """Fields that are sections, each with the models it may be."""
    for name, field in model.model_fields.items():
        models = [m for m in _flatten(_value_type(field.annotation)) if _is_model(m)]
        if models:
            yield name, models


def _by_name(model: type[BaseModel], key: str) -> bool:
    """Whether a key holds several sections under names of the user's."""
    return typing.get_origin(model.model_fields[key].annotation) is dict


def _value_type(annotation: Any) -> Any:
    if typing.get_origin(annotation) is dict:
        annotation = typing.get_args(annotation)[1]
    if typing.get_origin(annotation) is Annotated:
        annotation = typing.get_args(annotation)[0]
    return annotation


def _flatten(annotation: Any) -> list[Any]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [inner for part in typing.get_args(annotation) for inner in _flatten(part)]
    return [annotation]


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _discriminator(variants: Sequence[type[BaseModel]]) -> str | None:
    """The key that tells the kinds of a section apart, where it has several."""
    if len(variants) < 2:
        return None
    shared = set.intersection(*(set(variant.model_fields) for variant in variants))
    return next(key for key in variants[0].model_fields if key in shared and _is_tag(variants, key))


def _is_tag(variants: Sequence[type[BaseModel]], key: str) -> bool:
    tags = [_tags(variant, key) for variant in variants]
    return all(tags) and len(set().union(*tags)) == sum(map(len, tags))


def _tags(variant: type[BaseModel], key: str) -> tuple[Any, ...]:
    annotation = variant.model_fields[key].annotation
    is_literal = typing.get_origin(annotation) is typing.Literal
    return typing.get_args(annotation) if is_literal else ()


class Key(NamedTuple):
    """A key of the configuration.

    Attributes:
        path: for example `train.epochs`.
        default: its default.
        description: what it means, with its unit.
        kinds: `data.kind: synthetic` and the like, where only some kinds of a section have it.
    """

    path: str
    default: Any
    description: str
    kinds: str


def all_keys(model: type[BaseModel], prefix: str = "") -> list[Key]:
    """Every key, in order; a key that several kinds of a section have alike stands once."""
    keys: list[Key] = []
    submodels = dict(_submodels(model))
    for name, field in model.model_fields.items():
        path = f"{prefix}{name}"
        if name not in submodels or field.description:
            keys.append(Key(path, field.default, field.description or "", ""))
        keys += _keys_of_section(submodels.get(name, []), f"{path}.")
    return keys


def _keys_of_section(variants: Sequence[type[BaseModel]], prefix: str) -> list[Key]:
    discriminator = _discriminator(variants)
    if discriminator is None:
        return [key for variant in variants for key in all_keys(variant, prefix)]
    every = [tag for variant in variants for tag in _tags(variant, discriminator)]
    first = variants[0].model_fields[discriminator]
    choice = f"{first.description}; one of {', '.join(every)}"
    keys = {discriminator: Key(f"{prefix}{discriminator}", first.default, choice, "")}
    owners: dict[str, list[str]] = {discriminator: every}
    for variant in variants:
        for key in all_keys(variant, prefix):
            if key.path != f"{prefix}{discriminator}":
                # Kinds that have a key alike share its line.
                same = f"{key.path} {key.default!r} {key.description}"
                keys.setdefault(same, key)
                owners.setdefault(same, []).extend(_tags(variant, discriminator))
    return [
        key
        if len(owners[same]) == len(every)
        else key._replace(kinds=f"{prefix}{discriminator}: {_few(owners[same], every)}")
        for same, key in keys.items()
    ]


def _few(chosen: list[str], every: list[str]) -> str:
    """The chosen ones, or those that are not, whichever are fewer."""
    others = [tag for tag in every if tag not in chosen]
    return ", ".join(chosen) if len(chosen) <= len(others) else "not " + ", ".join(others)
