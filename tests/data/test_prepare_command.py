"""`python -m stampede.data.prepare` as a user sees it; kills and full disks."""

import io
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

from stampede.data.prepare import main
from stampede.data.prepared.reader import open_prepared
from stampede.data.progress import RowProgress, pace
from stampede.engine.console import progress_bar
from support.prepared_arrays import arrays_of, manifest_of
from support.preparing import PARTS

SCHEMA = "label: y\nids: [user]\nnumbers: [x]\n"


@pytest.fixture
def log(tmp_path):
    (tmp_path / "schema.yaml").write_text(SCHEMA)
    draw = np.random.default_rng(0)
    lines = [f"{i % 2},u{draw.integers(50)},{draw.random():.4f}" for i in range(1000)]
    (tmp_path / "log.csv").write_text("\n".join(["y,user,x", *lines]) + "\n")
    return tmp_path / "log.csv"


def command(log, *further, out="out"):
    folder = log.parent
    return [
        *("table", str(log), "--schema", str(folder / "schema.yaml")),
        *("--out", str(folder / out), *further),
    ]


def test_prepares_verifies_and_reports(log, capsys):
    options = ["-s", "split=random", "-s", "test_fraction=0.5", "--set", "features=paper"]
    assert main(command(log, *options)) == 0
    shown, progress = capsys.readouterr()
    assert "pass 2 of 2, writing" in progress and "1,000 rows" in progress
    assert "450 rows" in shown and "500 rows" in shown and "1 id field with 52 rows" in shown
    assert manifest_of(log.parent / "out")["source"]["options"]["test_fraction"] == 0.5
    assert main(["--verify", str(log.parent / "out")]) == 0
    next((log.parent / "out").glob("train-*-ids.npy")).unlink()
    assert main(["--verify", str(log.parent / "out")]) == 2


@pytest.mark.parametrize("moved_by, told", [(50, False), (10**6, True)])
def test_advice_on_a_sequential_split_of_an_unsorted_log(log, capsys, moved_by, told):
    times = np.argsort(np.arange(1000) + moved_by * np.random.default_rng(0).random(1000))
    lines = [f"{i % 2},u{i % 50},{time}" for i, time in enumerate(times.tolist())]
    log.write_text("\n".join(["y,user,x", *lines]) + "\n")
    (log.parent / "schema.yaml").write_text("label: y\nids: [user]\ntime: {column: x}\n")
    assert main(command(log)) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert ("of the training rows are newer than half of the test rows" in shown) == told
    by_column = "--set split=by_column --set split_column=x --set test_from=VALUE"
    assert (f"sort the log by 'x', or write {by_column}" in shown) == told
    assert bool(open_prepared(log.parent / "out").advice) == told
    # A random split needs no order.
    assert main(command(log, "--set", "split=random", out="other")) == 0
    assert "newer" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "further, words",
    [
        (["--set", "splt=random"], ["splt: unknown key", "did you mean 'split'?"]),
        (["--set", "split=rnd"], ["split: found 'rnd'", "did you mean"]),
        (["--set", "split"], ["write KEY=VALUE"]),
        (["--set", "split=by_column"], ["needs split_column; write --set split_column=NAME"]),
        (["--set", "split=files"], ["needs test_path; write --set test_path=FILE"]),
        (["--set", "test_path=x.csv"], ["belong to split: files"]),
        (["--schema", "nowhere.yaml"], ["nowhere.yaml: no such file"]),
    ],
)
def test_mistakes_get_a_sentence_and_status_2(log, capsys, further, words):
    assert main(command(log, *further)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and all(word in error for word in words)
    assert "Traceback" not in error
    assert not (log.parent / "out").exists()


def test_mistakes_in_files(log, capsys):
    assert main(command(log.parent / "absent.csv")) == 2
    assert "absent.csv: no such file" in capsys.readouterr().err
    log.write_text(log.read_text().replace("\n1,", "\n3,", 1))
    assert main(command(log)) == 2
    assert "line 3, column y: found 3.0; write 0 or 1" in capsys.readouterr().err
    assert sorted(path.name for path in log.parent.iterdir()) == ["log.csv", "schema.yaml"]
    assert main(command(log, "--set", "on_bad_row=skip")) == 0
    place = log.parent / "out/bad_rows.jsonl"
    assert f"left out 1 bad row, listed in {place}" in capsys.readouterr().out
    assert place.is_file()
    assert main(command(log)) == 2
    assert "already exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content, words",
    [
        ("", "is empty, or has only a header line; write the path"),
        ("y,user,x\n", "name the columns in the schema, as in `columns: ["),
        ("y,user,x\n1,anna,0.5\n", "too few rows to divide into parts (1)"),
    ],
)
def test_logs_without_rows(log, capsys, content, words):
    log.write_bytes(content.encode())
    assert main(command(log, out="new/folder/out")) == 2
    assert words in capsys.readouterr().err
    # Neither the folder nor its parents are left.
    assert sorted(path.name for path in log.parent.iterdir()) == ["log.csv", "schema.yaml"]


