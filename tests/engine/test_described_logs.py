"""The command that `stampede describe` prints trains, without edits, on logs of many kinds."""

import json
import shlex

import numpy as np
import pandas as pd
import pytest

from stampede.data.describe import main as describe
from stampede.engine.cli import main
from support.paths import ROOT, shared

N = 1500
DRAW = np.random.default_rng(0)
SMALL = ("model.hidden=[16]", "evaluate.compare_with_lr=false", "train.epochs=1")


def of(*values):
    return DRAW.choice(values, N)


def ids(most):
    return DRAW.integers(0, most, N)


def odd_logs():
    """Frames of columns as public logs have them, by name."""
    days = pd.date_range("2015-07-01", periods=N, freq="97min")
    milliseconds = 1_700_000_000_000 + np.sort(DRAW.integers(0, 30 * 86_400_000, N))
    seen = [json.dumps(DRAW.integers(0, 90, k).tolist()) for k in DRAW.integers(0, 6, N)]
    return {
        "apps": pd.DataFrame({
            "user": ids(90), "item": ids(300), "cnt": DRAW.zipf(1.5, N) % 20_000,
            "daytime": of("morning", "evening"), "isweekend": of("workday", "weekend"),
            "cost": of("free", "paid"), "label": of(-1, 1),
        }),
        "hotel": pd.DataFrame({
            "hotel": of("Resort Hotel", "City Hotel"), "target": of(0, 1),
            "lead_time": DRAW.exponential(100, N).astype(int),
            "month": days.strftime("%B"), "children": of(0, 1, 2, np.nan), "company": "NULL",
            "agent": ids(400), "adr": DRAW.gamma(4, 25, N).round(2),
            "reservation_status_date": days.strftime("%Y-%m-%d"),
        }),
        "coupons": pd.DataFrame({
            "destination": of("No Urgent Place", "Home"), "temperature": of(30, 55, 80),
            "time": of("2PM", "10AM"), "age": of("21", "50plus"), "car": of("", "", "Scooter"),
            "CoffeeHouse": of("never", "4~8", ""), "toCoupon_GEQ5min": 1, "Y": of(0, 1),
        }),
        "access": pd.DataFrame({"ACTION": of(0, 1), "RESOURCE": ids(90_000), "MGR_ID": ids(9000)}),
        "shop": pd.DataFrame({
            "event time": milliseconds, "visitor": ids(2 * 10**9), "sku": ids(90),
            "stock": DRAW.lognormal(4, 1.2, N).astype(int), "seen": seen,
            "price €": DRAW.lognormal(2, 1, N).round(2), "outcome": of("view", "view", "buy"),
            "fold": ids(5),
        }),
        "parts": pd.DataFrame({
            "Split": np.repeat(["train", "valid", "test"], [N - 600, 300, 300]),
            "ts": days.strftime("%Y-%m-%dT%H:%M:%SZ"), "user": ids(90), "clicked": of("yes", "no"),
        }),
        "ratings": pd.DataFrame({
            "userId": ids(90), "movieId": ids(300), "rating": ids(5) + 1,
            "timestamp": 1_000_000_000 + np.arange(N) * 7200,
        }),
    }  # fmt: skip


LOGS = odd_logs()
REAL = ("adult.csv.gz", "avazu_20k.csv.gz", "criteo_1tb_day0_10k.tsv.gz")


@pytest.mark.slow
@pytest.mark.cases(3)
@pytest.mark.parametrize("name", [*LOGS, *REAL])
def test_the_printed_command_trains(tmp_path, monkeypatch, capfd, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    if name in LOGS:
        path = tmp_path / f"{name}.csv"
        LOGS[name].to_csv(path, index=False)
    else:
        path = shared(f"data/{name}")
    assert describe([str(path)]) == 0
    printed = capfd.readouterr().out.partition("\nto train\n")[2].partition("\n\n")[0]
    words = shlex.split(printed.replace("\\\n", " "))
    assert words[:2] == ["python", "launch.py"]
    assert main([*words[2:], *SMALL]) == 0
    assert "epoch 1: validation AUC 0." in capfd.readouterr().out
