"""Pictures show what runs recorded, and leave out with a sentence what they did not."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from stampede.engine.report.batch_size import draw_batch_size
from stampede.engine.report.calibration import draw_calibration
from stampede.engine.report.clipped_rows import draw_by_count, draw_by_field
from stampede.engine.report.clipped_share import draw_clipped
from stampede.engine.report.differences import difference_table
from stampede.engine.report.drawing import styles
from stampede.engine.report.embedding_norms import draw_embedding_norms
from stampede.engine.report.learning_curves import draw_auc, draw_loss
from stampede.engine.report.phases import draw_phases
from stampede.engine.report.step_times import step_time_table
from stampede.engine.report.wall_time import draw_wall_time
from stampede.engine.tables import read_field


def curves(drawing):
    """`[n, 2]` points by label, of the first panel."""
    lines = drawing.figure.axes[0].get_lines()
    return {line.get_label(): line.get_xydata() for line in lines}


def test_learning_curves(runs):
    drawn = curves(draw_auc(runs, "test"))
    assert drawn.keys() == {"b256", "b512"}
    of_512 = runs[1].evaluations("test")
    assert [line["step"] for line in of_512] == [2, 4, 6, 8]
    assert drawn["b512"].tolist() == [[line["step"] * 512, line["auc"]] for line in of_512]
    assert "true click probabilities would reach 0." in draw_auc(runs, "test").caption
    losses = curves(draw_loss(runs))["b256"]
    assert losses[:, 1].tolist() == [line["loss"] for line in runs[0].of_kind("train")]


def test_time_of_training_is_that_of_the_summary(runs):
    points = curves(draw_wall_time(runs))["b512"]
    assert len(points) == 4
    assert (np.diff(points[:, 0]) > 0).all()
    end = runs[1].summary["train_seconds"], runs[1].summary["auc"]
    assert tuple(points[-1]) == pytest.approx(end)


def test_a_line_joins_means_over_seeds_at_each_batch_size(runs):
    other = replace(
        runs[0],
        label="again",
        config={**runs[0].config, "run.seed": 1},
        summary={**runs[0].summary, "best_auc": runs[0].summary["best_auc"] + 0.02},
    )
    line, points, _ = draw_batch_size([*runs, other]).figure.axes[0].get_lines()
    low, high = (run.summary["best_auc"] for run in runs)
    assert line.get_xydata() == pytest.approx(np.array([[256, low + 0.01], [512, high]]))
    assert sorted(points.get_xdata()) == [256, 256, 512]


def test_settings_are_lines_of_their_own_unless_they_go_with_the_batch_size(runs):
    longer = {**runs[1].config, "train.epochs": 7}
    assert curves(draw_batch_size([runs[0], replace(runs[1], config=longer)])).keys() >= {
        "all runs"
    }
    wide = [replace(run, config={**run.config, "model.dim": 32}) for run in runs]
    assert curves(draw_batch_size([*runs, *wide])).keys() >= {"dim=10", "dim=32"}


def test_one_batch_size_is_no_curve(runs):
    drawing = draw_batch_size(runs[:1])
    assert drawing.figure is None
    assert drawing.left_out == (
        "It takes finished runs of two batch sizes or more; here: all of 256.",
    )


def test_calibration_is_that_of_the_last_evaluation(runs):
    buckets = runs[0].evaluations("test")[-1]["calibration_buckets"]
    expected = [[bucket["mean_prediction"], bucket["mean_label"]] for bucket in buckets]
    assert curves(draw_calibration(runs))["b256"].tolist() == expected


def test_clipped_rows(runs):
    assert curves(draw_clipped(runs))["b256"][-1][1] == runs[0].summary["clipped_share"]


def test_no_logged_step_is_no_reason_to_blame_the_optimizer(runs):
    bare = replace(runs[0], label="bare", path=runs[0].path / "x", lines=[])
    assert draw_clipped([runs[0], bare]).left_out == ("Not shown, no step was logged: bare.",)


def panel_of(drawing, title):
    return next(panel for panel in drawing.figure.axes if panel.get_title() == title)


def test_clipped_rows_by_field_and_count(runs):
    lines = runs[0].of_kind("clipping")
    assert [line["step"] for line in lines] == [3, 6, 9, 12, 15]
    drawing = draw_by_field(runs)
    (line,) = panel_of(drawing, "C3").get_lines()
    shares = [line["fields"]["C3"]["clipped"] / line["fields"]["C3"]["touched"] for line in lines]
    assert max(shares) > 0
    assert line.get_xydata().tolist() == [[3 * 256 * (i + 1), s] for i, s in enumerate(shares)]
    assert drawing.left_out[0].endswith("(train.clip_stats_every asks for it): b512.")
    assert drawing.left_out[1].startswith("Not shown, as no row was clipped: ")
    (line,) = panel_of(draw_by_count(runs), "once").get_lines()
    once = [line["counts"][0] for line in lines]
    assert {count["from"] for count in once} == {1}
    assert line.get_ydata().tolist() == [count["clipped"] / count["touched"] for count in once]


def test_norms_are_those_of_the_best_epochs_tables(runs):
    drawing = draw_embedding_norms(runs[:1])
    panel = next(p for p in drawing.figure.axes if p.get_title().startswith("C3: "))
    (line,) = panel.get_lines()
    norms = read_field(runs[0].checkpoint(), "C3").embedding.norm(dim=1).log10()
    assert line.get_ydata().sum() == pytest.approx(1)
    mean = (line.get_xdata() * line.get_ydata()).sum()
    assert mean == pytest.approx(norms.mean().item(), abs=0.05)
    assert drawing.left_out[0].startswith("Not shown, fewer than 50 ids: C6, C9")


def damaged_manifest(run):
    for path in run.glob("checkpoints/*/manifest.json"):
        path.write_text("{}")


def damaged_tables(run):
    for path in run.glob("checkpoints/*/*.distcp"):
        path.write_bytes(path.read_bytes()[:1000])


@pytest.mark.parametrize("damage", [damaged_manifest, damaged_tables])
def test_a_damaged_checkpoint_is_left_out(runs, tmp_path, damage):
    shutil.copytree(runs[0].path, tmp_path / "run")
    damage(tmp_path / "run")
    damaged = replace(runs[0], label="damaged", path=tmp_path / "run")
    drawing = draw_embedding_norms([damaged, runs[1]])
    assert any(
        sentence.startswith("damaged is not shown: ") and "damaged checkpoint" in sentence
        for sentence in drawing.left_out
    )
    assert curves(drawing).keys() == {"b512"}
    assert draw_embedding_norms([damaged]).figure is None


def test_time_by_phase_is_the_whole_step(runs):
    axes = draw_phases(runs).figure.axes[0]
    of_runs = zip(*([bar.get_width() for bar in bars] for bars in axes.containers), strict=True)
    for run, widths in zip(runs, of_runs, strict=True):
        lines = run.of_kind("timing")
        steps = [line["step_seconds"]["steps"] for line in lines]
        total = sum(n * line["step_seconds"]["mean"] for n, line in zip(steps, lines, strict=True))
        assert sum(widths) == pytest.approx(1e3 * total / sum(steps))
    assert "computing" in {bars.get_label() for bars in axes.containers}


def timing(step, steps, rank, own, others):
    return {
        "kind": "timing",
        "step": step,
        "step_seconds": {
            "p50": 0.1,
            "p90": 0.2,
            "p99": 0.3,
            "max": 1.5,
            "mean": 0.125,
            "steps": steps,
        },
        "phase_seconds": {"reading the next batch": 0.025},
        "communication_seconds": 0.0125,
        "slowest_seconds": {"rank": rank, "own": own, "others": others},
        "peak_memory_bytes": 1_500_000_000,
    }


def test_the_table_of_steps(runs):
    lines = [timing(500, 500, 2, 0.12, 0.1), timing(1000, 500, 2, 0.1, 0.08)]
    lines.append(timing(1010, 10, 0, 0.5, 0.1))
    header, rows = step_time_table([replace(runs[0], lines=lines), replace(runs[1], lines=[])])
    assert len(header) == len(rows[0]) and len(rows) == 1
    assert rows[0][1:] == [
        "501 to 1,000",
        "100.0 ms",
        "200.0 ms",
        "300.0 ms",
        "1,500.0 ms",
        "20.0%",
        "10.0%",
        "2, 2 of 3 times: 110.0 ms of its own, the others 90.0 ms",
        "1.50 GB",
    ]
    alone = [timing(8, 8, 0, 0.1, None)]
    assert step_time_table([replace(runs[0], lines=alone)])[1][0][-2] == ""


def test_what_was_not_recorded_is_said(runs):
    lines = [line for line in runs[0].lines if line["kind"] == "stopped"]
    bare = replace(runs[0], label="bare", lines=lines, summary={}, path=runs[0].path / "x")
    for draw in (
        draw_loss, draw_wall_time, draw_calibration, draw_clipped, draw_by_field, draw_by_count,
        draw_embedding_norms, draw_phases,
    ):  # fmt: skip
        drawing = draw([bare])
        assert drawing.figure is None and "bare" in drawing.left_out[0]
        both = draw([runs[0], bare])
        assert both.figure is not None and both.left_out[0].endswith(": bare.")


def test_differences(runs):
    assert difference_table(runs) == (
        ["run", "train.batch_size"],
        [["b256", "256"], ["b512", "512"]],
    )
    near = replace(runs[0], config={**runs[0].config, "optim.dense.lr": 1e-3 + 1e-12})
    assert difference_table([runs[0], near])[0] == ["run", "optim.dense.lr"]


def test_curves_differ_without_colour():
    looks = [
        (str(s["linestyle"]), s["marker"], s["markerfacecolor"] == "white") for s in styles(35)
    ]
    assert len(set(looks)) == 35
    # On white paper each is dark enough.
    for style in styles(6):
        assert np.dot(to_rgb(style["color"]), (0.299, 0.587, 0.114)) < 0.6