def test_cells_that_are_missing_because_of_their_text_are_reported(log, capsys):
    rows = ["1,NA,0.5", "0,-,NaN", "0,-,7", "1,null-and-void,"]
    log.write_text("\n".join([log.read_text().strip(), *rows]) + "\n")
    assert main(command(log)) == 0
    told = "treated 4 cells as missing because of the text: user ('-' 2, 'NA' 1), x ('NaN' 1)"
    assert told in capsys.readouterr().out
    # Without the marks, the same texts are ids.
    (log.parent / "schema.yaml").write_text(SCHEMA + 'missing: ["", "NaN"]\n')
    assert main(command(log, out="ids")) == 0
    assert "user" not in manifest_of(log.parent / "ids")["source"]["missing_marks"]


def test_no_torch_for_preparing(log):
    program = (
        "import sys; from stampede.data.prepare import main; "
        f"assert main({command(log)!r}) == 0; "
        "print('torch' in sys.modules, 'torchrec' in sys.modules)"
    )
    said = subprocess.check_output([sys.executable, "-c", program], text=True)
    assert said.splitlines()[-1] == "False False"


def test_a_killed_preparation_is_never_taken_for_complete(log):
    """Killed at several moments: the result is absent or complete, and leftovers are removed."""
    rows = log.read_text().splitlines()
    log.write_text("\n".join([rows[0], *rows[1:] * 200]) + "\n")
    program = [sys.executable, "-m", "stampede.data.prepare"]
    for attempt in range(6):
        process = subprocess.Popen(
            [*program, *command(log)],
            env={**os.environ, "POLARS_MAX_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        # From the moment that something is written, a little later each time.
        while process.poll() is None and not any(log.parent.glob(".out.unfinished/*")):
            time.sleep(0.005)
        time.sleep(0.05 * attempt)
        process.send_signal(signal.SIGKILL)
        process.wait()
        if (log.parent / "out").exists():
            break
    assert attempt > 0, "the kills came too late to show anything"
    if not (log.parent / "out").exists():
        assert main(command(log)) == 0
    assert main(["--verify", str(log.parent / "out")]) == 0
    labels = [arrays_of(log.parent / "out", part)[0]["label"] for part in PARTS]
    assert np.concatenate(labels).tolist() == [i % 2 for i in range(1000)] * 200
    assert not list(log.parent.glob(".*"))


PEAK = """
import resource
from stampede.data.prepare import main
from stampede.data.raw import files
files.BLOCK_BYTES = 1 << 20
assert main({arguments!r}) == 0
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""
STARTER = """
import subprocess, sys
sys.exit(subprocess.run([sys.executable, "-c", sys.argv[1]]).returncode)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_rows(log):
    """Ten times the rows of the same ids; the larger log alone would need 60 MB more."""
    lines = log.read_text().splitlines()
    peaks = []
    for times in (500, 5000):
        path = log.parent / f"{times}.csv"
        path.write_text("\n".join([lines[0], *(lines[1:] * times)]) + "\n")
        arguments = ["table", str(path), "--schema", str(log.parent / "schema.yaml")]
        arguments += ["--out", str(log.parent / f"out{times}")]
        # A process begins with the memory of the one that starts it: a small one does.
        program = [sys.executable, "-S", "-c", STARTER, PEAK.format(arguments=arguments)]
        peaks.append(int(subprocess.check_output(program).split()[-1]))
    assert (log.parent / "5000.csv").stat().st_size > 60e6
    assert peaks[1] - peaks[0] < 40, peaks


def test_a_bar_is_redrawn_often_except_in_a_log_file(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert pace()["mininterval"] == 10
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert pace()["mininterval"] == 0.5
    # The standard error of a notebook is no terminal either.
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    shell = SimpleNamespace(config={"IPKernelApp": {}})
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    with progress_bar(10, 0, True) as bar, RowProgress("scoring", 10) as rows:
        assert bar.mininterval == rows._bar.mininterval == 0.5
