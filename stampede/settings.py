# pyright: basic
"""Checked settings from YAML files: typed sections, strict reading, sentences for mistakes."""

from __future__ import annotations

import difflib
import math
import re
import reprlib
import textwrap
import types
import typing
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from stampede.files import read_file

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

Seed = Annotated[int, Field(ge=0, lt=2**63)]


class UserError(Exception):
    """An error that its message explains; a notebook shows that without a traceback."""

    def _render_traceback_(self) -> list[str]:
        # IPython calls this, and prints the lines.
        return [f"{type(self).__name__}: {printable(str(self))}"]


class SettingsError(UserError):
    """The user's settings cannot be used. Every rank raises it by itself."""

    known_to_all_ranks = True


class Section(BaseModel):
    """Base of all sections: strict types, no unknown keys."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


Model = TypeVar("Model", bound=Section)


# Values in sentences.

_SHORT = reprlib.Repr()
_SHORT.maxlevel = 4
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxdict = _SHORT.maxset = 12
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 200

_LONGEST_VALUE = 80
_LONGEST_SENTENCE = 1500


def counted(number: int, what: str) -> str:
    """`1 row` or `1,234 rows`."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def shown(value: Any) -> str:
    """`repr` of a value on one line, shortened if it is long or deep."""
    text = _SHORT.repr(value)
    if "\n" in text:
        # A DataFrame or an array.
        return type(value).__name__
    half = _LONGEST_VALUE // 2
    return text if len(text) <= _LONGEST_VALUE else f"{text[:half]} ... {text[-half:]}"


def cut(sentence: str) -> str:
    """Cut the middle out of a very long sentence, and escape control characters."""
    if len(sentence) > _LONGEST_SENTENCE:
        half = _LONGEST_SENTENCE // 2
        sentence = f"{sentence[:half]} ... {sentence[-half:]}"
    return printable(sentence)


