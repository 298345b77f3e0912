"""The table of quality: all have the same rows, ours are launched, and what is measured is kept."""

import gzip
from argparse import Namespace

import numpy as np
import pytest
import torch
from peers.raw_logs import read_rows
from quality import LOGS, TABLE, write_subsets

from stampede.data.prepare import prepare
from stampede.data.prepared.reader import open_prepared
from stampede.data.sources import open_source
from stampede.engine.config.load import load_config

ROWS = 900


def written(folder, name):
    """A log in Criteo's or Avazu's layout; the label depends on one id and, in Criteo, a number."""
    draw = np.random.default_rng(5)
    ids = draw.integers(0, 6, (ROWS, 30))
    number = draw.integers(0, 50, ROWS)
    chance = np.where(ids[:, 0] < 2, 0.85, 0.15) + 0.002 * (number - 25)
    label = (draw.random(ROWS) < chance).astype(int)
    if name == "criteo":
        lines = [
            "\t".join(
                [str(label[i]), str(number[i]), *[""] * 12, *(f"{x:08x}" for x in ids[i, :26])]
            )
            for i in range(ROWS)
        ]
    else:
        columns = [c for c in LOGS["avazu"].schema.ids if c not in ("hour_of_day", "weekday")]
        lines = [",".join(["id", "click", "hour", *columns])]
        for i in range(ROWS):
            cells = [str(i), str(label[i]), f"141021{number[i] % 24:02d}"]
            lines.append(",".join([*cells, *map(str, ids[i, : len(columns)])]))
    text = "\n".join(lines) + "\n"
    (folder / LOGS[name].file).write_bytes(gzip.compress(text.encode()))
    return text


def subsets(folder, name, **given):
    written(folder, name)
    options = {"subsets": ["whole"], "draws": 1, "quick": False, "data": folder, **given}
    return list(write_subsets(name, Namespace(**options), folder))


@pytest.mark.wide
@pytest.mark.parametrize("name", ["criteo", "avazu"])
def test_all_have_the_rows_that_the_launcher_has(tmp_path, name):
    (rows,) = subsets(tmp_path, name)
    read = read_rows(name, rows.file, np.load(rows.file.with_suffix(".npy")))
    schema = rows.file.with_suffix(".yaml")
    for config, more in ((LOGS[name].config, []), (TABLE, [f"data.schema_file={schema}"])):
        section = load_config(config, [f"data.path={rows.file}", *rows.split, *more]).data
        named = {"schema": section.schema_file} if more else {}
        folder = tmp_path / config.stem
        prepare(open_source(section.kind, section.path, section, **named), section, folder)
        dataset = open_prepared(folder)
        for part, name_of_part in enumerate(("train", "validation", "test")):
            samples = getattr(dataset, name_of_part)
            assert samples.rows == rows.counts[part] > 0
            labels = samples.read(torch.arange(samples.rows)).label.numpy()
            assert labels.tolist() == read.label[read.part(part)].tolist()
