"""Tables of any schema against an independent computation with pandas."""

import numpy as np
import pandas as pd
import pyarrow
import pytest

from support.prepared_arrays import arrays_of, manifest_of, vocabulary_of
from support.preparing import PARTS, prepared, rows_by_pandas, sequential_parts

MOVIES = """
label: {column: rating, at_least: 4}
ids:
  user: {min_count: 2}
  movie: {max_size: 5}
  genres: {separator: "|", max_ids: 2}
  city: {encode: hash, buckets: 7, seed: 3}
  slot: {encode: integer, size: 12}
  age_group: {encode: quantiles, column: age, buckets: 4}
  weekday: {encode: weekday}
numbers:
  age: {fill: 30, transform: [log1p, standard]}
weight: importance
time: {column: when, format: "%Y-%m-%d %H:%M:%S"}
"""


def movies(rows=400):
    draw = np.random.default_rng(5)
    genres = ["comedy", "drama", "crime", "war"]
    frame = pd.DataFrame(
        {
            "rating": draw.integers(1, 6, rows),
            "user": draw.zipf(1.5, rows) % 60,
            "movie": draw.zipf(1.4, rows) % 40,
            "genres": [
                "|".join(draw.choice(genres, draw.integers(0, 4), replace=False))
                for _ in range(rows)
            ],
            "city": draw.choice(["Köln", "Paris, Texas", "Oslo", ""], rows),
            "slot": draw.integers(0, 12, rows),
            "age": pd.Series(draw.integers(15, 80, rows)).mask(draw.random(rows) < 0.2),
            "importance": draw.random(rows).round(3),
            "when": pd.Timestamp("2024-02-27") + pd.to_timedelta(draw.integers(0, 9**6, rows), "s"),
        }
    )
    return frame


@pytest.mark.parametrize("form", ["csv", "csv.gz", "csv.zst", "tsv", "parquet"])
def test_table_with_every_kind_of_column(tmp_path, form):
    frame, rows = movies(), 400
    path = tmp_path / f"log.{form}"
    if form == "parquet":
        stored = frame.assign(genres=frame["genres"].map(lambda t: t.split("|") if t else None))
        stored.to_parquet(path, row_group_size=70)
    elif form == "csv.zst":
        with pyarrow.output_stream(path, compression="zstd") as file:
            file.write(frame.to_csv(index=False).encode())
    else:
        frame.to_csv(path, index=False, sep="\t" if form == "tsv" else ",")
    (tmp_path / "schema.yaml").write_text(MOVIES)
    folder = prepared(
        tmp_path / "out",
        "table",
        str(path),
        schema=str(tmp_path / "schema.yaml"),
        shard_rows=90,
    )
    parts = sequential_parts(rows, 0.1, 0.1)
    train = parts == 0
    text = frame.astype({"user": str, "movie": str})
    age = frame["age"].fillna(30).map(np.log1p)
    standard = (age - age[train].mean()) / age[train].std(ddof=0)
    edges = np.quantile(frame["age"][train].dropna(), [0.25, 0.5, 0.75], method="inverted_cdf")
    group = np.searchsorted(np.unique(edges), frame["age"], side="left") + 1
    genre_rows, _ = rows_by_pandas(
        pd.Series([g for cell in frame["genres"][train] for g in cell.split("|")[:2] if g]),
        slice(None),
    )
    genres = vocabulary_of(folder, "genres")
    assert max(genres.values()) == genre_rows.max()
    manifest = manifest_of(folder)
    names = [entry["name"] for entry in manifest["fields"]]
    assert names == ["user", "movie", "city", "slot", "age_group", "weekday", "genres"]
    city = {}
    for number, part in enumerate(PARTS):
        mask = parts == number
        found, bags = arrays_of(folder, part)
        ids = dict(zip(names, found["ids"].T, strict=False))
        np.testing.assert_array_equal(found["label"], (frame["rating"] >= 4)[mask])
        np.testing.assert_array_equal(ids["user"], rows_by_pandas(text["user"], train, 2)[0][mask])
        np.testing.assert_array_equal(
            ids["movie"], rows_by_pandas(text["movie"], train, 1, 5)[0][mask]
        )
        np.testing.assert_array_equal(ids["slot"], frame["slot"][mask])
        np.testing.assert_array_equal(ids["weekday"], frame["when"].dt.weekday[mask])
        np.testing.assert_array_equal(
            ids["age_group"], np.where(frame["age"].isna(), 0, group)[mask]
        )
        np.testing.assert_allclose(found["numbers"][:, 0], standard[mask], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found["weight"], frame["importance"][mask], rtol=1e-6)
        cells = [cell.split("|")[:2] if cell else [] for cell in frame["genres"][mask]]
        assert bags[0] == [[genres[g] for g in cell] or [0] for cell in cells]
        for name, row in zip(frame["city"][mask], ids["city"], strict=True):
            assert city.setdefault(name, row) == row
    assert city[""] == 7  # missing
    assert len(manifest["parts"]["train"]) == 4
