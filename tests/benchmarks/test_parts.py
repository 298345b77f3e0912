"""Every benchmark at a size of seconds: what it measures takes place; what all of them share."""

import importlib.util
import json
import runpy
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import end_to_end
import floors
import launched
import manual_tables
import numpy as np
import pytest
import steps
import update_kernel
from clicks import cardinalities, drawn_ids, write_clicks
from communication import summarize, train_and_wait
from launched import KEEP_MEMORY, run_program
from machine import OtherProcesses
from report import Report, command_line
from timing import Stopwatch

from support.paths import ROOT
from support.ranks import run_ranks
from support.waiting import HANG, wait_for


@pytest.fixture(scope="module")
def clicks(tmp_path_factory):
    """A prepared folder with 5 tables."""
    return write_clicks(tmp_path_factory.mktemp("clicks"), rows=2048, ids=4000, fields=5)


OVERRIDES = ["train.batch_size=256", "model.hidden=[16,16]"]


def test_the_parts_of_a_step_are_the_whole_step(clicks):
    overrides = [f"data.path={clicks}", *OVERRIDES]
    parts = steps.parts_of_a_step(overrides, batch=256, steps=10)
    assert sum(parts[name] for name in steps.PARTS) == pytest.approx(parts["step"])
    assert all(parts[name] > 0 for name in steps.PARTS)


@pytest.mark.slow
def test_ranks_wait_for_each_other_and_repeat_their_exchanges(clicks):
    overrides = [f"data.path={clicks}", *OVERRIDES]
    overrides += ["evaluate.batch_size=256", "sharding.plan=table_wise"]
    ranks = run_ranks(2, train_and_wait, overrides, 3)
    for rank in ranks:
        assert 0 < rank["waited"] < rank["seconds"]
        assert rank["alone"] > 0 and rank["processor_seconds"] > 0
        # The dense layers' gradients: 5 fields of 10 columns and 13 numbers in.
        dense = 63 * 16 + 16 + 16 * 16 + 16 + 16 + 1 + 13
        assert 4 * dense <= rank["sent_bytes"]["all_reduce"] < 4 * dense + 200
        assert rank["sent_bytes"]["all_to_all_single"] > 0
    found = summarize(ranks, 3)
    assert found["waits_per_step"] >= 3


@pytest.mark.slow
def test_the_launcher_and_its_peer_train_on_the_same_clicks(clicks, tmp_path):
    for name in ("1024 fp32 all", "1024 sparse_adam keeps memory"):
        assert end_to_end.train(name, clicks, tmp_path) > 0
    # The run folder, with its checkpoints, is gone.
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_the_memory_of_a_training_is_more_than_its_tables(clicks, monkeypatch):
    # It would set the allocator of this process, which goes on with other tests.
    monkeypatch.setattr(steps, "keep_freed_memory", lambda: None)
    found = steps.time_and_memory(clicks, 256, 2, trained=3)
    # Weights and two moments of 12 columns.
    assert found["peak_bytes"] > found["table_bytes"] == 144 * found["ids"]
    more = {**found, "ids": found["ids"] + 1000, "peak_bytes": found["peak_bytes"] + 150_000}
    assert steps.bytes_per_id({"20": more, "1": found}) == 150


def test_runs_beside_other_processes_are_done_again_and_do_not_count(tmp_path, monkeypatch):
    one, two = "1024 fp32 all", "1024 bf16 all"
    report = Report(tmp_path / "x.json")
    speeds, shares = {one: iter([1.0, 5.0]), two: iter([2.0])}, iter([0.5, 0.01, 0.02])
    monkeypatch.setattr(end_to_end, "train", lambda name, *_: next(speeds[name]))
    monkeypatch.setattr(end_to_end.floors, "measure", lambda quick: {})
    monkeypatch.setattr(report.others, "share", lambda since=None: next(shares) if since else 0)
    end_to_end.measure(tmp_path, tmp_path, [one, two], report, again=5)
    assert report.found["samples_per_second"] == {one: 5.0, two: 2.0}


def test_every_bar_has_a_contender():
    names = {f"{batch} {kind}" for batch in end_to_end.EPOCHS for kind in end_to_end.KINDS}
    assert set(end_to_end.BARS) <= names - set(end_to_end.OMITTED)


