"""Preparation, and the same computed by pandas."""

import numpy as np
import pandas as pd

from stampede.data.options import PreparationOptions
from stampede.data.prepare import prepare
from stampede.data.sources import open_source
from support.prepared_arrays import arrays_of, manifest_of

NUMBERS = [f"I{i}" for i in range(1, 14)]
IDS = [f"C{i}" for i in range(1, 27)]
PARTS = ("train", "validation", "test")


def prepared(folder, kind, path, *, schema="", split_hour=False, features="paper", **options):
    options = PreparationOptions(features=features, **options)
    source = open_source(kind, path, options, schema=schema, split_hour=split_hour)
    prepare(source, options, folder)
    return folder


def write(path, frame):
    frame.to_csv(path, sep="\t", header=False, index=False)
    return str(path)


def rows_by_pandas(column, train, min_count=1, max_size=None):
    """Rows of a column's ids: 0 missing, 1 rare or unseen, then by frequency, ties by text."""
    counts = column[train].dropna().value_counts()
    counts = counts[counts >= min_count]
    order = sorted(counts.index, key=lambda value: (-counts[value], value.encode()))[:max_size]
    rows = {value: i + 2 for i, value in enumerate(order)}
    return column.map(lambda value: 0 if pd.isna(value) else rows.get(value, 1)), len(order) + 2


def numbers_by_pandas(frame, train):
    dense = frame[NUMBERS].astype("float64").fillna(0)
    low, high = dense[train].min(), dense[train].max()
    return ((dense - low) / (high - low).replace(0, 1)).clip(0, 1)


def sequential_parts(rows, test, validation):
    trained = int((1 - test) * rows)
    kept = trained - int(validation * trained)
    return np.repeat([0, 1, 2], [kept, trained - kept, rows - trained])


def check_criteo(folder, frame, parts):
    train = parts == 0
    dense = numbers_by_pandas(frame, train)
    manifest = manifest_of(folder)
    ids = {}
    for entry, name in zip(manifest["fields"], IDS, strict=True):
        ids[name], rows = rows_by_pandas(frame[name], train)
        assert (entry["name"], entry["rows"]) == (name, rows)
        assert (entry["missing_row"], entry["unseen_row"]) == (0, 1)
    for number, part in enumerate(PARTS):
        found, _ = arrays_of(folder, part)
        mask = parts == number
        if not mask.any():
            assert found == {}
            continue
        np.testing.assert_array_equal(found["label"], frame["label"][mask])
        np.testing.assert_allclose(found["numbers"], dense[mask], rtol=1e-6, atol=1e-7)
        np.testing.assert_array_equal(found["ids"], pd.DataFrame(ids)[mask])
    found, _ = arrays_of(folder, "train")
    assert manifest["ids_dtype"] == "int32" and found["ids"].dtype == np.int32
    assert found["numbers"].dtype == np.float32 and found["label"].dtype == np.uint8


def table(tmp_path, frame, schema, name="log.csv", **options):
    frame.to_csv(tmp_path / name, index=False)
    (tmp_path / "schema.yaml").write_text(schema)
    return prepared(
        tmp_path / "out",
        "table",
        str(tmp_path / name),
        schema=str(tmp_path / "schema.yaml"),
        **options,
    )


BY_DAY = {"schema": "label: y\nids: [user]\n", "split": "by_column", "split_column": "day"}


def dated(rows=200):
    draw = np.random.default_rng(3)
    days = np.sort(draw.choice(["2024-01-01", "2024-01-02", "2024-01-03", "2024-01-04"], rows))
    return pd.DataFrame(
        {"day": days, "user": draw.integers(0, 9, rows), "y": draw.integers(0, 2, rows)}
    )
