"""Pictures show what runs recorded, and leave out with a sentence what they did not."""

from dataclasses import replace

import numpy as np
import pytest

from stampede.lab.report.pictures import all_pictures
from stampede.lab.report.records import settings_of


def drawn(runs, name):
    """The picture of a name."""
    (picture,) = (one for one in all_pictures(runs, runs) if one.name == name)
    return picture


def curves(picture):
    """`[n, 2]` points by label, of those that have one."""
    lines = picture.figure.axes[0].get_lines()
    return {line.get_label(): line.get_xydata() for line in lines if line.get_label()[0] != "_"}


def with_another_seed(run, more):
    """The same run with another seed, and an AUC that is larger by so much."""
    lines = [{**line, "auc": line["auc"] + more} if "auc" in line else line for line in run.lines]
    summary = {**run.summary, "auc": run.summary["auc"] + more}
    config = {**run.config, "run.seed": 1}
    path = run.path.with_name(f"{run.label}-seed1")
    return replace(run, label=path.name, path=path, config=config, lines=lines, summary=summary)


def test_auc_over_samples_and_time_and_the_losses(runs):
    of_512 = runs[1].evaluations("test")
    assert [line["step"] for line in of_512] == [2, 4, 6, 8]
    picture = drawn(runs, "auc_test")
    assert curves(picture).keys() == {"b256", "b512"}
    expected = [[line["step"] * 512, line["auc"]] for line in of_512]
    assert curves(picture)["b512"].tolist() == expected
    assert "true click probabilities would reach 0." in picture.caption
    expected = [[line["train_seconds"], line["auc"]] for line in of_512]
    assert curves(drawn(runs, "auc_wall_time"))["b512"].tolist() == expected
    loss = drawn(runs[:1], "loss")
    training, validation = (line.get_xydata() for line in loss.figure.axes[0].get_lines())
    assert training[:, 1].tolist() == [line["loss"] for line in runs[0].of_kind("train")]
    assert validation[:, 1].tolist() == [e["logloss"] for e in runs[0].evaluations("validation")]


def test_seeds_are_averaged_with_their_spread(runs):
    runs = [*runs, with_another_seed(runs[0], 0.02)]
    assert [one.label for one in settings_of(runs)] == ["b256 (2 seeds)", "b512"]
    axes = drawn(runs, "auc_test").figure.axes[0]
    aucs = np.array([line["auc"] for line in runs[0].evaluations("test")])
    assert axes.get_lines()[0].get_ydata() == pytest.approx(aucs + 0.01)
    (band,) = axes.collections
    heights = band.get_paths()[0].vertices[:, 1]
    assert heights.min() == pytest.approx(aucs.min())
    assert heights.max() == pytest.approx(aucs.max() + 0.02)
    # And at each batch size.
    (container,) = drawn(runs, "auc_batch_size").figure.axes[0].containers
    low, high = (run.summary["auc"] for run in runs[:2])
    line, _, (bars,) = container
    assert line.get_xydata() == pytest.approx(np.array([[256, low + 0.01], [512, high]]))
    assert bars.get_segments()[0][:, 1] == pytest.approx([low, low + 0.02])


def test_settings_are_lines_of_their_own_unless_they_go_with_the_batch_size(runs):
    def labels(runs):
        return drawn(runs, "auc_batch_size").figure.axes[0].get_legend_handles_labels()[1]

    longer = {**runs[1].config, "train.epochs": 7}
    assert labels([runs[0], replace(runs[1], config=longer)]) == ["all runs"]
    wide = [replace(run, config={**run.config, "model.dim": 32}) for run in runs]
    assert labels([*runs, *wide]) == ["dim=10", "dim=32"]


def test_calibration_is_that_of_the_selected_epoch(runs):
    line = next(e for e in runs[0].evaluations("test") if e["auc"] == runs[0].summary["auc"])
    # As if the last epoch were another.
    other = {**runs[0].summary["last"]["test"], "calibration_buckets": []}
    summary = {**runs[0].summary, "last": {"epoch": 9, "test": other}}
    expected = [[b["mean_prediction"], b["mean_label"]] for b in line["calibration_buckets"]]
    picture = drawn([replace(runs[0], summary=summary)], "calibration")
    assert curves(picture)["b256"].tolist() == expected


def test_clipped_rows_so_far(runs):
    so_far = curves(drawn(runs, "clipped"))["b256"]
    assert so_far[-1][1] == runs[0].summary["clipped_share"]


def test_time_by_phase_is_the_whole_step(runs):
    axes = drawn(runs, "time_by_phase").figure.axes[0]
    of_runs = zip(*([bar.get_width() for bar in bars] for bars in axes.containers), strict=True)
    for run, widths in zip(runs, of_runs, strict=True):
        lines = run.of_kind("timing")
        steps = [line["step_seconds"]["steps"] for line in lines]
        total = sum(n * line["step_seconds"]["mean"] for n, line in zip(steps, lines, strict=True))
        assert sum(widths) == pytest.approx(1e3 * total / sum(steps))
    assert "computing" in {bars.get_label() for bars in axes.containers}


def test_what_was_not_recorded_is_said(runs):
    bare = replace(runs[0], label="bare", lines=[], summary={}, path=runs[0].path / "x")
    # Not another seed of the same.
    bare = replace(bare, config={**bare.config, "model.dim": 3})
    for alone, both in zip(
        all_pictures([bare], [bare]), all_pictures([runs[0], bare], [runs[0], bare]), strict=True
    ):
        if alone.name == "periods_auc":
            assert not alone.left_out and not both.left_out
            continue
        assert alone.figure is None and "bare" in alone.left_out[0]
        assert any(sentence.endswith(": bare.") for sentence in both.left_out)
        assert (both.figure is None) == (both.name == "auc_batch_size")