def test_the_manual_shows_the_committed_results():
    for name in manual_tables.PAGES:
        page = (ROOT / name).read_text(encoding="utf-8")
        shown = page.split(manual_tables.BEGIN)[1].split(manual_tables.END)[0].strip()
        expected = manual_tables.page_tables(name, manual_tables.RESULTS)
        assert shown == expected, "run python benchmarks/manual_tables.py --write"


def test_programs_have_the_default_allocator_or_the_asked_one(tmp_path, monkeypatch):
    program = tmp_path / "said.py"
    program.write_text("import json, os; print(json.dumps(dict(os.environ)))")
    monkeypatch.setenv("MALLOC_ARENA_MAX", "")
    done = run_program([program], threads=2)
    assert done.seconds > 0 < done.processor_seconds and done.peak_bytes > 1e6
    assert not [name for name in json.loads(done.said) if name.startswith("MALLOC_")]
    assert KEEP_MEMORY.items() <= json.loads(run_program([program], 2, KEEP_MEMORY).said).items()
    program.write_text("import sys; print('said'); sys.exit('why')")
    with pytest.raises(RuntimeError, match="why"):
        run_program([program])


def test_a_run_that_fell_back_to_fp32_is_no_result_of_bf16(tmp_path, monkeypatch):
    def run_program(command):
        (tmp_path / "benchmark").mkdir()
        (tmp_path / "benchmark/summary.json").write_text("{}")
        return launched.Done("dense layers in fp32 instead of bf16", 1, 1, 1)

    monkeypatch.setattr(launched, "run_program", run_program)
    with pytest.raises(RuntimeError, match="used fp32 instead of bf16"):
        launched.launch(tmp_path, "bf16", [], tmp_path)
    assert launched.launch(tmp_path, "fp32", [], tmp_path) == {}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_floors_are_measured():
    found = floors.measure(quick=True)
    assert found["copy_bytes_per_second"] > 1e8
    assert floors.mlp_samples_per_second(found, "fp32", 65536) > 0


@pytest.mark.parametrize("make", ["ours", "fbgemms"])
def test_contenders_of_the_update_change_the_rows_of_the_batch(make):
    sizes = cardinalities(5000)
    lookups = update_kernel.Lookups(32, sizes, 1)
    tables = getattr(update_kernel, make)(sizes, *(["touched"] if make == "ours" else []))
    before = [weights.clone() for weights in tables.split_embedding_weights()]
    assert update_kernel.backwards(tables, lookups)() > 0
    after, of_tables = tables.split_embedding_weights(), lookups.ids[0].split(32)
    for then, now, ids in zip(before, after, of_tables, strict=True):
        assert (then != now).any(1).nonzero().flatten().tolist() == ids.unique().tolist()


def test_the_update_and_whole_steps_are_measured():
    sizes = cardinalities(5000)
    found = update_kernel.measure_backward(64, sizes, repeats=2)
    assert set(found["seconds"]) == {"fbgemm", "stampede", "torch"}
    assert len(found["all_seconds"]["torch"]) == 2
    found = update_kernel.measure_steps(64, sizes, steps=3, repeats=1)
    assert set(found["seconds_per_step"]) == {"touched", "deferred", "swept"}


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
    sizes = cardinalities(2_600_000, fields)
    assert len(sizes) == fields and sum(sizes) == pytest.approx(2_600_000, rel=1e-3)
    ids = drawn_ids(np.random.default_rng(0), 20_000, [3, 1000])
    assert ids.min(0).tolist() == [0, 0] and ids.max(0)[0] == 2 and ids.max(0)[1] < 1000
    assert (np.diff(np.bincount(ids[:, 0])) < 0).all()


def test_a_stopwatch_adds_up_and_puts_back():
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
    others, but_some = OtherProcesses(), OtherProcesses()
    busy = "import time; end = time.process_time() + 0.5\nwhile time.process_time() < end: pass"
    with subprocess.Popen([sys.executable, "-c", busy]) as child:
        # Its end is seen without reaping it.
        stat = Path(f"/proc/{child.pid}/stat")
        assert wait_for(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z")
        before = others.seconds()[1]
        but_some.mine(0.4)
        assert before - but_some.seconds()[1] > 0.2
    assert before - others.seconds()[1] > 0.3


def test_the_named_benchmark_runs_and_what_failed_is_told(tmp_path, monkeypatch, capsys):
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
