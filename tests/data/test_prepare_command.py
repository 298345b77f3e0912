"""`python -m stampede.data.prepare` as a user sees it; kills and full disks."""

import os
import signal
import subprocess
import sys
import time
from itertools import pairwise

import numpy as np
import pytest

from stampede.data.prepare import main
from stampede.data.prepared.reader import open_prepared
from stampede.data.prepared.writer import PartWriter
from support.prepared_arrays import arrays_of, manifest_of

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
    assert "rows/s" in progress
    assert "450 rows" in shown and "500 rows" in shown and "1 id field with 52 rows" in shown
    assert manifest_of(log.parent / "out")["source"]["options"]["test_fraction"] == 0.5
    assert main(["--verify", str(log.parent / "out")]) == 0
    next((log.parent / "out").glob("train-*-ids.npy")).unlink()
    assert main(["--verify", str(log.parent / "out")]) == 2


@pytest.mark.parametrize("order, told", [("sorted", False), ("nearly", False), ("mixed", True)])
def test_advice_on_a_sequential_split_of_an_unsorted_log(log, capsys, order, told):
    times = np.arange(1000)
    draw = np.random.default_rng(0)
    if order == "nearly":
        times = np.argsort(times + 50 * draw.random(1000))
    elif order == "mixed":
        draw.shuffle(times)
    lines = [f"{i % 2},u{i % 50},{time}" for i, time in enumerate(times.tolist())]
    log.write_text("\n".join(["y,user,x", *lines]) + "\n")
    (log.parent / "schema.yaml").write_text("label: y\nids: [user]\ntime: {column: x}\n")
    assert main(command(log)) == 0
    shown = capsys.readouterr().out
    told_now = " ".join(shown.split())
    assert ("of the training rows are newer than half of the test rows" in told_now) == told
    by_column = "--set split=by_column --set split_column=x --set test_from=VALUE"
    assert (f"sort the log by 'x', or write {by_column}" in told_now) == told
    assert bool(open_prepared(log.parent / "out").advice) == told
    # A random split needs no order.
    assert main(command(log, "--set", "split=random", out="other")) == 0
    assert "newer" not in capsys.readouterr().out
    assert main(command(log, "--set", "test_fraction=0", out="untested")) == 0


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
    assert manifest_of(log.parent / "out")["source"]["missing_marks"] == {
        "user": {"-": 2, "NA": 1},
        "x": {"NaN": 1},
    }
    # Without the marks, the same texts are ids.
    (log.parent / "schema.yaml").write_text(SCHEMA + 'missing: ["", "NaN"]\n')
    assert main(command(log, out="ids")) == 0
    assert "user" not in manifest_of(log.parent / "ids")["source"]["missing_marks"]


# Complete or absent


def test_no_torch_for_preparing(log):
    program = (
        "import sys; from stampede.data.prepare import main; "
        f"assert main({command(log)!r}) == 0; "
        "print('torch' in sys.modules, 'torchrec' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "False False"


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
    labels = [
        arrays_of(log.parent / "out", part)[0]["label"] for part in ("train", "validation", "test")
    ]
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
        done = subprocess.run(
            [sys.executable, "-S", "-c", STARTER, PEAK.format(arguments=arguments)],
            capture_output=True,
            text=True,
            check=True,
        )
        peaks.append(int(done.stdout.split()[-1]))
    assert (log.parent / "5000.csv").stat().st_size > 60e6
    assert peaks[1] - peaks[0] < 40, peaks


def test_rows_of_many_appends_in_shards(tmp_path):
    """Rows in many appends against the same rows in one array."""
    draw = np.random.default_rng(1)
    ids = draw.integers(0, 9, (100, 3)).astype(np.int32)
    lengths = draw.integers(0, 4, 100)
    values = draw.integers(0, 9, lengths.sum()).astype(np.int32)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    writer = PartWriter(tmp_path, "train", shard_rows=17)
    for a, b in ((0, 1), (1, 1), (1, 40), (40, 93), (93, 100)):
        bag = (lengths[a:b], values[starts[a] : starts[b]])
        writer.append({"ids": ids[a:b]}, [bag])
    shards = writer.finish()
    assert [shard.rows for shard in shards] == [17] * 5 + [15]
    found = [np.load(tmp_path / shard.files["ids"].name) for shard in shards]
    np.testing.assert_array_equal(np.concatenate(found), ids)
    bags = []
    for shard in shards:
        offsets = np.load(tmp_path / shard.files["offsets_0"].name)
        held = np.load(tmp_path / shard.files["values_0"].name)
        assert len(offsets) == shard.rows + 1 and offsets[-1] == len(held)
        bags += [held[a:b].tolist() for a, b in pairwise(offsets)]
    expected = [values[a:b].tolist() for a, b in pairwise(starts)]
    assert bags == expected
