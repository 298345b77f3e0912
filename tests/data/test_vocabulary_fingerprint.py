"""The fingerprint of a vocabulary covers what was learned, and nothing else."""

import json
import shutil

import polars as pl
import pytest

from stampede.data.learning.row_meanings import vocabulary_fingerprint
from support.movie_runs import prepare_movies
from support.movies import MOVIES
from support.prepared import drawn_fields, drawn_rows, write_prepared
from support.preparing import prepared


def prepare(folder, name="out", schema=MOVIES, **options):
    (folder / "schema.yaml").write_text(schema)
    return prepared(folder / name, "table", str(folder / "log.csv"),
                    schema=str(folder / "schema.yaml"), **options)  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    return prepare_movies(tmp_path)


def test_it_does_not_depend_on_the_place_or_form_of_the_files(folder, tmp_path):
    first = prepare(folder)
    found = vocabulary_fingerprint(first)
    assert len(found) == 64
    shutil.copytree(first, tmp_path / "elsewhere/copy")
    assert vocabulary_fingerprint(tmp_path / "elsewhere/copy") == found
    # Other files with the same content, and counts on disk.
    again = prepare(folder, "again", shard_rows=50, counts_gb=1e-9, spool=False)
    for path in (again / "learned").glob("*.parquet"):
        frame = pl.read_parquet(path).with_columns(count=pl.lit(1))
        frame.write_parquet(path, compression="uncompressed")
    assert vocabulary_fingerprint(again) == found


def test_ids_rules_and_statistics_change_it(folder):
    data = prepare(folder)
    found = [vocabulary_fingerprint(data)]
    # Checkpoints hold fingerprints that earlier versions of stampede computed.
    assert found == ["0eccb9d868eb4bca0cd7be3a4ec269db81172837992ba5614d7e8fcb92068864"]
    for change in (
        ("buckets: 7, seed: 3", "buckets: 7, seed: 4"),
        ("fill: 30", "fill: 31"),
        ("[log1p, standard]", "[log1p]"),
        ("max_ids: 2", "max_ids: 3"),
    ):
        assert MOVIES.count(change[0]) == 1
        other = prepare(folder, f"other_{len(found)}", MOVIES.replace(*change))
        found.append(vocabulary_fingerprint(other))
    path = data / "learned/movie.parquet"
    frame = pl.read_parquet(path)
    rest = [f"x{i}" for i in range(len(frame) - 2)]
    for texts in (("a", "bc"), ("ab", "c"), ("c", "ab"), ("abc", "")):
        frame.with_columns(value=pl.Series([*texts, *rest])).write_parquet(path)
        found.append(vocabulary_fingerprint(data))
    path = data / "learned/learned.json"
    values = json.loads(path.read_text())
    for factor in (1 + 1e-12, 1.01):
        values["ranges"]["age"]["mean"] *= factor
        path.write_text(json.dumps(values))
        found.append(vocabulary_fingerprint(data))
    # A mean that differs by rounding is the same one.
    assert found[-2] == found[-3] and len(set(found)) == len(found) - 1


def test_it_covers_the_fields_of_imported_arrays(tmp_path):
    parts = {"train": drawn_rows(20), "test": drawn_rows(20)}
    fields = drawn_fields()
    one = vocabulary_fingerprint(write_prepared(tmp_path / "a", parts, fields))
    assert vocabulary_fingerprint(write_prepared(tmp_path / "b", parts, fields)) == one
    # The dense layers see fields in this order.
    other = dict(reversed(fields.items()))
    assert vocabulary_fingerprint(write_prepared(tmp_path / "c", parts, other)) != one
