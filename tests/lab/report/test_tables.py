"""Tables of the report."""

import math
from dataclasses import replace

from stampede.lab.report.page import (
    result_tables,
)
from stampede.lab.report.records import by_data, settings_of


def cells(table):
    """By run and column."""
    return {row["run"]: row for row in table.rows}


def as_seed(run, seed, auc):
    """The run with another seed and a validation AUC."""
    summary = {**run.summary, "validation": {**run.summary["validation"], "auc": auc}}
    name = f"{run.label}-seed{seed}"
    config = {**run.config, "run.seed": seed}
    return replace(run, label=name, path=run.path.with_name(name), config=config, summary=summary)


def test_seeds_are_averaged_and_compared_with_a_baseline(runs):
    one, other = runs
    many = [as_seed(one, 1, 0.7), as_seed(one, 2, 0.72), as_seed(other, 1, 0.8),
            as_seed(other, 2, 0.84)]  # fmt: skip
    results, _, each = result_tables(by_data(many), many[0])
    row, base = cells(results)["b512 (2 seeds)"], cells(results)["b256 (2 seeds)"]
    assert base["validation AUC"] == f"0.7100 ± {math.sqrt(2) * 0.01:.4f}"
    assert row["validation AUC"] == f"0.8200 ± {math.sqrt(2) * 0.02:.4f}"
    error = math.hypot(0.01, 0.02)
    assert row["difference of validation AUC"] == f"+0.1100 ± {error:.4f}"
    assert base["difference of validation AUC"] == ""
    assert cells(each)["b512-seed2"]["validation AUC"] == "0.8400"


def test_differences_are_not_shown_to_runs_on_other_data(runs):
    elsewhere = replace(
        runs[0], label="elsewhere", path=runs[0].path / "x",
        config={**runs[0].config, "data.rows": 5},
    )  # fmt: skip
    # A key of what is learned is not of other rows, but another setting.
    rare = replace(runs[0], config={**runs[0].config, "data.min_count": 3}, label="rare")
    assert len(by_data([runs[0], rare])) == 1 and len(settings_of([runs[0], rare])) == 2
    groups = by_data([*runs, elsewhere])
    results = cells(result_tables(groups, runs[0])[0])
    assert results["elsewhere"]["data"] == "synthetic, rows 5"
    assert results["elsewhere"]["difference of test AUC"] == ""
    assert results["b512"]["difference of test AUC"][0] in "+-"
