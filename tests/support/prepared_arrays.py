"""Reads a prepared folder without the project's reader."""

import json
from itertools import pairwise

import numpy as np
import pandas as pd


def manifest_of(folder):
    return json.loads((folder / "manifest.json").read_text())


def arrays_of(folder, part):
    """Arrays of a part, shards joined; multi-valued fields as a list of lists per field."""
    manifest = manifest_of(folder)
    joined = {}
    bags = {}
    for shard in manifest["parts"].get(part, []):
        loaded = {key: np.load(folder / file["name"]) for key, file in shard["files"].items()}
        for key, array in loaded.items():
            if key.startswith("offsets_"):
                number = key.split("_")[1]
                values = loaded[f"values_{number}"]
                lists = [values[a:b].tolist() for a, b in pairwise(array)]
                bags.setdefault(int(number), []).extend(lists)
            elif not key.startswith("values_"):
                joined.setdefault(key, []).append(array)
    return {key: np.concatenate(arrays) for key, arrays in joined.items()}, bags


def vocabulary_of(folder, field):
    """Row of each id of a field."""
    values = pd.read_parquet(folder / "learned" / f"{field}.parquet")["value"]
    return {value: row + 2 for row, value in enumerate(values)}
