"""A made-up log with every kind of column, and its schema."""

import numpy as np
import pandas as pd
import pyarrow

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


def write_movies(path, frame):
    """Write rows in the form that the file's suffix names."""
    if path.suffix == ".parquet":
        lists = frame["genres"].map(lambda text: text.split("|") if text else None)
        frame.assign(genres=lists).to_parquet(path, row_group_size=70)
    elif path.suffix == ".zst":
        with pyarrow.output_stream(path, compression="zstd") as file:
            file.write(frame.to_csv(index=False).encode())
    else:
        frame.to_csv(path, index=False, sep="\t" if path.suffix == ".tsv" else ",")
    return path
