"""Several goals in a log that comes in files."""

import json

import numpy as np
import pytest

from stampede import open_run
from stampede.engine.periods.loop import train_incrementally
from support.goals import JOB, SCHEMA, goal_log

pytestmark = pytest.mark.slow


@pytest.mark.wide
def test_each_file_is_scored_then_trained(tmp_path, capsys):
    for number in (1, 2, 3):
        frame = goal_log(500, seed=number)
        if number == 3:
            # Purchases come later.
            frame["price_paid"] = np.nan
            frame.loc[:149, "user"] = "new"
        frame.to_csv(tmp_path / f"day_{number}.csv", index=False)
    (tmp_path / "schema.yaml").write_text(SCHEMA)
    path = tmp_path / "shop.yaml"
    path.write_text("")
    of_parts = ("data.split", "data.test_fraction", "data.validation_fraction")
    job = [one for one in JOB if not one.startswith(of_parts)]
    train_incrementally(
        path,
        [f"run.dir={tmp_path}", f"data.path={tmp_path}/day_*.csv",
         f"data.schema_file={tmp_path}/schema.yaml", *job],
    )  # fmt: skip
    lines = [
        json.loads(line) for line in (tmp_path / "shop/metrics.jsonl").read_text().splitlines()
    ]
    assert [line["period"] for line in lines if line["kind"] == "period"] == [1, 2, 3]
    told = [line["goals"]["buy"]["auc"] for line in lines if line["kind"] == "period"]
    second, third = (open_run(tmp_path / f"shop/period_{n:04d}").summary for n in (2, 3))
    aucs = [second["goals"][goal]["auc"] for goal in ("click", "buy")]
    assert second["auc"] == pytest.approx(np.mean(aucs))
    assert told == [None, second["goals"]["buy"]["auc"], None]
    assert third["goals"]["buy"]["auc"] is None and third["goals"]["buy"]["samples"] == 0
    assert third["auc"] == third["goals"]["click"]["auc"]
    new = [line.get("new_ids_samples") for line in lines if line["kind"] == "period"]
    assert new[0] is None and new[2] >= 150
    printed = capsys.readouterr().out
    assert f" in {new[2]} rows where ids are new" in printed
    click = third["goals"]["click"]
    assert f"  of click: AUC {click['auc']:.4f} logloss {click['logloss']:.4f}" in printed
    assert "  of buy: no labels\n" in printed and printed.count("  of click: ") == 2
    found = open_run(tmp_path / "shop/period_0003").score(goal_log(20))
    assert found.shape == (20, 2)
