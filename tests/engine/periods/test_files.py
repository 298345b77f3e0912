"""Which files of a log are periods: their order, and whether they are whole."""

import gzip
import multiprocessing
import signal
import sys
import time
from contextlib import redirect_stdout

import pytest

from stampede.data import DataError, prepare
from stampede.engine import incremental
from stampede.engine.periods import files, loop
from stampede.settings import SettingsError
from support.forked import START_METHOD
from support.periods import lines, train, write_job, write_log, write_logs
from support.waiting import HANG, wait_for

ROW = "1,u1,a1,s1,0.5\n"


@pytest.mark.slow
def test_a_damaged_file_stops_or_is_left_out(tmp_path, capsys):
    folder = tmp_path / "damaged"
    path = write_logs(folder, [0, 30])
    whole = (folder / "log2.csv").read_text()
    (folder / "log2.csv").write_text(whole.replace("\n1,", "\nmaybe,", 1))
    with pytest.raises(DataError, match=r"log2\.csv: line .*; or leave .* --on-bad-file skip$"):
        train(path)
    assert [line["file"] for line in lines(folder)] == [str(folder / "log1.csv")]
    # One that was mended is taken.
    (folder / "log2.csv").write_text(whole)
    packed = gzip.compress(whole.encode())
    (folder / "log3.csv.gz").write_bytes(packed[: len(packed) // 2])
    where = [f"data.path={folder}/log*"]
    with pytest.raises(DataError, match=r"log3\.csv\.gz: "):
        train(path, where)
    train(path, where, on_bad_file="skip")
    assert "left out: " in capsys.readouterr().err
    # What was left out stays so, and files that come late or change are refused.
    (folder / "log3.csv.gz").write_bytes(packed)
    train(path, where)
    assert [line["file"][-8:] for line in lines(folder)] == ["log1.csv", "log2.csv"]
    (left_out,) = lines(folder, "left_out")
    assert left_out["file"].endswith("log3.csv.gz") and "log3.csv.gz: " in left_out["reason"]
    write_log(folder / "log0.csv", 10, seed=9)
    with pytest.raises(DataError, match=r"log0\.csv: comes before .*log2\.csv.* --on-bad-file"):
        train(path)
    train(path, on_bad_file="skip")
    assert len(lines(folder)) == 2 and len(lines(folder, "left_out")) == 2
    with (folder / "log2.csv").open("a") as log:
        log.write(ROW)
    with pytest.raises(DataError, match=r"log2\.csv: was trained on with .* put new rows into"):
        train(path)


def append_before(patch, owner, name, file):
    """Let a log get another row just before a function is called for the first time."""
    original = getattr(owner, name)

    def appending(*arguments, **options):
        patch.setattr(owner, name, original)
        with file.open("a") as log:
            log.write(ROW)
        return original(*arguments, **options)

    patch.setattr(owner, name, appending)


@pytest.mark.slow
def test_a_file_that_grows_while_it_is_read_is_read_again(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "growing"
    path, log = write_logs(folder, [0]), folder / "log1.csv"
    append_before(monkeypatch, prepare, "write_rows", log)
    with pytest.raises(DataError, match=r"log1\.csv: had .* bytes when reading began and has"):
        train(path)
    # Between the ledger and reading it may grow: all of it is read.
    append_before(monkeypatch, loop, "run_here", log)
    train(path)
    assert [line["rows"] for line in lines(folder)] == [402]
    train(path)
    # With --follow it is waited for.
    append_before(monkeypatch, prepare, "write_rows", log)
    monkeypatch.setattr(files, "_AT_REST_SECONDS", 0.1)
    monkeypatch.setattr(loop, "_POLL_SECONDS", 0.05)
    finish = loop._Periods._finish

    def finish_and_end(*arguments):
        finish(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(loop._Periods, "_finish", finish_and_end)
    again = tmp_path / "again"
    with pytest.raises(KeyboardInterrupt):
        train(path, [f"run.dir={again}/runs"], follow=True)
    assert [line["rows"] for line in lines(again)] == [403]
    assert "waiting for files" in capsys.readouterr().out


@pytest.mark.wide
def test_files_may_come_in_the_order_of_their_times(tmp_path):
    folder = tmp_path / "timed"
    path = write_job(folder)
    schema = (folder / "schema.yaml").read_text()
    (folder / "schema.yaml").write_text(schema + "time: {column: seconds}\n")

    def write_timed(number, first):
        log = folder / f"log{number}.csv"
        write_log(log, 30 * number, seed=number, rows=60)
        head, *rows = log.read_text().splitlines()
        rows = [f"{row},{10**9 + first + 60 - i}" for i, row in enumerate(rows)]
        log.write_text("\n".join([f"{head},seconds", *rows, ""]))

    for number, first in enumerate((9000, 700, 8000), 1):
        write_timed(number, first)
    train(path, ["data.order_by=time"])
    assert [line["file"][-8:-4] for line in lines(folder)] == ["log2", "log3", "log1"]
    write_timed(4, 8500)
    with pytest.raises(DataError, match=r"log4\.csv: comes before .*log1\.csv"):
        train(path, ["data.order_by=time"])
    write_timed(4, 9500)
    train(path, ["data.order_by=time"])
    assert len(lines(folder)) == 4
    (folder / "schema.yaml").write_text(schema)
    with pytest.raises(SettingsError, match="the schema names no time"):
        train(path, ["data.order_by=time", "run.name=other"])


def follow(path, said):
    files._AT_REST_SECONDS, loop._POLL_SECONDS = 2.0, 0.05
    with open(said, "w", buffering=1) as file, redirect_stdout(file):
        sys.exit(incremental.main([str(path), "--follow"]))


@pytest.mark.wide
def test_following_takes_files_that_are_whole_and_ends_on_a_signal(tmp_path):
    folder, said = tmp_path / "followed", tmp_path / "said"
    path = write_job(folder)
    context = multiprocessing.get_context(START_METHOD)
    process = context.Process(target=follow, args=(path, said))
    process.start()
    assert wait_for(lambda: said.exists() and "waiting for files: " in said.read_text())
    write_log(folder / "log1.csv", 0, seed=1)
    whole = (folder / "log1.csv").read_bytes()
    (folder / "log1.csv").write_bytes(whole[:3000])
    time.sleep(0.5)
    # It was written in pieces, and only the whole of it is a period.
    (folder / "log1.csv").write_bytes(whole)
    assert wait_for(lambda: not process.is_alive() or (folder / "runs/ads/periods.png").exists())
    process.terminate()
    process.join(HANG)
    assert process.exitcode == 128 + signal.SIGTERM
    assert "between two periods; the same command continues" in said.read_text()
    assert [line["rows"] for line in lines(folder)] == [400]
