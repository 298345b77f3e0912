"""The command: one page that needs nothing else, its pictures, sentences for mistakes."""

import base64
import json
import os
import shutil
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from stampede.engine.errors import RunFolderError
from stampede.engine.metrics import PARTS
from stampede.engine.report.__main__ import main
from stampede.engine.report.page import best
from stampede.engine.report.run_records import baseline_of, open_runs
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
    page = Page(text)
    assert not page.open
    # Runs on other data have separate pictures.
    assert "Data 1: synthetic, seed 0" in page.text and "Data 2: synthetic, seed 7" in page.text
    assert {a["id"] for tag, a in page.tags if tag == "section"} > {"auc_test", "auc_test_2"}
    files = {path.name: path.read_bytes() for path in out.glob("*.png")}
    assert files.keys() > {f"{name}.png" for name in NAMES} | {"auc_test_2.png"}
    assert "auc_batch_size_2.png" not in files
    assert {path.name for path in out.iterdir()} == {"report.html", *files}
    # The page is self-contained, and its pictures are the files.
    assert all(reference.startswith("data:") for reference in page.references)
    for lacking in ("<script", "@import", "url(", "http"):
        assert lacking not in text
    pictures = [attributes["src"] for tag, attributes in page.tags if tag == "img"]
    shown = [base64.b64decode(source.removeprefix("data:image/png;base64,")) for source in pictures]
    assert sorted(shown) == sorted(files.values())
    # Each run is shown once, and unfinished runs are named.
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
    summary = json.loads((run_folders / "b512/summary.json").read_text())
    for metrics in (summary["validation"], summary, *map(summary["last"].get, PARTS)):
        assert f"{metrics['auc']:.4f}" in page.text and f"{metrics['logloss']:.4f}" in page.text
    for part in PARTS:
        low, high = (run.metric(part, "auc") for run in runs)
        assert f"difference of {part} AUC" in page.text and f"{high - low:+.4f}" in page.text


def test_a_page_of_one_run_replaces_one_of_several(run_folders, tmp_path, capsys):
    (tmp_path / "auc_batch_size.png").write_text("of an earlier report")
    (tmp_path / "mine.txt").write_text("mine")
    status, said = report(capsys, run_folders / "b256", "--out", tmp_path)
    # Pictures that do not apply to a single run are left to the page.
    assert status == 0 and "AUC against batch size" not in said
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "AUC against batch size: Finished runs of at least two batch sizes" in Page(text).text
    assert "<td>optim.embedding.clip.threshold</td><td>null</td>" in text
    assert '<td>deepfm</td><td class="number">256</td>' in text
    assert not (tmp_path / "auc_batch_size.png").exists()
    assert (tmp_path / "mine.txt").read_text() == "mine"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_only_the_best_of_many_runs_are_drawn(runs):
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


def written(name, text):
    return lambda run: (run / name).write_text(text)


@pytest.mark.parametrize(
    "damage, sentence",
    [
        (shutil.rmtree, "no such run folder; write a run folder such as"),
        (lambda run: (run / "config.yaml").unlink(), "neither it nor a folder in it has a config"),
        (written("config.yaml", "a: 1\n"), "train.batch_size is missing"),
        (written("summary.json", "{"), "summary.json: damaged"),
        (written("summary.json", "{}"), "summary.json: damaged (no 'auc'); delete it to show"),
        (written("metrics.jsonl", '{"kind": "train", "step": 1}\n'), "damaged (no 'loss')"),
        (written("metrics.jsonl", '{"kind": "train"\n'), "metrics.jsonl: damaged (line 1: "),
        (written("metrics.jsonl", "[]\n"), "metrics.jsonl: damaged ("),
    ],
)
def test_mistakes(run_folders, tmp_path, capsys, damage, sentence):
    run, out = tmp_path / "run", tmp_path / "out"
    shutil.copytree(run_folders / "b256", run, ignore=shutil.ignore_patterns("checkpoints"))
    damage(run)
    status, said = report(capsys, run, "--out", out)
    assert status == 2 and said.count("error: ") == 1
    assert sentence in said and not out.exists()


def test_a_folder_that_cannot_be_written(run_folders, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    status, said = report(capsys, run_folders / "b256", "--out", tmp_path / "file/out")
    assert status == 2 and "choose another folder with --out" in said


def test_periods_of_a_log_have_a_table_and_a_picture(run_folders, tmp_path, capsys):
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
    # The first period was scored by an untrained model.
    assert "<td>day_2.csv</td>" in text and "0.7000" in text and "0.6000" not in text
    assert (out / "periods_auc.png").exists()
    # A later report without periods deletes the picture and does not mention it.
    report(capsys, run_folders / "b256", "--out", out)
    assert not (out / "periods_auc.png").exists()
    assert "AUC of each period" not in (out / "report.html").read_text(encoding="utf-8")
