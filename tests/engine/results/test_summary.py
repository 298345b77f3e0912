"""The table of metrics at the end of a run."""

from stampede.engine.results.summary import _metric_table


def test_large_values_keep_apart():
    found = {"auc": 0.5, "logloss": 123456789.25}
    other = {"auc": 0.625, "logloss": 987654321.5}
    summary = {
        **found, "validation": other, "best_epoch": 0, "steps": 7, "last": {"test": found},
    }  # fmt: skip
    rows = {line.split()[0]: line.split()[1:] for line in _metric_table(summary).splitlines()[1:]}
    assert rows["logloss"] == ["987654321.5000", "123456789.2500"]
    assert rows["AUC"] == ["0.6250", "0.5000"]
