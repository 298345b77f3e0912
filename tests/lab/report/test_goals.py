"""The page of a run with several goals."""

import json

import pytest

from stampede.engine.run import run
from stampede.lab.report.page import by_data, report_on, result_tables
from stampede.lab.report.records import open_runs
from support.goals import goal_config, write_goals

pytestmark = pytest.mark.slow


@pytest.mark.wide
def test_each_goal_has_a_table_and_pictures(tmp_path):
    run(goal_config(write_goals(tmp_path), "train.epochs=2"))
    runs = open_runs([tmp_path / "goals"])
    tables = {table.title: table.rows for table in result_tables(by_data(runs), None)}
    summary = json.loads((tmp_path / "goals/summary.json").read_text())
    for goal in ("click", "buy"):
        (row,) = tables[f"The goal {goal}"]
        assert row["test AUC"] == f"{summary['goals'][goal]['auc']:.4f}"
        validation = summary["validation"]["goals"][goal]
        assert row["validation calibration"] == f"{validation['calibration']:.4f}"
    assert tables["Results"][0]["test AUC"] == f"{summary['auc']:.4f}"
    page = report_on(tmp_path / "goals", tmp_path / "report").read_text()
    assert "AUC of buy on the validation part" in page and "Calibration of click" in page
    pictures = {path.name for path in (tmp_path / "report").glob("*.png")}
    assert {"auc_test.png", "auc_test_buy.png", "calibration_click.png"} <= pictures
