"""Descriptions of prepared folders against numpy."""

import numpy as np
import pytest

from stampede.data.describe import main
from stampede.data.description.collector import collect
from stampede.data.description.inputs import PreparedInput
from stampede.data.sources import open_source
from support.described import prepared, raw_input


def test_a_prepared_folder_against_numpy(tmp_path):
    parts = prepared(tmp_path / "prepared")
    found = collect(PreparedInput(tmp_path / "prepared", None))
    assert found.rows.tolist() == [500] * 3
    assert found.positives.tolist() == [int(arrays["label"].sum()) for arrays in parts.values()]
    a, b, many = found.ids
    for j, column in ((0, a), (1, b)):
        every = [arrays["ids"][:, j] for arrays in parts.values()]
        for part, ids in enumerate(every):
            assert column.by_part.missing_share(part) == np.mean(ids == 0)
            lacking = ids == 1 if j == 0 else ~np.isin(ids, every[0]) & (ids != 0)
            assert column.by_part.unseen_share(part) == np.mean(lacking)
        ids, counts = np.unique(np.concatenate(every), return_counts=True)
        counts = counts[ids > (1 if j == 0 else 0)]
        assert column.distinct == len(counts)
        present = (np.concatenate(every) != 0).sum()
        assert column.coverage(10) == pytest.approx(np.sort(counts)[-10:].sum() / present)
    for part, arrays in enumerate(parts.values()):
        empty = (np.diff(arrays["offsets_0"]) == 0).sum()
        missing = (arrays["values_0"] == 0).sum() + empty
        share = missing / (len(arrays["values_0"]) + empty)
        assert many.by_part.missing_share(part) == pytest.approx(share)
    (number,) = found.numbers
    values = np.concatenate([arrays["numbers"] for arrays in parts.values()])
    assert number.range.mean == pytest.approx(values.mean())
    assert number.by_part.missing_share(0) is None
    assert not found.slices.by_time
    labels = np.concatenate([arrays["label"] for arrays in parts.values()])
    assert found.slices.width == 32
    assert found.slices.table["positives"].to_list() == [
        int(labels[start : start + 32].sum()) for start in range(0, 1500, 32)
    ]


def test_the_first_rows_of_each_part(tmp_path):
    parts = prepared(tmp_path / "prepared")
    found = collect(PreparedInput(tmp_path / "prepared", 250))
    assert found.rows.tolist() == [250] * 3
    assert found.positives.tolist() == [arrays["label"][:250].sum() for arrays in parts.values()]


def test_texts_of_a_prepared_log_are_those_of_the_log(log, tmp_path, capsys):
    folder, frame = log
    from stampede.data.preparation import PreparationOptions, prepare

    options = PreparationOptions()
    source = open_source(
        "table", str(folder / "log_*.csv"), options, schema=str(folder / "schema.yaml")
    )
    prepare(source, options, tmp_path / "prepared")
    data = PreparedInput(tmp_path / "prepared", None)
    found = {column.name: column for column in collect(data).ids}
    assert data.texts(found["site"]) == frame["site"].value_counts().index[:3].tolist()
    assert all(text.startswith("row ") for text in data.texts(found["user"]))
    raw = {column.name: column for column in collect(raw_input(folder)).ids}
    for name in ("site", "tags"):
        for part in range(3):
            for what in ("missing_share", "unseen_share"):
                expected = getattr(raw[name].by_part, what)(part)
                assert getattr(found[name].by_part, what)(part) == pytest.approx(expected)


@pytest.mark.parametrize("damage", ["gone", "short", "manifest"])
def test_a_damaged_folder(tmp_path, damage, capsys):
    folder = tmp_path / "prepared"
    prepared(folder)
    path = folder / ("manifest.json" if damage == "manifest" else "test-1-label.npy")
    path.unlink() if damage == "gone" else path.write_bytes(path.read_bytes()[:100])
    assert main([str(folder), "--out", str(tmp_path / "out")]) == 2
    assert f"error: {path}: " in capsys.readouterr().err
