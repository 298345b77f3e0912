"""The command: one page that needs nothing else, its pictures, sentences for mistakes."""

import base64
import json
import os
import shutil
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from stampede.engine.report.__main__ import main
from stampede.engine.report.page import best
from support.jobs import run_small

NAMES = {
    "auc_test", "auc_validation", "loss", "auc_wall_time", "auc_batch_size", "calibration",
    "clipped", "clipped_by_field", "clipped_by_count", "embedding_norms", "time_by_phase",
}  # fmt: skip


class Page(HTMLParser):
    """What a page shows, and whether its tags are closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.references, self.text = [], [], [], ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.references += [v for k, v in attributes if k in ("src", "href", "srcset", "data")]
        if tag not in ("meta", "link", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data if self.open[-1:] != ["style"] else ""


def report(capsys, *arguments):
    status = main([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    return status, printed.out + printed.err


@pytest.fixture
def unfinished(run_folders, tmp_path):
    run = tmp_path / "_<b>unfinished$_{$"
    shutil.copytree(run_folders / "b256", run)
    (run / "summary.json").unlink()
    return run


@pytest.mark.slow
def test_a_page_of_several_runs(run_folders, unfinished, tmp_path, capsys):
    out = tmp_path / "new/report"
    status, said = report(capsys, run_folders, unfinished, run_folders / "b256", "--out", out)
    assert status == 0 and str(out / "report.html") in said
    text = (out / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert not page.open
    assert {path.name for path in out.iterdir()} == {"report.html", *(f"{n}.png" for n in NAMES)}
    # Everything is inside, each picture is that of its file.
    assert all(reference.startswith("data:") for reference in page.references)
    for lacking in ("<script", "@import", "url(", "http"):
        assert lacking not in text
    pictures = [attributes["src"] for tag, attributes in page.tags if tag == "img"]
    files = [base64.b64decode(source.removeprefix("data:image/png;base64,")) for source in pictures]
    assert sorted(files) == sorted((out / f"{name}.png").read_bytes() for name in NAMES)
    # Runs are there once each, what is unfinished is said.
    cells = [part.strip() for part in page.text.split("\n")]
    # In the tables of results, of the last epoch, of data and models, of steps and differences.
    for label in ("b256", "b512"):
        advice = f"{label}: "
        of_tables = [cell for cell in cells if cell.startswith(label) and cell != label]
        assert len([cell for cell in of_tables if not cell.startswith(advice)]) == 5
    sentence = "is not finished (no summary.json); results are shown up to step 16"
    assert "./_<b>unfinished$_{$ " + sentence in page.text and sentence in said
    assert "<b>" not in text and "&lt;b&gt;unfinished$_{$" in text
    assert any(a.get("name") == "viewport" for _, a in page.tags)
    assert "slowest rank" in page.text
    summary = json.loads((run_folders / "b512/summary.json").read_text())
    shown = [summary["validation"], summary, *map(summary["last"].get, ("validation", "test"))]
    for metrics in shown:
        assert f"{metrics['auc']:.4f}" in page.text and f"{metrics['logloss']:.4f}" in page.text


def test_a_page_of_one_run_replaces_one_of_several(run_folders, tmp_path, capsys):
    (tmp_path / "auc_batch_size.png").write_text("of an earlier report")
    (tmp_path / "mine.txt").write_text("mine")
    status, said = report(capsys, run_folders / "b256", "--out", tmp_path)
    # Pictures that do not apply to a single run are left to the page.
    assert status == 0 and "AUC against batch size" not in said
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "AUC against batch size: Finished runs of at least two batch sizes" in page.text
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<td>optim.embedding.clip.threshold</td><td>null</td>" in text
    assert '<td>deepfm</td><td class="number">256</td>' in text
    for said in ("1,900", "28,324", "311,564", "0.1.0", "UTC"):
        assert said in page.text, said
    assert not (tmp_path / "auc_batch_size.png").exists()
    assert (tmp_path / "mine.txt").read_text() == "mine"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_of_many_runs_the_best_are_drawn(runs):
    many = [
        replace(
            runs[0],
            label=str(n),
            path=runs[0].path / str(n),
            summary={"auc": 0.5 + n, "last": {"test": {"auc": 0.5}}},
        )
        for n in range(30)
    ]
    shown = best([runs[1], *many])
    assert [run.label for run in shown] == [str(n) for n in range(10, 30)]
    assert best(many[:3]) == many[:3]


def test_why_a_run_stopped(unfinished, tmp_path, capsys):
    with (unfinished / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "stopped", "step": 17, "reason": "the loss is nan"}\n{"half')
    said = report(capsys, unfinished, "--out", tmp_path / "out")[1]
    assert "<b>unfinished$_{$ stopped at step 17: the loss is nan" in said


def test_a_run_that_was_continued_and_killed_is_unfinished(run_folders, tmp_path, capsys):
    run = tmp_path / "sweep/trials/a"
    shutil.copytree(run_folders / "b256", run)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 20, "loss": 0.5}\n')
    # The folder of a sweep stands for its trials.
    status, said = report(capsys, tmp_path / "sweep", "--out", tmp_path / "out")
    assert status == 0
    assert "a is not finished (it was continued after summary.json was written)" in said


@pytest.mark.slow
def test_runs_on_different_data_share_no_picture(run_folders, tmp_path, capsys):
    run_small(tmp_path, ["data.seed=7"])
    out = tmp_path / "report"
    status, _ = report(capsys, run_folders, tmp_path / "small", "--out", out)
    page = Page((out / "report.html").read_text(encoding="utf-8"))
    assert status == 0
    assert "Data 1: synthetic, seed 0" in page.text and "Data 2: synthetic, seed 7" in page.text
    sections = [a["id"] for tag, a in page.tags if tag == "section"]
    assert "auc_test" in sections and "auc_test_2" in sections
    assert (out / "auc_test_2.png").is_file() and (out / "auc_batch_size.png").is_file()
    assert not (out / "auc_batch_size_2.png").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["b256", "folder"])
def test_differences_to_a_baseline(run_folders, runs, tmp_path, capsys, name):
    asked = run_folders / "b256" if name == "folder" else name
    assert report(capsys, run_folders, "--baseline", asked, "--out", tmp_path)[0] == 0
    text = Page((tmp_path / "report.html").read_text(encoding="utf-8")).text
    for part in ("validation", "test"):
        low, high = (run.metric(part, "auc") for run in runs)
        assert f"difference of {part} AUC" in text and f"{high - low:+.4f}" in text
    status, said = report(capsys, run_folders, "--baseline", "b1", "--out", tmp_path)
    assert status == 2 and "--baseline: found 'b1', which names none of the runs" in said


def damaged_summary(run):
    (run / "summary.json").write_text("{")


def poor_summary(run):
    (run / "summary.json").write_text("{}")


def damaged_line(run):
    (run / "metrics.jsonl").write_text('{"kind": "train", "step": 1}\n')


def foreign_config(run):
    (run / "config.yaml").write_text("a: 1\n")


@pytest.mark.parametrize(
    "damage, sentence",
    [
        (shutil.rmtree, "no such run folder; write a run folder such as"),
        (
            lambda run: (run / "config.yaml").unlink(),
            "neither it nor a folder in it has a config.yaml",
        ),
        (damaged_summary, "summary.json: damaged"),
        (poor_summary, "summary.json: damaged (no 'auc'); delete it to show"),
        (damaged_line, "metrics.jsonl: damaged (no 'loss')"),
        (foreign_config, "train.batch_size is missing"),
    ],
)
def test_mistakes(run_folders, tmp_path, capsys, damage, sentence):
    run, out = tmp_path / "run", tmp_path / "out"
    shutil.copytree(run_folders / "b256", run)
    damage(run)
    status, said = report(capsys, run, "--out", out)
    assert status == 2 and said.count("error: ") == 1
    assert sentence in said and not out.exists()


def line(**values):
    return lambda run: (run / "metrics.jsonl").write_text(json.dumps({"step": 1, **values}) + "\n")


def timing(**values):
    seconds = {"steps": 1, "mean": 1.0, "p50": 1.0, "p90": 1.0, "p99": 1.0, "max": 1.0}
    whole = {
        "step_seconds": seconds, "phase_seconds": {}, "communication_seconds": 0.0,
        "slowest_seconds": {"rank": 0, "own": 1.0, "others": None}, "peak_memory_bytes": 1,
    }  # fmt: skip
    return line(kind="timing", **{**whole, **values})


def summary(**values):
    def change(run):
        there = json.loads((run / "summary.json").read_text())
        (run / "summary.json").write_text(json.dumps({**there, **values}))

    return change


NONE = {"from": 0, "touched": 1, "clipped": 1}


def pipe(name):
    def change(run):
        (run / name).unlink()
        os.mkfifo(run / name)

    return change


def large(run):
    with (run / "metrics.jsonl").open("wb") as file:
        file.truncate(1 << 40)


@pytest.mark.parametrize(
    "damage, sentence",
    [
        (line(kind="train", loss="nan"), "loss: Input should be a valid number"),
        (line(kind="train", loss=10**400), "loss: "),
        (line(kind="train", loss=0.5, step=2**60), "step: Input should be less than"),
        (line(kind="train", loss=0.5, step=True), "step: Input should be a valid integer"),
        (line(kind=["train"]), "kind: Input should be a valid string"),
        (line(kind="evaluation", part=3, auc=0.5, train_seconds=1.0), "part: Input should be"),
        (line(kind="evaluation", part="test", auc=0.5), "no 'train_seconds'"),
        (line(kind="clipping", fields=[], counts=[], left_out=[]), "fields: Input should be"),
        (line(kind="clipping", fields={}, counts=[NONE], left_out=[]), "counts.0.from: "),
        (line(kind="advice", text=["a"]), "text: Input should be a valid string"),
        (line(kind="advice", text="\ud800"), "text: Input should be a valid string"),
        (timing(step_seconds={}), "no 'step_seconds.steps'"),
        (timing(slowest_seconds={"rank": [], "own": 0.0, "others": 0.0}), "slowest_seconds.rank: "),
        (lambda run: (run / "metrics.jsonl").write_text("[" * 100_000 + "\n"), "damaged ("),
        (lambda run: (run / "metrics.jsonl").write_text("[]\n"), "damaged ("),
        (lambda run: (run / "metrics.jsonl").write_bytes(b"\xff\n"), "damaged ("),
        (large, "metrics.jsonl: damaged"),
        (pipe("metrics.jsonl"), "is not a file"),
        (summary(auc="0.5"), "summary.json: damaged (auc: Input should be a valid number"),
        (summary(last=[]), "last: Input should be"),
        (summary(last={"test": {"other": 1}}), "no 'other'"),
        (summary(rows={"train": None}), "rows.train: Input should be"),
        (summary(best_epoch={}), "best_epoch: Input should be a valid integer"),
        (summary(version=[]), "version: Input should be a valid string"),
    ],
)
def test_values_of_another_type_are_named(run_folders, tmp_path, capsys, damage, sentence):
    run = tmp_path / "run"
    shutil.copytree(run_folders / "b256", run)
    damage(run)
    status, said = report(capsys, run, "--out", tmp_path / "out")
    assert status == 2 and said.count("error: ") == 1 and sentence in said, said
    assert len(said) < 2000


def test_nothing_that_a_run_wrote_commands_the_terminal(run_folders, tmp_path, capsys):
    run, out = tmp_path / "\x1b[2Jrun", tmp_path / "out"
    shutil.copytree(run_folders / "b256", run)
    with (run / "metrics.jsonl").open("a") as file:
        for kind, key in (("advice", "text"), ("stopped", "reason")):
            file.write(json.dumps({"kind": kind, "step": 99, key: "\x1b]0;\x07\u202e"}) + "\n")
    with (run / "config.yaml").open("a") as file:
        file.write('evil: "\\ud800\\e[2J"\n')
    status, said = report(capsys, run, "--out", out)
    assert status == 0 and "\\x1b]0;\\x07\\u202e" in said
    for text in (said, (out / "report.html").read_text()):
        assert not [c for c in text if not c.isprintable() and c != "\n"]
    (run / "summary.json").write_text("{")
    said = report(capsys, run, "--out", out)[1]
    assert "\x1b" not in said and "summary.json: damaged" in said


def test_a_folder_that_cannot_be_written(run_folders, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    status, said = report(capsys, run_folders / "b256", "--out", tmp_path / "file/out")
    assert status == 2 and "choose another folder with --out" in said
    status, said = report(capsys, tmp_path / "file", "--out", tmp_path / "out")
    assert status == 2 and "is a file; write a run folder" in said


def test_periods_of_a_log_have_a_table_and_pictures(run_folders, tmp_path, capsys):
    run, out = tmp_path / "ads", tmp_path / "report"
    run.mkdir()
    shutil.copytree(run_folders / "b256", run / "period_0003")
    shutil.copy(run_folders / "b256/config.yaml", run / "config.yaml")
    (run / "periods.json").write_text("{}")
    (run / "metrics.jsonl").touch()
    status, said = report(capsys, run, "--out", out)
    assert status == 2 and "no period has ended yet" in said
    lines = [
        {"kind": "period", "period": n, "step": 7 * n, "file": f"/logs/day_{n}.csv", "rows": 400,
         "auc": 0.5 + n / 10, "logloss": 0.65, "new_ids_auc": 0.55, "new_ids_samples": 40 * n,
         "ids": 1000 + n, "seconds": 8.0, "train_seconds": 5.0}
        for n in (1, 2, 3)
    ]  # fmt: skip
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    status, _ = report(capsys, run, "--out", out)
    text = (out / "report.html").read_text(encoding="utf-8")
    assert status == 0 and "Periods of ads" in text and "epoch" in text
    # The first was scored by a model that has learned nothing.
    assert "<td>day_2.csv</td>" in text and "0.7000" in text and "0.6000" not in text
    pictures = {f"periods_{name}.png" for name in ("auc", "new_ids_auc", "ids")}
    assert pictures < {path.name for path in out.iterdir()}
    # A later report without them leaves none behind, and does not speak of them.
    report(capsys, run_folders / "b256", "--out", out)
    assert not pictures & {path.name for path in out.iterdir()}
    assert "AUC of each period" not in (out / "report.html").read_text(encoding="utf-8")