def printable(text: str) -> str:
    """A text with control characters escaped: they would command the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


# YAML.

# Of a document, aliases written out.
_MOST_VALUES = 1_000_000


def _values_of(node: yaml.Node, known: dict[int, float]) -> float:
    """The number of values below a node; infinite if it holds itself."""
    if id(node) not in known:
        known[id(node)] = math.inf
        below = node.value if isinstance(node, yaml.CollectionNode) else []
        pairs = (part if isinstance(part, tuple) else (part,) for part in below)
        known[id(node)] = 1 + sum(_values_of(one, known) for pair in pairs for one in pair)
    return known[id(node)]


class _Loader(yaml.SafeLoader):
    """Safe YAML with unique keys and unsurprising numbers.

    YAML 1.1 reads 010 as 8, 12:00 as 720 and 2024-03-01 as a date; here they are text. It reads
    1e-4 as text, because it has no dot; here that is a number. Aliases may repeat what they name,
    but a small file must not become a huge one.
    """

    def compose_document(self) -> yaml.Node | None:
        """The document, if it is small enough with all aliases written out."""
        document = super().compose_document()
        if document is not None and _values_of(document, {}) > _MOST_VALUES:
            raise SettingsError(
                f"aliases (*name) make more than {_MOST_VALUES:,} values of it; write values out"
            )
        return document


_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float", "tag:yaml.org,2002:timestamp")
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _NUMBERS]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_DIGITS = list("-+.0123456789")
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?(0|[1-9]\d*)$"), _DIGITS)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^([-+]?((\d+\.\d*|\.\d+)([eE][-+]?\d+)?|\d+[eE][-+]?\d+|\.(inf|Inf|INF))"
        r"|\.(nan|NaN|NAN))$"
    ),
    _DIGITS,
)


def _mapping_without_repeats(loader: _Loader, node: yaml.MappingNode) -> dict[Hashable, Any]:
    seen: dict[str, int] = {}
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        line = key_node.start_mark.line + 1
        if not isinstance(key, str):
            raise SettingsError(f"line {line}: found the key {key!r}, expected a name")
        if key in seen:
            raise SettingsError(
                f"key {key!r} is on line {seen[key]} and again on line {line}; keep one"
            )
        seen[key] = line
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping_without_repeats)


class _Dumper(yaml.SafeDumper):
    """Quotes exactly the texts that `_Loader` would read as something else."""

    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers

    def represent_float(self, number: float) -> yaml.Node:
        # PyYAML would write 1e-08 as 1.0e-08.
        if not math.isfinite(number):
            return super().represent_float(number)
        return self.represent_scalar("tag:yaml.org,2002:float", repr(number))

    def represent_other(self, value: Any) -> yaml.Node:
        # Options of a user's own network may have any type, and the help must not fail.
        return self.represent_str(str(value))


_Dumper.add_representer(float, _Dumper.represent_float)
_Dumper.add_multi_representer(object, _Dumper.represent_other)


def yaml_value(value: Any) -> str:
    """A value as it stands in a YAML file, on one line: `null`, `true`, `''`, `[400, 400]`."""
    text = yaml.dump(
        value,
        Dumper=_Dumper,
        default_flow_style=True,
        sort_keys=False,
        allow_unicode=True,
        width=math.inf,
    )
    # PyYAML ends a value outside a list or mapping with `...`.
    return text.removesuffix("...\n").rstrip("\n")


def parse_yaml(text: str, where: str) -> Any:
    """Parse YAML; `where` names the file or override in error messages.

    Raises:
        SettingsError: it is not YAML, or a key appears twice.
    """
    try:
        return yaml.load(text, _Loader)
    # PyYAML raises many kinds of errors, for example KeyError for `!!bool x`.
    except Exception as failure:
        mark = getattr(failure, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        raise SettingsError(f"{where}{line}: not valid YAML: {reason_of(failure)}") from None


def read_yaml(path: Path, hint: str) -> dict[str, Any]:
    """Read the sections of a YAML file; `hint` says what to do if there is none.

    Raises:
        SettingsError: it cannot be read, or is not a mapping.
    """
    try:
        text = read_file(path).decode()
    except FileNotFoundError:
        raise SettingsError(f"{path}: no such file; {hint}") from None
    except (OSError, ValueError) as failure:
        raise SettingsError(f"{path}: cannot be read as text ({reason_of(failure)})") from None
    values = parse_yaml(text, str(path))
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise SettingsError(
            f"{path}: found {type(values).__name__}, expected sections such as `train:` with keys"
        )
    return values


def from_key_values(given: Sequence[str], model: type[Model], option: str) -> Model:
    """Check settings `key=value`, the value in YAML, from the command line option, such as `--set`.

    Raises:
        SettingsError: what is wrong, and what to write instead.
    """
    values: dict[str, Any] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals:
            raise SettingsError(f"{option} {shown(text)}: write KEY=VALUE, such as split=random")
        values[key] = parse_yaml(value, f"{option} {shown(text)}")
    try:
        return model.model_validate(values)
    except ValidationError as failure:
        raise SettingsError(f"{option}:\n" + "\n".join(sentences(failure, model))) from None


# Errors from reading a damaged file.
DAMAGE = (
    OSError, ValueError, LookupError, TypeError, AttributeError, AssertionError, RecursionError
)  # fmt: skip


@contextmanager
def reading(
    path: Path, error: type[Exception], remedy: str, what: str = "damaged"
) -> Iterator[None]:
    """Turn errors from reading a damaged file, or the folder it describes, into one sentence."""
    try:
        yield
    except DAMAGE as failure:
        raise error(f"{path}: {what} ({reason_of(failure)}); {remedy}") from None


def reason_of(failure: Exception) -> str:
    """One line."""
    said = getattr(failure, "problem", None) or str(failure)
    if isinstance(failure, ValidationError):
        first = failure.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        said = f"no {where!r}" if first["type"] == "missing" else f"{where}: {first['msg']}"
    elif isinstance(failure, KeyError):
        said = f"no {said}"
    elif isinstance(failure, OSError) and failure.filename:
        said = f"{Path(failure.filename).name}: {failure.strerror}"
    return cut((said.splitlines() or [type(failure).__name__])[0])


# What pydantic finds wrong, as sentences.

_MOST_SENTENCES = 20

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
    lines = [f"  {cut(_sentence(error, root))}" for error in errors[:_MOST_SENTENCES]]
    more = len(errors) - _MOST_SENTENCES
    return [*lines, f"  and {more} more"] if more > 0 else lines


def _sentence(error: ErrorDetails, root: type[BaseModel]) -> str:
    # Follow pydantic's path to the section with the last key. If a section on it has several
    # kinds, `chosen` is such as `kind: criteo_kaggle`; `kinds` are those of the last section.
    keys, parts = [], list(error["loc"])
    model, chosen, kinds = root, "", {}
    while parts:
        part = parts.pop(0)
        keys.append(str(part))
        field = model.model_fields.get(str(part))
        variants, discriminator = _kinds(field) if field else ([], None)
        if field is None or not variants or not parts:
            # A key of this section, or a whole section; the rest of the path is within a value.
            model = variants[0] if variants and not parts else model
            keys += map(str, parts)
            break
        if typing.get_origin(field.annotation) is dict:
            # The user names these sections.
            keys.append(str(parts.pop(0)))
            if not parts:
                break
        model, kinds = variants[0], {}
        if discriminator is not None:
            # pydantic puts the kind into the path; users do not write it there.
            tag = parts.pop(0)
            kinds = {tag: kind for kind in variants for tag in _tags(kind, discriminator)}
            model, chosen = kinds[tag], f"{discriminator}: {tag}"
    # A single label stands for the one of its goals without a name.
    path = ".".join(filter(None, keys))
    kind, found, context = error["type"], error["input"], error.get("ctx", {})
    if kind == "extra_forbidden":
        having = [tag for tag, section in kinds.items() if keys[-1] in section.model_fields]
        if having:
            key = chosen.partition(":")[0]
            other = f"{key}: {having[0]}" if len(having) == 1 else f"another {key}"
            return (
                f"{path}: not for {chosen}, only for {key}: {', '.join(having)}; leave it out, or "
                f"write {other}"
            )
        siblings = list(model.model_fields)
        near = difflib.get_close_matches(keys[-1], siblings, n=1, cutoff=0.5)
        # Or a key of another section.
        near = near or [k.path for k in all_keys(root) if k.path.split(".")[-1] == keys[-1]]
        instead = f"allowed here: {', '.join(siblings) or 'none'}"
        if near and path not in near:
            instead = f"did you mean {near[0]!r}?"
        return f"{path}: unknown key{f' with {chosen}' if chosen else ''}; {instead}"
    if kind == "missing":
        return f"{path}: not given"
    if kind == "value_error":
        reason = str(context.get("error", error["msg"]))
        name, _, rest = reason.partition(" is ")
        if name in model.model_fields:
            # A section of a dataclass, which knows its own names only.
            return f"{path}.{name}: found {rest}"
        return f"{path}: {reason}" if path else reason
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        discriminator = context.get("discriminator", "kind").strip("'")
        path = f"{path}.{discriminator}"
        found = found.get(discriminator) if isinstance(found, dict) else found
        options = context.get("expected_tags", "")
        expected = f"one of {options}"
    else:
        # Or pydantic's own words, such as "Input should be greater than 0".
        expected = _EXPECTED.get(kind) or error["msg"].replace("Input should be ", "")
        if expected.startswith(("greater", "less")):
            expected = f"a number {expected}"
        options = context.get("expected", "")
    # pydantic's options are such as `'a', 'b' or 'c'`.
    near = difflib.get_close_matches(str(found), re.findall(r"'([^']*)'", options), n=1)
    meant = f"; did you mean {near[0]!r}?" if near and isinstance(found, str) else ""
    return f"{path}: found {shown(found)}; write {expected}{meant}"


# The keys of a model, for the help.


class Key(NamedTuple):
    """A key of the configuration.

    Attributes:
        path: such as `train.epochs`.
        default: its default.
        description: its meaning, with the unit.
        kinds: such as `data.kind: synthetic`, if only some kinds of the section have it.
        field: pydantic's description of it.
    """

    path: str
    default: Any
    description: str
    kinds: str
    field: FieldInfo


def all_keys(model: type[BaseModel], prefix: str = "") -> list[Key]:
    """Every key, in order; a key that several kinds of a section share appears once."""
    keys: list[Key] = []
    for name, field in model.model_fields.items():
        path, (variants, discriminator) = f"{prefix}{name}", _kinds(field)
        if not variants or field.description:
            keys.append(Key(path, field.default, field.description or "", "", field))
        if discriminator is not None:
            keys += _keys_of_kinds(variants, discriminator, f"{path}.")
        else:
            keys += [key for variant in variants for key in all_keys(variant, f"{path}.")]
    return keys


def keys_help(model: type[BaseModel], defaults: bool = True) -> list[str]:
    """The keys of a model with their descriptions, as lines of at most 100 columns."""
    return key_lines(all_keys(model), defaults)


def key_lines(keys: Sequence[Key], defaults: bool = True) -> list[str]:
    """Keys with their descriptions, as lines of at most 100 columns."""
    lines = []
    for key in keys:
        is_section = isinstance(key.default, BaseModel)
        default = "a section, see below" if is_section else yaml_value(key.default)
        lines.append(f"  {key.path} = {default}" if defaults else f"  {key.path}")
        text = f"{key.description} ({key.kinds})" if key.kinds else key.description
        lines += textwrap.wrap(text, 92, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return lines


def _keys_of_kinds(
    variants: Sequence[type[BaseModel]], discriminator: str, prefix: str
) -> list[Key]:
    every = [tag for variant in variants for tag in _tags(variant, discriminator)]
    first = variants[0].model_fields[discriminator]
    choice = f"{first.description}; one of {', '.join(every)}"
    keys = {discriminator: Key(f"{prefix}{discriminator}", first.default, choice, "", first)}
    owners: dict[str, list[str]] = {discriminator: every}
    for variant in variants:
        for key in all_keys(variant, prefix):
            if key.path != f"{prefix}{discriminator}":
                same = f"{key.path} {key.default!r} {key.description}"
                keys.setdefault(same, key)
                owners.setdefault(same, []).extend(_tags(variant, discriminator))
    for same, key in keys.items():
        others = [tag for tag in every if tag not in owners[same]]
        if others:
            # Whichever list is shorter.
            few = len(owners[same]) <= len(others)
            kinds = ", ".join(owners[same]) if few else "not " + ", ".join(others)
            keys[same] = key._replace(kinds=f"{prefix}{discriminator}: {kinds}")
    return list(keys.values())


def _kinds(field: FieldInfo) -> tuple[list[type[BaseModel]], str | None]:
    """The models of a section, or of a dict of sections, and the key that chooses among them."""
    annotation, discriminator = field.annotation, field.discriminator
    if typing.get_origin(annotation) is dict:
        annotation = typing.get_args(annotation)[1]
        metadata = getattr(annotation, "__metadata__", ())
        discriminator = next((m.discriminator for m in metadata if isinstance(m, FieldInfo)), None)
    if typing.get_origin(annotation) is Annotated:
        annotation = typing.get_args(annotation)[0]
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    models = typing.get_args(annotation) if is_union else (annotation,)
    sections = [m for m in models if isinstance(m, type) and issubclass(m, BaseModel)]
    return sections, discriminator if isinstance(discriminator, str) else None


def _tags(variant: type[BaseModel], discriminator: str) -> tuple[Any, ...]:
    return typing.get_args(variant.model_fields[discriminator].annotation)
