"""Tables of the report."""

import math
from dataclasses import replace

from stampede.lab.report.page import (
    about_table,
    configuration_table,
    result_tables,
    step_table,
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


def test_results_of_the_selected_and_the_last_epoch(runs):
    results, last = result_tables(by_data(runs), None)
    for run in runs:
        row, after = cells(results)[run.label], cells(last)[run.label]
        assert row["selected epoch"] == str(run.summary["best_epoch"])
        assert row["chosen on"] == "validation"
        for name, shown in (("auc", "AUC"), ("logloss", "logloss"), ("pr_auc", "PR-AUC")):
            assert row[f"test {shown}"] == f"{run.summary[name]:.4f}"
            assert row[f"validation {shown}"] == f"{run.summary['validation'][name]:.4f}"
            for part in ("validation", "test"):
                assert after[f"{part} {shown}"] == f"{run.summary['last'][part][name]:.4f}"
    assert not [head for head in results.header if head.startswith("difference")]


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


def test_data_and_models(runs):
    row = cells(about_table(runs))["b256"]
    summary = runs[0].summary
    assert row["training rows"] == "1,900" and row["validation rows"] == "100"
    assert row["ids"] == "28,324" and row["parameters of tables"] == f"{28_324 * 11:,}"
    assert row["of dense layers"] == f"{summary['parameters']['dense']:,}"
    assert row["ended"].replace(" UTC", "") == summary["end_time"][:16].replace("T", " ")
    assert row["version"] == summary["version"] and row["on"] == "1 x cpu"


def test_times_of_the_longest_timed_stretch_of_steps(runs):
    def timing(step, steps, others=0.1):
        return {
            "kind": "timing", "step": step,
            "step_seconds": {"p50": 0.1, "p90": 0.2, "p99": 0.3, "max": 1.5, "mean": 0.125,
                             "steps": steps},
            "phase_seconds": {"reading the next batch": 0.025},
            "communication_seconds": 0.0125,
            "slowest_seconds": {"rank": 3, "own": 0.3, "others": others},
            "peak_memory_bytes": 2_500_000_000,
        }  # fmt: skip

    table = step_table([replace(runs[0], label="timed", lines=[timing(20, 12), timing(30, 10)])])
    assert list(table.rows[0].values()) == [
        "timed", "9 to 20", "100.0 ms", "200.0 ms", "300.0 ms", "1,500.0 ms", "20.0%", "10.0%",
        "3: 300.0 ms without waiting, the others 100.0 ms", "2.50 GB",
    ]  # fmt: skip
    alone = step_table([replace(runs[0], lines=[timing(8, 8, None)])])
    assert alone.rows[0]["slowest rank"] == ""


def test_differences_of_the_configurations(runs):
    table = configuration_table(runs)
    assert list(table.header)[:2] == ["run", "train.batch_size"]
    assert cells(table)["b512"]["train.batch_size"] == "512"
    near = replace(runs[0], config={**runs[0].config, "optim.dense.lr": 1e-3 + 1e-12})
    assert list(configuration_table([runs[0], near]).header) == ["run", "optim.dense.lr"]
    same = configuration_table([runs[0], replace(runs[0], label="again")])
    assert same.note == "All runs have the same settings." and not same.rows
