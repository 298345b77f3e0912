"""Synthetic clicks: reproducible row by row, and worth learning."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest
import torch
from sklearn.metrics import roc_auc_score

from stampede.data import SyntheticClicks, open_prepared
from stampede.data.options import PreparationOptions
from stampede.data.prepare import prepare
from stampede.data.sources import open_source
from stampede.data.synthetic import CRITEO_CARDINALITIES, CRITEO_ROWS, CriteoClicks
from stampede.data.synthetic_command import main
from stampede.engine.config.load import load_config
from stampede.engine.reading import open_dataset
from support.paths import ROOT

SMALL = SyntheticClicks(scale=0.0005)
NAMES = ("ids", "dense", "label", "true_probability")


def read(part, rows):
    """Samples in numpy."""
    samples = part.read(torch.from_numpy(rows))
    return SimpleNamespace(**{name: getattr(samples, name).numpy() for name in NAMES})


def test_a_row_does_not_depend_on_the_rows_read_with_it():
    part = SMALL.dataset(10_000, 100).train
    whole = read(part, np.arange(5000))
    asked = np.array([4999, 0, 1023, 1024, 1024, 77])
    found = read(part, asked)
    for name in NAMES:
        np.testing.assert_array_equal(getattr(found, name), getattr(whole, name)[asked])


def test_parts_share_no_rows():
    dataset = SMALL.dataset(3000, 1000, validation_rows=500)
    parts = [dataset.train, dataset.validation, dataset.test]
    assert [part.rows for part in parts] == [2500, 500, 1000]
    seen = np.concatenate([read(part, np.arange(part.rows)).dense for part in parts])
    assert len(np.unique(seen, axis=0)) == len(seen)


def test_labels_are_drawn_with_the_true_probability():
    samples = read(SMALL.dataset(100_000, 100).train, np.arange(100_000))
    for low in np.arange(0, 1, 0.1):
        here = (samples.true_probability >= low) & (samples.true_probability < low + 0.1)
        expected = samples.true_probability[here].mean()
        error = np.sqrt(0.25 / here.sum())
        assert abs(samples.label[here].mean() - expected) < 4 * error


def test_the_parts_of_the_logit_have_the_configured_spread():
    stds = {"numbers_std": 0.6, "first_order_std": 1.35, "interactions_std": 0.7}
    overrides = ["data.scale=0.0005", *(f"data.{name}={std}" for name, std in stds.items())]
    part = open_dataset(load_config(ROOT / "configs/quickstart.yaml", overrides), None).test
    samples = read(part, np.arange(50_000))
    parts = part.truth.parts(samples.ids, samples.dense)
    found = dict(zip(stds, (float(part.std()) for part in parts), strict=True))
    assert found == pytest.approx(stds, rel=0.05)


@pytest.mark.slow
def test_quickstart_needs_ids_and_their_interactions():
    """Their true weights without the interactions lose more than a fourth of the ratio."""
    quickstart = open_dataset(load_config(ROOT / "configs/quickstart.yaml"), None)
    test = read(quickstart.test, np.arange(quickstart.test.rows))
    attainable = roc_auc_score(test.label, test.true_probability)

    def ratio(scores):
        return (roc_auc_score(test.label, scores) - 0.5) / (attainable - 0.5)

    numbers, first_order, _ = quickstart.test.truth.parts(test.ids, test.dense)
    assert ratio(numbers) < 0.8 * 0.9
    assert ratio(numbers + first_order) < 0.8 * 0.9


def test_a_log_whose_ids_drift(tmp_path, capsys):
    """Some ids of large fields are new each day; what the others mean does not change."""
    command = [str(tmp_path), "--rows", "3000", "--drift", "0.1", "--scale", "0.0005"]
    assert main([*command, "--files", "1"]) == 0
    before = (tmp_path / "day_1.tsv").stat().st_mtime_ns
    assert main([*command, "--files", "3"]) == 0
    assert "3 files of 3,000 rows in" in capsys.readouterr().out
    assert (tmp_path / "day_1.tsv").stat().st_mtime_ns == before
    days = [
        pl.read_csv(tmp_path / f"day_{n}.tsv", separator="\t", has_header=False, infer_schema=False)
        for n in (1, 2, 3)
    ]
    assert all(day.shape == (3000, 40) for day in days)
    # C3 has thousands of ids, C20 four.
    large, small = (
        [set(day[name].drop_nulls()) for day in days] for name in ("column_17", "column_34")
    )
    assert small[0] == small[1] == small[2]
    # The same rows without any drift: what differs was replaced.
    still = tmp_path / "still"
    assert main([str(still), *command[1:3], "--drift", "0", *command[5:]]) == 0
    plain = pl.read_csv(still / "day_3.tsv", separator="\t", has_header=False, infer_schema=False)
    assert plain["column_2"].equals(days[2]["column_2"])
    replaced = set(plain["column_17"].drop_nulls()) - large[2]
    assert 0.1 < len(replaced) / plain["column_17"].n_unique() < 0.3
    assert main([str(tmp_path / "none"), "--files", "0"]) == 2
    said = capsys.readouterr().err
    assert "found --files 0 --rows 20000" in said and "write --files and --rows of 1" in said


def test_conversions_are_clicks_and_their_probabilities_are_known():
    clicks = SyntheticClicks(scale=0.0005)
    parts = [replace(clicks, conversions=more).dataset(40_000, 100).train for more in (False, True)]
    alone, both = (part.read(torch.arange(40_000)) for part in parts)
    # The clicks are those of a single label.
    assert torch.equal(both.label[:, 0], alone.label) and torch.equal(both.ids, alone.ids)
    assert torch.equal(both.true_probability[:, 0], alone.true_probability)
    label, truth = both.label.numpy().astype(float), both.true_probability.numpy()
    assert (label[:, 1] <= label[:, 0]).all() and (truth[:, 1] < truth[:, 0]).all()
    shares = label.mean(0)
    assert 0.01 < shares[1] < 0.1 < shares[0]
    # Where many conversions are predicted, there are as many.
    for goal in (0, 1):
        order = np.argsort(truth[:, goal])
        for rows in np.array_split(order, 5):
            error = np.sqrt((truth[rows, goal] * (1 - truth[rows, goal])).sum())
            assert abs(label[rows, goal].sum() - truth[rows, goal].sum()) < 4 * error
    assert roc_auc_score(label[:, 1], truth[:, 1]) > 0.75


def test_a_log_with_conversions_is_read_by_its_schema(tmp_path):
    assert main([str(tmp_path), "--files", "1", "--rows", "3000", "--conversions"]) == 0
    options = PreparationOptions(split="random", test_fraction=0.5)
    schema, folder = str(tmp_path / "schema.yaml"), tmp_path / "prepared"
    source = open_source("table", str(tmp_path / "day_1.tsv"), options, schema=schema)
    prepare(source, options, folder)
    dataset = open_prepared(folder)
    assert dataset.goals == ("click", "conversion")
    assert len(dataset.vocabulary_sizes) >= 26 and dataset.numbers == 13
    drawn = replace(SyntheticClicks(), conversions=True).dataset(3000, 100).train
    expected = drawn.label(torch.arange(3000)).double().mean(0)
    found = [part.label(torch.arange(part.rows)).double() for part in dataset.parts().values()]
    torch.testing.assert_close(torch.cat(found).mean(0), expected)


def occurring(exponent, rows):
    """Distinct ids expected in rows of a power law without an end, by numerical integration."""
    x = np.logspace(0, 150, 300_001)
    occurs = -np.expm1(-rows * (exponent - 1) * x**-exponent)
    return ((occurs[1:] + occurs[:-1]) / 2 * np.diff(x)).sum()


def test_ids_are_as_many_as_in_criteo_kaggle():
    clicks = CriteoClicks()
    for size, exponent, endless in zip(
        CRITEO_CARDINALITIES, clicks.exponents(), clicks.is_endless(), strict=True
    ):
        assert endless == (size > 2_000_000)
        if endless:
            assert occurring(exponent, CRITEO_ROWS) == pytest.approx(size, rel=0.01)


@pytest.mark.wide
def test_a_part_of_a_log_as_large_as_criteo_kaggle(tmp_path, capsys):
    assert main([str(tmp_path), "--criteo", "0.0005"]) == 0
    assert "1 file of 22,920 rows in" in capsys.readouterr().out
    log = pl.read_csv(tmp_path / "train.txt", separator="\t", has_header=False, infer_schema=False)
    assert log.shape == (22_920, 40)
    # C3 has no end of ids, C17 ten.
    expected = occurring(CriteoClicks().exponents()[2], 22_920)
    assert log["column_17"].n_unique() == pytest.approx(expected, rel=0.02)
    assert log["column_31"].drop_nulls().n_unique() == 10
    assert log["column_17"].str.len_bytes().unique().to_list() == [8]
    assert main([str(tmp_path), "--criteo", "2"]) == 2
    assert "write a share of Criteo Kaggle's rows above 0 and at most 1" in capsys.readouterr().err


def test_clicks_of_such_a_log_have_known_probabilities():
    samples = CriteoClicks().dataset(100, 50_000).test.read(torch.arange(50_000))
    label, truth = samples.label.numpy().astype(float), samples.true_probability.numpy()
    assert samples.ids.max() > 2**31
    order = np.argsort(truth)
    for rows in np.array_split(order, 5):
        error = np.sqrt((truth[rows] * (1 - truth[rows])).sum())
        assert abs(label[rows].sum() - truth[rows].sum()) < 4 * error
