"""The schema of a click log: its columns, and the inputs of a model made of them."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    WrapSerializer,
    field_validator,
    model_serializer,
    model_validator,
)

from stampede.data.options import PreparationOptions
from stampede.settings import Section, Seed, SettingsError, read_yaml, sentences, yaml_value

# Names of fields and numbers become parts of the names of files, metrics and tables.
_FIELD_NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]*$"
FieldName = Annotated[str, Field(pattern=_FIELD_NAME)]

# Of a table; torch counts its bytes in 63 bits.
MOST_ROWS = 2**48

# One more row is for missing values.
_Rows = Annotated[int, Field(ge=1, lt=MOST_ROWS)]

# Keys of `_ManyIds` that are younger than its prepared folders.
_LATER_KEYS = {"share", "keep", "pooling", "query", "weights"}

# Counts the changes of how values are read; the last one concerns logs with numbers, booleans or
# dates in `missing` alone.
RULES, RULES_OF_MARKED_VALUES = 3, 4

# Poolings of fields whose rows are looked up one by one.
HISTORIES = ("attention", "none")


class _ManyIds(Section):
    """Keys of fields that may be multi-valued; `column` is by default the field's name."""

    column: str = ""
    separator: str | None = Field(None, min_length=1)  # between the ids of a cell; none: one id
    max_ids: int | None = Field(None, ge=1, lt=2**31)  # of a cell; others are left out
    keep: Literal["first", "last"] = "first"  # which ones, of more than `max_ids`
    pooling: Literal["sum", "mean", "attention", "none"] = "sum"  # of the embeddings of a cell
    query: FieldName | None = None  # the field that attends to a cell's ids
    weights: str | None = Field(None, min_length=1)  # column with a number for each id of a cell
    share: FieldName | None = None  # use the table and the vocabulary of this field

    @model_serializer(mode="wrap")
    def _without_unused_keys(self, written: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out later keys that are not used, as prepared folders are named by a schema."""
        values = written(self)
        for name in _LATER_KEYS & values.keys():
            if values[name] == type(self).model_fields[name].default:
                del values[name]
        return values

    @model_validator(mode="after")
    def _keys_have_what_they_need(self) -> _ManyIds:
        many, apart = self.separator is not None, self.pooling in HISTORIES
        pooling, weights = f"pooling: {self.pooling}", f"weights: {self.weights}"
        for is_given, found, has_it, needed in (
            (self.max_ids is not None, "max_ids", many, "separator"),
            (self.keep == "last", "keep: last", self.max_ids is not None, "max_ids"),
            (self.pooling != "sum", pooling, many, "separator"),
            (apart, pooling, self.query is not None, "query"),
            (self.query is not None, f"query: {self.query}", apart, "pooling: attention"),
            (self.weights is not None, weights, many, "separator"),
        ):
            if is_given and not has_it:
                raise ValueError(f"found {found} without {needed}; write both or neither")
        if apart and self.weights is not None:
            raise ValueError(
                f"found {weights} with {pooling}; write pooling: sum or mean, or leave weights out"
            )
        return self


class Vocabulary(_ManyIds):
    """Each id of the training part gets a row; rarer ones than `min_count` share one."""

    encode: Literal["vocabulary"] = "vocabulary"
    min_count: int | None = Field(None, ge=1, lt=2**62)  # none: chosen by `data.features`
    max_size: int | None = Field(None, ge=1, lt=2**62)  # only the most frequent ids get a row


class Hashed(_ManyIds):
    """A hash of its text gives each id one of a fixed number of rows."""

    encode: Literal["hash"] = "hash"
    buckets: _Rows
    seed: Seed = 0


class Integers(_ManyIds):
    """Integers that are already rows: id i, 0 to `size - 1`, has row i."""

    encode: Literal["integer"] = "integer"
    size: _Rows


class _OneId(Section):
    """Fields with one id in a cell, without the keys of `_ManyIds`."""

    separator: ClassVar[None] = None
    max_ids: ClassVar[None] = None
    keep: ClassVar[str] = "first"
    pooling: ClassVar[str] = "sum"
    query: ClassVar[None] = None
    weights: ClassVar[None] = None
    share: ClassVar[None] = None


class Quantiles(_OneId):
    """A number cut into buckets with equal shares of the training part."""

    encode: Literal["quantiles"] = "quantiles"
    column: str = ""
    buckets: int = Field(ge=2, le=1_000_000)


class TimePart(_OneId):
    """Hour of the day or weekday of the schema's time column, UTC."""

    column: ClassVar[str] = ""
    encode: Literal["hour_of_day", "weekday"]


IdField = Vocabulary | Hashed | Integers | Quantiles | TimePart


def column_of_weights(field: str) -> str:
    """Name of the typed column with the weights of a field's ids."""
    return f"#weights:{field}"


Transform = Literal["log1p", "minmax", "standard"]


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class NumberField(Section):
    """A numeric input; transforms and bins that are None are chosen by `data.features`."""

    column: str = ""
    fill: float = 0.0  # value of a missing number, before the transforms
    transform: Annotated[list[Transform] | None, BeforeValidator(_one_or_many)] = None
    bins: int | None = Field(None, ge=0, le=1_000_000)  # of an id field NAME_bin; 0: none

    @model_validator(mode="after")
    def _bins_and_one_scale_at_the_end(self) -> NumberField:
        if self.bins == 1:
            raise ValueError("found bins: 1; write 0 for none, or 2 or more")
        if self.transform not in (None, [], ["log1p"], ["minmax"], ["standard"]) and (
            len(self.transform) != 2 or self.transform[0] != "log1p" or self.transform[1] == "log1p"
        ):
            raise ValueError(
                f"found the transforms {self.transform}; write one of them, or log1p and another"
            )
        return self


def _as_texts(value: Any) -> Any:
    """Values as the log's text has them; YAML reads `yes` as true."""
    values = value if isinstance(value, list) else [value]
    if any(isinstance(one, bool) for one in values):
        raise ValueError(f"found {value!r}; write text in quotes, such as positive: ['yes']")
    return [number_as_text(one) if isinstance(one, int | float) else one for one in values]


def number_as_text(number: float) -> str:
    """A number as the log's text has it: 5 for 5.0, and all digits."""
    return str(int(number)) if float(number).is_integer() else repr(number)


class Label(Section):
    """The label: a column of 0 and 1, a number with a threshold, or values that mean a click."""

    column: str = Field(min_length=1)
    at_least: float | None = None  # label 1 for numbers of at least this
    # Label 1 for these values, 0 for others.
    positive: Annotated[list[str], BeforeValidator(_as_texts)] = Field([])

    @model_validator(mode="after")
    def _one_rule(self) -> Label:
        if self.positive and self.at_least is not None:
            raise ValueError("found at_least and positive; write one of them")
        return self


class Time(Section):
    """The time of a sample, UTC."""

    column: str = Field(min_length=1)
    # One of `formulas.UNITS`, iso8601, or such as %Y-%m-%d %H:%M:%S.
    format: str = "seconds"

    @field_validator("format")
    @classmethod
    def _format_is_known(cls, format: str) -> str:
        # Polars is slow to import, and the help does not need it.
        from stampede.data.formulas import UNITS

        if format not in (*UNITS, "iso8601") and "%" not in format:
            known = ", ".join((*UNITS, "iso8601"))
            raise ValueError(f"found {format!r}; write {known}, or such as '%Y-%m-%d %H:%M:%S'")
        return format


def _names_alone(value: Any) -> Any:
    """Read `[C1, C2]`, and keys without values, as `{C1: {}, C2: {}}`."""
    if isinstance(value, list) and all(isinstance(name, str) for name in value):
        value = dict.fromkeys(value)
    if isinstance(value, dict):
        value = {name: {} if options is None else options for name, options in value.items()}
    return value


def _ids(value: Any) -> Any:
    """Fill in the default encoding, `vocabulary`, and what fields take from those they `share`."""
    value = _names_alone(value)
    given = {}
    for name, options in value.items() if isinstance(value, dict) else ():
        if isinstance(options, dict):
            given[name] = options
            value[name] = {"encode": "vocabulary", **options}
    for name, options in given.items():
        if isinstance(options.get("share"), str):
            value[name] = {**_of_table(name, options["share"], given, value), **options}
    return value


def _of_table(name: str, owner: str, given: dict[str, Any], known: dict[str, Any]) -> Any:
    """The keys that describe the table of `owner`, for the field `name` that shares it."""
    tables = [
        one
        for one, at in known.items()
        if one != name
        and isinstance(at, dict)
        and at.get("share") is None
        and at["encode"] in ("vocabulary", "hash", "integer")
    ]
    if owner not in tables:
        raise ValueError(
            f"{name}: found share: {owner}; write an id field with a table of its own (encode: "
            f"vocabulary, hash or integer){', such as ' * bool(tables)}{', '.join(tables)}, or "
            "leave it out"
        )
    options, at_owner = given[name], known[owner]
    of_table = {key: one for key, one in at_owner.items() if key not in _ManyIds.model_fields}
    for key in options:
        if key not in _ManyIds.model_fields and options[key] != of_table.get(key):
            raise ValueError(
                f"{name}: found {key}: {options[key]} beside share: {owner}; leave it out, or "
                f"write it at {owner}, whose table and ids both fields use"
            )
    return of_table


def _labels(value: Any) -> Any:
    """The label or labels of a schema by goal; one label alone has the name ""."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"": {"column": value}}
    if not isinstance(value, dict):
        return value
    keys = Label.model_fields.keys()
    may_be_goals = all(isinstance(one, str | dict) for one in value.values())
    if value.keys() & keys and (value.keys() <= keys or not may_be_goals):
        return {"": value}
    for name in value:
        if name in keys:
            raise ValueError(
                f"found a goal called {name!r}, which is a key of a single label; rename the goal"
            )
        if not isinstance(name, str) or not re.fullmatch(_FIELD_NAME, name):
            raise ValueError(f"goal {name!r}: write letters, digits, '_' and '-' only")
    if len(value) == 1:
        ((name, one),) = value.items()
        raise ValueError(
            f"found only the goal {name!r}; write `label: {yaml_value(one)}`, or several goals"
        )
    return {name: {"column": one} if isinstance(one, str) else one for name, one in value.items()}


def _written_labels(labels: dict[str, Label], written: SerializerFunctionWrapHandler) -> Any:
    """As the schema has them; folders of prepared data are named by this."""
    values = written(labels)
    return values.get("", values) or None


_Labels = Annotated[dict[str, Label], BeforeValidator(_labels), WrapSerializer(_written_labels)]

_Ids = Annotated[
    dict[str, Annotated[IdField, Field(discriminator="encode")]], BeforeValidator(_ids)
]

# How databases, R, pandas and spreadsheets write missing values.
MISSING = ["", "NA", "N/A", "n/a", "<NA>", "NaN", "nan", "NULL", "Null", "null", "None", "\\N", "-"]


def rules_of(missing: Any) -> Literal[3, 4]:
    """The rules by which the values of a log are read."""
    are_texts = isinstance(missing, list) and all(isinstance(one, str) for one in missing)
    if missing == MISSING or not are_texts:
        return RULES
    # Imports polars.
    from stampede.data.formulas import values_of_marks

    return RULES_OF_MARKED_VALUES if any(values_of_marks(missing)) else RULES


class Schema(Section):
    """What the columns of a click log mean; docs/schema.md describes the keys."""

    format: Literal["auto", "csv", "parquet"] = "auto"
    # How values are read: see `stampede.data.formulas`. What has other rules is refused.
    rules: Literal[3, 4] = RULES  # see `rules_of`
    separator: str = "auto"
    quote: str = '"'
    columns: list[str] = Field([])
    missing: list[str] = Field(MISSING, min_length=1)
    label: _Labels  # by goal; of one label, the name is ""; none only for a log to score
    ids: _Ids = Field(min_length=1)
    numbers: Annotated[dict[str, NumberField], BeforeValidator(_names_alone)] = Field({})
    weight: str | None = Field(None, min_length=1)
    time: Time | None = None

    @model_validator(mode="before")
    @classmethod
    def _by_its_rules(cls, given: Any) -> Any:
        if not isinstance(given, dict) or given.get("rules", RULES) not in (3, 4):
            return given
        return {**given, "rules": rules_of(given.get("missing", MISSING))}

    @model_validator(mode="after")
    def _columns_fit_together(self) -> Schema:
        if self.columns and len(set(self.columns)) != len(self.columns):
            raise ValueError("columns: a name appears twice; names must differ")
        if self.separator != "auto" and len(self.separator.encode()) != 1:
            raise ValueError(f"separator: found {self.separator!r}; write one character, or auto")
        if len(self.quote.encode()) > 1:
            raise ValueError(f"quote: found {self.quote!r}; write one character, or '' for none")
        for name in (*self.ids, *self.numbers):
            if not re.fullmatch(_FIELD_NAME, name):
                raise ValueError(
                    f"field {name!r}: write letters, digits, '_' and '-' only, and the column's "
                    "name after `column:`"
                )
        for name in self.ids.keys() & self.numbers.keys():
            raise ValueError(f"{name!r} is an id field and a number; rename one, with `column:`")
        for (name, label), (other, one) in combinations(self.label.items(), 2):
            if label == one:
                raise ValueError(
                    f"label: the goals {name!r} and {other!r} are the same rule for the column "
                    f"{one.column!r}; leave one out, or name another column"
                )
        timed = [name for name, field in self.ids.items() if isinstance(field, TimePart)]
        if timed and self.time is None:
            raise ValueError(
                f"ids.{timed[0]}: encode: {self.ids[timed[0]].encode} needs the section `time`"
            )
        self._check_queries()
        # `parts_of_objects` of formulas.py needs Polars; `--help` and the GPU machine do without.
        parts = {f"{column}.{part}" for column in self.columns for part in ("key", "value")}
        known = {*self.columns, *parts}
        absent = sorted(self.used_columns() - known) if self.columns else []
        if absent:
            raise ValueError(
                f"column {absent[0]!r} is used but not in columns: {', '.join(self.columns)}"
            )
        return self

    def _check_queries(self) -> None:
        queries = [name for name, field in self.ids.items() if field.query is None]
        for name, field in self.ids.items():
            if field.query not in (None, *queries):
                raise ValueError(
                    f"ids.{name}: found query: {field.query}; write an id field that is no "
                    f"history{': ' if queries else ''}{', '.join(queries)}"
                )

    def used_columns(self) -> set[str]:
        """Columns of the file that are read."""
        labels = [label.column for label in self.label.values()]
        others = [self.weight, self.time and self.time.column]
        others += [field.weights for field in self.ids.values()]
        return {*self.sources().values(), *labels, *filter(None, others)}

    def numeric_columns(self) -> set[str]:
        """Columns of the file that are read as numbers only."""
        columns = self.sources()
        numbers = {columns[name] for name in self.numbers}
        lists = {field.weights for field in self.ids.values()}
        texts = {columns[name] for name in columns if name in self.ids}
        texts |= self.label_texts()
        numbers |= self.label_columns()
        return numbers - texts - lists - {None, self.time and self.time.column}

    def label_columns(self) -> set[str]:
        """Columns of the file with labels, and that of the weights."""
        return {label.column for label in self.label.values()} | {self.weight or ""} - {""}

    def json_columns(self) -> set[str]:
        """Columns with several ids a cell as JSON, and those of their weights."""
        columns, found = self.sources(), set()
        for name, field in self.ids.items():
            if field.separator == "json":
                found |= {columns[name], field.weights}
        return found - {None}

    def id_columns(self) -> set[str]:
        """Columns of the file that are read as ids, or as a label of certain values."""
        columns = self.sources()
        found = {columns[n] for n in columns if not isinstance(self.ids.get(n), Quantiles | None)}
        return found | self.label_texts()

    def label_texts(self) -> set[str]:
        """Columns of the file whose labels are certain texts."""
        return {label.column for label in self.label.values() if label.positive}

    @property
    def goals(self) -> list[str]:
        """Names of the goals, in order; none for a single label."""
        return [name for name in self.label if name]

    def sources(self) -> dict[str, str]:
        """Column of each id field and number by name, except parts of the time."""
        fields = {**self.ids, **self.numbers}
        return {
            name: field.column or name
            for name, field in fields.items()
            if not isinstance(field, TimePart)
        }


def load_schema(path: Path) -> Schema:
    """Read a schema. Raises a `SettingsError` that says what to write instead of wrong keys."""
    values = read_yaml(path, "write a schema as docs/schema.md shows")
    for key in values:
        if key in PreparationOptions.model_fields:
            raise SettingsError(
                f"{path}:\n  {key}: is a key of the configuration, not of a schema; delete it "
                f"here, and write data.{key}=VALUE after `python launch.py CONFIG.yaml`, or --set "
                f"{key}=VALUE after `stampede describe` or `stampede prepare`"
            )
    try:
        schema = Schema.model_validate(values)
    except ValidationError as failure:
        raise SettingsError(f"{path}:\n" + "\n".join(sentences(failure, Schema))) from None
    if not schema.label:
        raise SettingsError(f"{path}:\n  label: not given; write the name of its column")
    return schema


# Criteo's and Avazu's logs, as distributed.
_CRITEO_NUMBERS = [f"I{i}" for i in range(1, 14)]
_CRITEO_IDS = [f"C{i}" for i in range(1, 27)]

CRITEO = Schema.model_validate(
    {
        "separator": "\t",
        "quote": "",
        "columns": ["label", *_CRITEO_NUMBERS, *_CRITEO_IDS],
        "label": "label",
        "numbers": _CRITEO_NUMBERS,
        "ids": _CRITEO_IDS,
    }
)

_AVAZU_IDS = [
    "C1", "banner_pos", "site_id", "site_domain", "site_category", "app_id", "app_domain",
    "app_category", "device_id", "device_ip", "device_model", "device_type", "device_conn_type",
    "C14", "C15", "C16", "C17", "C18", "C19", "C20", "C21",
]  # fmt: skip


def avazu(split_hour: bool) -> Schema:
    """Avazu's log, CSV with a header.

    `split_hour` replaces `hour` (YYMMDDHH) by hour of the day and weekday. The CowClip paper's
    authors use it as an id, although no id of the training days recurs in later ones.
    """
    hours = {"hour_of_day": {"encode": "hour_of_day"}, "weekday": {"encode": "weekday"}}
    return Schema.model_validate(
        {
            "separator": ",",
            "label": "click",
            "ids": {**(hours if split_hour else {"hour": {}}), **dict.fromkeys(_AVAZU_IDS)},
            "time": {"column": "hour", "format": "%y%m%d%H"},
        }
    )
