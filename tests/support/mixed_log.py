"""A log with every kind of column, as text, and the schema that describes it."""

import yaml

SCHEMA = {
    "separator": ",",
    "missing": ["", "NA"],
    "label": {"column": "y", "at_least": 1.0},
    "ids": {
        "user": {"encode": "vocabulary", "min_count": 2, "max_size": 5},
        "tags": {"encode": "vocabulary", "separator": "|", "max_ids": 2},
        "site": {"encode": "hash", "buckets": 7, "seed": 3},
        "slot": {"encode": "integer", "size": 10},
        "age": {"encode": "quantiles", "buckets": 3, "column": "x"},
        "hour": {"encode": "hour_of_day"},
    },
    "numbers": {
        "x": {"transform": ["log1p", "standard"], "fill": 1.0},
        "z": {"transform": "minmax"},
    },
    "weight": "w",
    "time": {"column": "t", "format": "%Y-%m-%d %H"},
}

HEADER = ["y", "user", "tags", "site", "slot", "x", "z", "w", "t"]


def mixed_rows(count):
    """Cells, row by row."""
    return [
        [
            str(i % 3), f"u{i % 4}", "|".join(f"t{j}" for j in range(i % 4)), f"s{i % 5}",
            str(i % 10), f"{i / 7:.3f}", "NA" if i % 6 == 0 else str(i), str(i % 2 + 0.5),
            f"2024-01-{1 + i % 28:02d} {i % 24:02d}",
        ]
        for i in range(count)
    ]  # fmt: skip


def mixed_text(count):
    return "".join(",".join(row) + "\n" for row in [HEADER, *mixed_rows(count)])


def write_mixed(folder, count=40):
    """`schema.yaml` and `log.csv` in a folder."""
    (folder / "schema.yaml").write_text(yaml.safe_dump(SCHEMA))
    (folder / "log.csv").write_text(mixed_text(count))
