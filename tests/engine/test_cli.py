"""The command `stampede` and the launcher."""

import os
import signal
import subprocess
import sys
from importlib import metadata

import pytest
import torch

from stampede.engine import cli
from stampede.engine.config import config_type
from stampede.settings import all_keys
from support.jobs import SMALL
from support.paths import ROOT
from support.predicting import run_command
from support.waiting import HANG

COMMANDS = [
    "apply", "describe", "export", "importance", "incremental", "predict", "prepare", "report",
    "sweep", "synthetic", "train", "tune",
]  # fmt: skip


def said(main, *arguments):
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as end:
        return end.code


def test_the_launchers_help_is_the_same_but_for_its_name(capsys):
    assert said(cli.main, "--help") == 0
    launcher = capsys.readouterr().out
    assert said(cli.stampede, "train", "--help") == 0
    assert capsys.readouterr().out == launcher.replace("python launch.py", "stampede train")
    for word in ("configs/quickstart.yaml", "section.key=value", "torchrun", "run.name = ''",
                 "train.epochs = null", "--help all"):  # fmt: skip
        assert word in launcher
    lines = launcher.splitlines()
    assert len(lines) < 60 and max(map(len, lines)) <= 100
    # A file asks for no key.
    assert said(cli.main, "--help", "configs/quickstart.yaml") == 0
    assert capsys.readouterr().out == launcher


def test_the_help_on_keys(capsys):
    keys = [key.path for key in all_keys(config_type())]

    def shown(topic):
        assert said(cli.main, "--help", topic) == 0
        printed = capsys.readouterr().out
        assert max(map(len, printed.splitlines())) <= 100
        return [line.split()[0] for line in printed.splitlines() if line[2] != " "]

    assert shown("all") == keys
    assert shown("train.epochs") == shown("train.epochs=3") == ["train.epochs"]
    assert shown("optim.dense") == [key for key in keys if key.startswith("optim.dense.")]
    assert set(shown("lr")) == {"optim.embedding.lr", "optim.dense.lr"}
    for wrong, meant in (
        ("train.epoch", "'train.epochs'"),
        ("trian.epochs", "'train.epochs'"),
        ("clipp", "'optim.embedding.clip'"),
    ):
        assert said(cli.main, "--help", wrong) == 2
        told = capsys.readouterr()
        assert not told.out and f"did you mean {meant}?" in told.err
        assert shown(meant.strip("'"))
    assert said(cli.main, "--help", "zzz") == 2
    told = capsys.readouterr().err
    assert "write all, a key such as train.epochs, or one of preset, recipe, run" in told


@pytest.mark.parametrize(
    "asked, unbuffered",
    [(["--help", "all"], ""), (["configs/quickstart.yaml", "--print-config"], "1")],
)
def test_a_reader_that_has_enough(asked, unbuffered):
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "launch.py", *asked],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        timeout=HANG,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_the_overview_names_every_command_and_each_has_a_help(capsys):
    for arguments in ([], ["--help"], ["-h"]):
        assert cli.stampede(arguments) == 0
        shown = capsys.readouterr().out
        names = [line.split()[0] for line in shown.splitlines() if line.startswith("  ")]
        assert sorted(names) == sorted(COMMANDS)
    for name in COMMANDS:
        assert said(cli.stampede, name, "--help") == 0
        shown = capsys.readouterr().out
        assert shown.startswith(f"usage: stampede {name} ") and "python -m" not in shown
    assert cli.stampede(["--version"]) == 0
    assert capsys.readouterr().out == f"stampede {metadata.version('stampede')}\n"


def test_an_unknown_command_or_option_is_refused(capsys):
    assert cli.stampede(["trian"]) == 2
    told = capsys.readouterr()
    assert not told.out and "no command 'trian'; did you mean 'train'?" in told.err
    assert said(cli.main, "configs/quickstart.yaml", "--prnt-config") == 2
    assert "unknown option --prnt-config" in capsys.readouterr().err


