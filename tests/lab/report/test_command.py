"""The command: one page that needs nothing else, its pictures, sentences for mistakes."""

import base64
import html
import json
import os
import re
import shutil
from dataclasses import replace

import pytest

from stampede import RunFolderError, open_run
from stampede.engine.metrics import PARTS
from stampede.lab.report.command import main
from stampede.lab.report.page import best
from stampede.lab.report.records import baseline_of, open_runs
from support.jobs import run_small


def shown_of(text):
    """The text of a page."""
    return html.unescape(re.sub("<.*?>", "", text))


def report(capsys, *arguments):
    status = main([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    return status, printed.out + printed.err


@pytest.mark.slow
def test_a_page_of_several_runs(run_folders, runs, tmp_path, capsys):
    unfinished, out = tmp_path / "_<b>unfinished$_{$", tmp_path / "new/report"
    shutil.copytree(run_folders / "b256", unfinished)
    (unfinished / "summary.json").unlink()
    run_small(tmp_path, ["data.seed=7"])
    given = [run_folders, unfinished, run_folders / "b256", tmp_path / "small"]
    status, said = report(capsys, *given, "--baseline", "b256", "--out", out)
    assert status == 0 and str(out / "report.html") in said
    text = (out / "report.html").read_text(encoding="utf-8")
    shown = shown_of(text)
    # Runs on other data have separate pictures.
    assert "Data 1: synthetic, seed 0" in shown and "Data 2: synthetic, seed 7" in shown
    files = {path.name: path.read_bytes() for path in out.glob("*.png")}
    assert {"auc_test.png", "auc_test_2.png", "auc_batch_size.png", "clipped.png"} < files.keys()
    assert "auc_batch_size_2.png" not in files
    # The page is self-contained, and its pictures are the files.
    references = re.findall(r'(?:src|href|srcset|data)="(.*?)"', text)
    assert all(reference.startswith("data:") for reference in references)
    pictures = re.findall(r'src="data:image/png;base64,(.*?)"', text)
    assert sorted(map(base64.b64decode, pictures)) == sorted(files.values())
    for lacking in ("<script", "@import", "url(", "http"):
        assert lacking not in text
    # Unfinished runs are named, and their names are text.
    sentence = "is not finished (no summary.json); results are shown up to step 16"
    assert "./_<b>unfinished$_{$ " + sentence in shown and sentence in said
    assert "<b>" not in text and "&lt;b&gt;unfinished$_{$" in text
    for part in PARTS:
        low, high = (run.metric(part, "auc") for run in runs)
        assert f"{high:.4f}" in shown
        assert f"difference of {part} AUC" in shown and f"{high - low:+.4f}" in shown


@pytest.mark.wide
def test_the_page_of_another_run_is_not_overwritten(run_folders, tmp_path, capsys):
    small, other = run_folders / "b256", run_folders / "b512"
    for given, is_written in (
        ([small], True), ([other], False), ([small, other], True), ([small], False)
    ):  # fmt: skip
        before = (tmp_path / "report.html").exists() and (tmp_path / "report.html").read_bytes()
        status, said = report(capsys, *given, "--out", tmp_path)
        assert status == (0 if is_written else 2), said
        if not is_written:
            name = "b256" if given == [other] else "b512"
            assert "report.html: is the page of " in said and name in said
            assert (tmp_path / "report.html").read_bytes() == before


@pytest.mark.slow
def test_a_page_of_one_run_replaces_one_of_several(run_folders, tmp_path, capsys):
    (tmp_path / "auc_batch_size.png").write_text("of an earlier report")
    (tmp_path / "mine.txt").write_text("mine")
    status, said = report(capsys, run_folders / "b256", "--out", tmp_path)
    # Pictures that do not apply to a single run are left to the page.
    assert status == 0 and "AUC against batch size" not in said
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "AUC against batch size: Finished runs of at least two batch sizes" in shown_of(text)
    assert "<td>optim.embedding.clip.threshold</td><td>null</td>" in text
    assert not (tmp_path / "auc_batch_size.png").exists()
    assert (tmp_path / "mine.txt").read_text() == "mine"
    assert not list(tmp_path.glob(".*"))


def test_only_the_best_of_many_runs_are_drawn(runs):
    last = {"test": {"auc": 0.5}}
    many = [
        replace(runs[0], label=str(n), summary={"auc": 0.5 + n, "last": last}) for n in range(30)
    ]
    assert [run.label for run in best([runs[1], *many])] == [str(n) for n in range(10, 30)]


@pytest.mark.parametrize(
    "line, sentence",
    [
        ('{"kind": "stopped", "step": 17, "reason": "the loss is nan"}\n{"half', "a stopped at "
         "step 17: the loss is nan"),
        ('{"kind": "train", "step": 20, "loss": 0.5}\n', "a is not finished (it was continued "
         "after summary.json was written)"),
    ],
)  # fmt: skip
def test_why_a_run_is_not_finished(run_folders, tmp_path, line, sentence):
    run = tmp_path / "sweep/trials/a"
    shutil.copytree(run_folders / "b256", run)
    if "stopped" in line:
        (run / "summary.json").unlink()
    with (run / "metrics.jsonl").open("a") as file:
        file.write(line)
    # The folder of a sweep stands for its trials.
    (record,) = open_runs([tmp_path / "sweep"])
    assert f"{record.label} {record.state()}".startswith(sentence)


def test_a_baseline_is_named_by_label_or_folder(run_folders, runs):
    for asked in ("b256", str(run_folders / "b256"), os.path.relpath(run_folders / "b256")):
        assert baseline_of(runs, asked) is runs[0]
    with pytest.raises(RunFolderError, match="--baseline: found 'b1', which names none of the"):
        baseline_of(runs, "b1")


def without(values, key):
    return {name: value for name, value in values.items() if name != key}


@pytest.mark.wide
def test_one_bad_run_does_not_cost_the_report_of_the_others(run_folders, tmp_path, capsys):
    bad = tmp_path / "bad"
    shutil.copytree(run_folders / "b256", bad, ignore=shutil.ignore_patterns("checkpoints"))
    summary, lines = ((bad / name).read_text() for name in ("summary.json", "metrics.jsonl"))
    whole = json.loads(summary)
    of_kind = {one["kind"]: one for one in map(json.loads, lines.splitlines())}
    damaged = [("summary.json", text) for text in ('{"auc": 1e400}', '{"auc": "\\ud800"}', "[]")]
    damaged += [("summary.json", json.dumps(without(whole, "last")))]
    damaged += [
        ("metrics.jsonl", json.dumps(without(of_kind[kind], key)) + "\n")
        for kind, key in (
            ("train", "kind"), ("train", "step"), ("train", "loss"), ("timing", "step_seconds"),
            ("evaluation", "auc"), ("evaluation", "train_seconds"), ("evaluation", "part"),
        )
    ]  # fmt: skip
    for number, (name, text) in enumerate(damaged):
        (bad / "summary.json").write_text(summary)
        (bad / "metrics.jsonl").write_text(lines)
        (bad / name).write_text(text)
        with pytest.raises(RunFolderError, match="damaged"):
            open_runs([bad])
        with pytest.raises(RunFolderError, match="damaged"):
            run = open_run(bad)
            assert run.summary and run.lines
        if number in (0, len(damaged) - 1):
            status, said = report(capsys, bad, run_folders / "b256", "--out", tmp_path / "out")
            assert status == 0 and f"left out: {bad}/{name}: damaged (" in said
            assert "report of 1 run:" in said and "\x1b" not in said
    assert "(line 1: no 'part'); repair the line or leave the run out" in said
    with pytest.raises(RunFolderError, match=r"metrics\.jsonl: damaged \(line 1: no 'part'\)"):
        _ = open_run(bad).history


def test_wrong_folders_get_a_sentence(run_folders, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for run, out, sentence in (
        ("absent", "out", "no such run folder; write a run folder such as"),
        ("", "out", "neither it nor a folder in it has a config"),
        (run_folders / "b256", "file/out", "choose another folder with --out"),
    ):
        status, said = report(capsys, tmp_path / run, "--out", tmp_path / out)
        assert status == 2 and sentence in said


@pytest.mark.slow
def test_periods_of_a_log_have_a_table_and_a_picture(run_folders, tmp_path, capsys):
    run, out = tmp_path / "ads", tmp_path / "report"
    run.mkdir()
    shutil.copytree(run_folders / "b256", run / "period_0002")
    shutil.copy(run_folders / "b256/config.yaml", run / "config.yaml")
    (run / "periods.json").write_text("{}")
    (run / "metrics.jsonl").touch()
    status, said = report(capsys, run, "--out", out)
    assert status == 2 and "no period has ended yet" in said
    lines = [
        {"kind": "period", "period": n, "step": 7 * n, "file": f"/logs/day_{n}.csv", "rows": 400,
         "auc": 0.5 + n / 10, "logloss": 0.65, "new_ids_auc": 0.55, "new_ids_samples": 40 * n,
         "ids": 1000 + n, "seconds": 8.0, "train_seconds": 5.0}
        for n in (1, 2)
    ]  # fmt: skip
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    status, _ = report(capsys, run, "--out", out)
    text = (out / "report.html").read_text(encoding="utf-8")
    assert status == 0 and "Periods of ads" in text and (out / "periods_auc.png").exists()
    # The first period was scored by an untrained model.
    assert ">day_2.csv</td>" in text and "0.7000" in text and "0.6000" not in text
