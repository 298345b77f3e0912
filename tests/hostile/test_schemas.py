"""Schema files from people who mean harm, and preparation with those that are accepted."""

import shutil

import pytest
import yaml
from hypothesis import strategies as st

from stampede.data import DataError
from stampede.data.prepared.verify import verify
from stampede.settings import SettingsError
from support.fuzzing import VALUES, changed_trees, fuzz
from support.guarded import guarded
from support.mixed_log import HEADER, SCHEMA, mixed_text
from support.preparing import prepared
from support.yaml_texts import FRAGMENTS, yaml_files

CASES = [100, pytest.param(10_000, marks=pytest.mark.soak)]

BASES = [
    SCHEMA,
    {"label": "y", "ids": ["user", "site"], "numbers": ["x", "z"]},
    {"columns": HEADER, "label": "y", "ids": {"user": {}, "tags": {"separator": "|"}}, "quote": ""},
]

# What each kind of key holds, of another key or beyond its bounds.
OTHERS = [
    "vocabulary", "hash", "integer", "quantiles", "hour_of_day", "weekday", "seconds",
    "%Y-%m-%d %H", "%q", "%", "%Y" * 200, "log1p", "minmax", "standard", "csv", "parquet", "auto",
    "\t", "|", ",", "\n", "\r", '"', "'", *HEADER,
]  # fmt: skip

KEYS = [*SCHEMA, *SCHEMA["ids"], "encode", "buckets", "seed", "size", "min_count", "max_size",
        "max_ids", "column", "fill", "transform", "columns", "quote", "format"]  # fmt: skip


@pytest.mark.parametrize("cases", CASES)
def test_schemas(tmp_path, cases):
    path, log = tmp_path / "schema.yaml", tmp_path / "log.csv"
    log.write_text(mixed_text(40))
    trees = changed_trees(
        BASES, st.one_of(VALUES, st.sampled_from(OTHERS), st.sampled_from(FRAGMENTS)), KEYS
    )

    def check(content):
        path.write_bytes(content)
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        with guarded(tmp_path, SettingsError, DataError) as said:
            prepared(tmp_path / "out", "table", str(log), schema=str(path))
            verify(tmp_path / "out")
        return said[0] if said else None

    path.write_text(yaml.safe_dump(SCHEMA))
    assert check(path.read_bytes()) is None
    seen = fuzz(yaml_files(trees), check, cases)
    # hypothesis also draws constants of the modules that are loaded, whichever these are.
    assert seen["accepted"] > cases / 200 and len(seen) > 8, seen