def test_ctrl_c_while_data_are_prepared(monkeypatch, tmp_path, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("stampede.engine.run.open_dataset", interrupted)
    job = [ROOT / "configs/quickstart.yaml", f"run.dir={tmp_path}"]
    assert said(cli.stampede, "train", *job) == 130
    # The message promises no checkpoint.
    assert "from the newest checkpoint, or from scratch if there is none" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments, words",
    [
        (["absent.yaml"], "absent.yaml: no such file; `python launch.py --help` lists"),
        (["configs/criteo_kaggle.yaml"], "data.path is not given"),
        (["configs/criteo_kaggle.yaml", "data.path=absent.tsv"], "absent.tsv: no such file"),
        (["configs/quickstart.yaml", "run.device=cuda"], "run.device"),
        (["configs/quickstart.yaml", "run.dir=/proc/none", *SMALL], "/proc/none"),
    ],
)
def test_mistakes_get_a_sentence_and_status_2(arguments, words, monkeypatch):
    if "run.device=cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.chdir(ROOT)
    status, told = run_command(cli.main, *arguments)
    assert status == 2
    assert words in told


@pytest.mark.parametrize(
    "command", [["launch.py"], ["-m", "stampede", "train"]], ids=["launcher", "module"]
)
def test_a_mistake_is_one_sentence_and_nothing_else(command):
    wrong = [sys.executable, *command, "configs/quickstart.yaml", "train.epoch=2"]
    done = subprocess.run(wrong, cwd=ROOT, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 2 and "train.epoch" in done.stderr
    assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr


def test_a_help_or_a_wrong_path_does_not_import_torch(tmp_path):
    (tmp_path / "schema.yaml").write_text("{label: click, numbers: [price], ids: [shop]}")
    paths = f"data.path={tmp_path}/no.csv data.schema_file={tmp_path}/schema.yaml"
    wrong = [
        "train configs/criteo_kaggle.yaml data.path=no.txt",
        f"train configs/table.yaml {paths.replace('schema.yaml', 'no.yaml')}",
        f"train configs/table.yaml {paths}",
    ]
    program = f"""
import sys
from contextlib import suppress
from stampede.engine.cli import stampede
for command in {COMMANDS}:
    with suppress(SystemExit):
        stampede([command, "--help"])
for arguments in {wrong}:
    assert stampede(arguments.split()) == 2
assert not {{"torch", "matplotlib"}} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert [line.rpartition(": no such")[0] for line in done.stderr.splitlines()] == [
        "error: no.txt", f"error: {tmp_path}/no.yaml", f"error: {tmp_path}/no.csv"
    ]  # fmt: skip


ENDS = """
import atexit, sys, threading, time
from stampede.engine.start_up import as_process
class Long:
    def __del__(self): print("freed")
def command():
    kept.append(Long())
    atexit.register(print, "at exit")
    threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
    {what}
kept = []
as_process(command)
"""


@pytest.mark.parametrize(
    ("what", "status", "words"),
    [
        ("return 3", 3, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(2)", 2, ""),
        ("sys.exit('a sentence')", 1, "a sentence"),
        ("raise KeyError('traced')", 1, "traced"),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt"),
    ],
)
def test_a_process_ends_as_others_do_but_frees_nothing(what, status, words):
    program = [sys.executable, "-c", ENDS.format(what=what)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=HANG)
    assert (done.returncode, done.stdout) == (status, "thread\nat exit\n")
    assert words in done.stderr


def test_output_that_is_lost_is_an_error():
    program = [sys.executable, "-c", ENDS.format(what="return 0")]
    buffered = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        done = subprocess.run(program, stdout=full, env=buffered, timeout=HANG)
    assert done.returncode == 120
    # A reader such as `head` has enough.
    reader, writer = os.pipe()
    os.close(reader)
    assert subprocess.run(program, stdout=writer, env=buffered, timeout=HANG).returncode == 141
    os.close(writer)
    # Some daemons close it.
    closed = [sys.executable, "-c", "import sys; sys.stdout = None\n" + program[-1].replace(
        "print, ", "list, ").replace("print(\"thread\")", "0")]  # fmt: skip
    assert subprocess.run(closed, timeout=HANG).returncode == 0
