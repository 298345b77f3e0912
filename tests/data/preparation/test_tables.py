"""Tables of any schema against an independent computation with pandas."""

import numpy as np
import pandas as pd
import pytest

from support.movies import MOVIES, movies, write_movies
from support.prepared_arrays import arrays_of, manifest_of, vocabulary_of
from support.preparing import PARTS, prepared, rows_by_pandas, sequential_parts


@pytest.mark.parametrize("form", ["csv", "csv.gz", "csv.zst", "tsv", "parquet"])
def test_table_with_every_kind_of_column(tmp_path, form):
    frame, rows = movies(), 400
    path = write_movies(tmp_path / f"log.{form}", frame)
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
