"""What the benchmarks share: clicks, timers, the load of the machine, the process of each."""

import importlib.util
import json
import runpy
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

from support.paths import ROOT
from support.waiting import HANG

MODULES = (ROOT / "benchmarks").glob("[!_]*.py")
SCRIPTS = [path for path in MODULES if "__main__" in path.read_text()]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_each_script_prints_its_help(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [script.name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 0
    assert script.name in capsys.readouterr().out


@pytest.mark.parametrize("fields", [13, 26, 52])
def test_tables_have_as_many_ids_as_asked_for_and_the_first_are_the_most_frequent(fields):
    from clicks import cardinalities, drawn_ids

    sizes = cardinalities(2_600_000, fields)
    assert len(sizes) == fields and sum(sizes) == pytest.approx(2_600_000, rel=1e-3)
    ids = drawn_ids(np.random.default_rng(0), 20_000, [3, 1000])
    assert ids.min(0).tolist() == [0, 0] and ids.max(0)[0] == 2 and ids.max(0)[1] < 1000
    assert (np.diff(np.bincount(ids[:, 0])) < 0).all()


def test_a_stopwatch_adds_up_and_puts_back():
    from timing import Stopwatch

    owner = SimpleNamespace(work=lambda seconds: time.sleep(seconds))
    before, watch = owner.work, Stopwatch()
    with watch.watching(owner, "work", lambda seconds: "long" if seconds > 0.03 else "short"):
        for seconds in (0.01, 0.01, 0.05):
            owner.work(seconds)
    owner.work(0.05)
    assert owner.work is before
    assert watch.calls == {"short": 2, "long": 1}
    assert watch.seconds["short"] >= 0.02 and watch.seconds["long"] >= 0.05


def test_a_child_is_another_process_until_it_has_ended():
    from machine import OtherProcesses

    others, but_some = OtherProcesses(), OtherProcesses()
    busy = "import time; end = time.process_time() + 0.5\nwhile time.process_time() < end: pass"
    with subprocess.Popen([sys.executable, "-c", busy]) as child:
        # Its end is seen without reaping it.
        while "Z" not in _state(child.pid):
            time.sleep(0.02)
        before = others.seconds()[1]
        but_some.mine(0.4)
        assert before - but_some.seconds()[1] > 0.2
    assert before - others.seconds()[1] > 0.3


def _state(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[0]


def test_the_named_benchmark_runs_and_what_failed_is_told(tmp_path, monkeypatch, capsys):
    from report import command_line

    def first(options, report):
        report.add(rows=3)
        report.add(seconds=[2])
        return "a table"

    def second(options, report):
        report.failed = ["one"]
        return ""

    given = ["--quick", "--out", f"{tmp_path}/new/x.json", "--folder", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["x.py", "first", *given])
    command_line(first, second)
    assert capsys.readouterr().out.startswith("a table\n\nother processes took ")
    found = json.loads((tmp_path / "new/x.json").read_text())
    assert (found["rows"], found["seconds"], found["quick"]) == (3, [2], True)
    assert {"cpu", "cores", "commit", "torch", "other_processes"} <= set(found["machine"])
    monkeypatch.setattr(sys, "argv", ["x.py", "second", *given])
    with pytest.raises(SystemExit, match="failed: one"):
        command_line(first, second)


def test_a_benchmark_that_fails_or_hangs_is_ended():
    spec = importlib.util.spec_from_file_location("bench", ROOT / "benchmarks/__main__.py")
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    assert bench.run([sys.executable, "-c", ""], HANG) == ""
    assert "exit status 3" in bench.run([sys.executable, "-c", "raise SystemExit(3)"], HANG)
    # Whoever is not ended sleeps for hours.
    assert "stopped" in bench.run([sys.executable, "-c", "import time; time.sleep(36000)"], 0.5)
    scripts = [script or name for name, (_, script) in bench.BENCHMARKS.items()]
    assert all((ROOT / f"benchmarks/{script}.py").exists() for script in scripts)
