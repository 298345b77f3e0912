"""One random log, written in any form: CSV, TSV, compressed, Parquet of any types, frames."""

import decimal
import gzip

import numpy as np
import pandas as pd
import polars as pl
import pyarrow
import pyarrow.parquet

SCHEMA = """
label: clicked
ids:
  user: {min_count: 1}
  name: {min_count: 1}
  tags: {separator: "|", min_count: 1, max_ids: 3}
  shop: {encode: hash, buckets: 31, seed: 2}
  slot: {encode: integer, size: 20}
  member: {min_count: 1}
  hashed: {encode: hash, column: member, buckets: 7}
  marks: {separator: "|", min_count: 1}
  last: {column: tags, separator: "|", max_ids: 2, keep: last, share: tags, pooling: mean}
numbers:
  price: {bins: 6, transform: [standard]}
  views: {bins: 4}
weight: importance
time: {column: seen, format: iso8601}
missing: ["", "7.77", "3.0"]
"""

FORMS = ("csv", "tsv", "csv.gz", "csv.zst", "parquet")

WHOLE = ("int16", "int64", "uint32", "float32", "float64", "decimal", "text", "dictionary")
FRACTIONS = ("float32", "float64", "decimal", "text", "dictionary")
# As pandas, polars and R write booleans.
WORDS = {"True": ("False", "True"), "true": ("false", "true"), "TRUE": ("FALSE", "TRUE")}
KINDS = {
    "clicked": ("int8", "bool", "float64", "text", "word"),
    "user": WHOLE, "shop": WHOLE, "slot": WHOLE, "views": WHOLE,
    "name": ("text", "dictionary"),
    "tags": ("text", "int64", "float64", "decimal", "texts"),
    "price": FRACTIONS, "importance": FRACTIONS,
    "seen": ("text", "s", "ms", "us", "zoned"),
    "member": ("bool", *WORDS, "dictionary"), "marks": ("text", "bool", *WORDS),
}  # fmt: skip

_MISSING = ("user", "views", "price", "member")


def drawn(seed, rows):
    """Values as Python objects, None where missing."""
    draw = np.random.default_rng(seed)
    names = np.array(["ann", 'q"uo"te', "com,ma", "tab\tbed", "é", " b ", "line\nend", "v1.0"])
    frame = {
        "clicked": draw.integers(0, 2, rows),
        "user": draw.integers(1, 60, rows),
        "shop": draw.integers(0, 90, rows),
        "slot": draw.integers(0, 20, rows),
        "views": draw.zipf(1.6, rows).clip(max=30_000),
        "member": draw.integers(0, 2, rows) == 1,
        "marks": [(draw.random(draw.integers(0, 3)) < 0.5).tolist() for _ in range(rows)],
        "name": names[draw.integers(0, len(names), rows)],
        "tags": [draw.integers(0, 9, draw.integers(0, 5)).tolist() for _ in range(rows)],
        # Few prices, so that the edges of bins are prices.
        "price": draw.choice([9.99, 0.1, 14.95, 2.5, 7.77, 3.3, 1000.01], rows),
        "importance": draw.integers(1, 300, rows) / 100,
        "seen": [
            pd.Timestamp("2026-02-27") + pd.Timedelta(seconds=int(s))
            for s in draw.integers(0, 10**6, rows)
        ],
    }
    columns = {
        name: values.tolist() if isinstance(values, np.ndarray) else values
        for name, values in frame.items()
    }
    for name in _MISSING:
        gone = draw.random(rows) < 0.1
        columns[name] = [None if a else b for a, b in zip(gone, columns[name], strict=True)]
    return columns


def _number(value, kind):
    if value is None:
        return None
    if kind in WORDS:
        return WORDS[kind][value]
    if kind in ("text", "texts", "dictionary"):
        return str(value)
    return decimal.Decimal(f"{value:.2f}") if kind == "decimal" else value


def _array(name, values, kind):
    """An Arrow array of a kind of `KINDS`."""
    if name == "seen":
        if kind == "text":
            return pyarrow.array([f"{time:%Y-%m-%dT%H:%M:%S}" for time in values])
        zone = {"unit": "us", "tz": "UTC"} if kind == "zoned" else {"unit": kind}
        return pyarrow.array(values, pyarrow.timestamp(**zone))
    if name in ("tags", "marks"):
        if kind == "text":
            return pyarrow.array(["|".join(map(str, tags)) for tags in values])
        inner = dict.fromkeys(["texts", *WORDS], pyarrow.string())
        inner["decimal"] = pyarrow.decimal128(9, 2)
        cells = [[_number(float(t) if kind == "float64" else t, kind) for t in v] for v in values]
        return pyarrow.array(cells, pyarrow.list_(inner.get(kind) or pyarrow.type_for_alias(kind)))
    if kind == "word":
        return pyarrow.array([["no", "yes"][value] for value in values])
    found = [_number(value, kind) for value in values]
    if kind == "dictionary":
        return pyarrow.array(found, pyarrow.string()).dictionary_encode()
    types = dict.fromkeys(["text", *WORDS], pyarrow.string())
    types["decimal"] = pyarrow.decimal128(12, 2)
    if kind in types:
        return pyarrow.array(found, types[kind])
    if name == "member":
        return pyarrow.array(found, pyarrow.bool_())
    wide = pyarrow.int64() if all(isinstance(v, int | None) for v in values) else pyarrow.float64()
    return pyarrow.array(found, wide).cast(kind)


def arrow(columns, kinds):
    """The log as an Arrow table; `kinds` by column, of `KINDS`."""
    return pyarrow.table({n: _array(n, values, kinds[n]) for n, values in columns.items()})


def text(columns, separator, kinds, floats):
    """The log as CSV; with `floats`, columns with a missing value as pandas writes them then.

    Of `kinds`, only the words for booleans matter.
    """
    texts = dict.fromkeys(["seen", "tags", "price", "importance", "marks"], "text")
    texts |= {"member": kinds["member"]} if kinds else {}
    false, true = WORDS.get(kinds and kinds["marks"], WORDS["True"])
    marks = [[true if one else false for one in cell] for cell in columns["marks"]]
    columns = {**columns, "marks": marks}
    table = arrow(columns, {name: texts.get(name, one[0]) for name, one in KINDS.items()})
    frame = table.to_pandas(types_mapper={pyarrow.int16(): pd.Int16Dtype()}.get)
    if floats:
        frame = frame.astype({"user": "float64", "views": "float64"})
    return frame.to_csv(index=False, sep=separator)


def write(path, columns, kinds, floats=False, row_group=None):
    """Write the log in the form that the name says."""
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(arrow(columns, kinds), path, row_group_size=row_group)
        return path
    separator = "\t" if path.name.endswith("tsv") else ","
    content = text(columns, separator, kinds, floats).encode()
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(content))
    elif path.suffix == ".zst":
        with pyarrow.output_stream(path, compression="zstd") as file:
            file.write(content)
    else:
        path.write_bytes(content)
    return path


def rows_of(columns, start, stop):
    """Some rows."""
    return {name: values[start:stop] for name, values in columns.items()}


def frames(columns, kinds):
    """The log as frames of every library."""
    table = arrow(columns, kinds)
    yield table
    yield table.to_pandas()
    yield table.to_pandas(types_mapper={pyarrow.bool_(): pd.BooleanDtype()}.get)
    yield pl.from_arrow(table)
    yield pd.DataFrame({n: pd.Series(values, dtype=object) for n, values in columns.items()})
