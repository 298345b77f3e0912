"""The command `stampede`, beside the launcher and the modules."""

import subprocess
import sys
from importlib import metadata

import pytest

from stampede.data.apply import main as apply
from stampede.data.describe import main as describe
from stampede.data.prepare import main as prepare
from stampede.data.synthetic import main as synthetic
from stampede.engine import cli
from stampede.engine.export import main as export
from stampede.engine.incremental import main as incremental
from stampede.engine.predict import main as predict
from stampede.engine.report.__main__ import main as report
from stampede.engine.sweep.__main__ import main as sweep
from support.paths import ROOT
from support.waiting import HANG

COMMANDS = {
    "apply": apply,
    "describe": describe,
    "export": export,
    "incremental": incremental,
    "predict": predict,
    "prepare": prepare,
    "report": report,
    "sweep": sweep,
    "synthetic": synthetic,
    "train": lambda arguments: cli.main(arguments, "stampede train"),
}


def said(main, *arguments):
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as end:
        return end.code


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_is_that_of_the_module(name, capsys):
    assert said(COMMANDS[name], "--help") == 0
    of_module = capsys.readouterr().out
    assert said(cli.stampede, name, "--help") == 0
    shown = capsys.readouterr().out
    assert shown == of_module
    assert shown.startswith(f"usage: stampede {name} ")
    assert "python -m" not in shown


def test_ctrl_c_while_data_are_prepared(monkeypatch, tmp_path, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("stampede.engine.run.open_dataset", interrupted)
    job = [ROOT / "configs/quickstart.yaml", f"run.dir={tmp_path}"]
    assert said(cli.stampede, "train", *job) == 130
    # No checkpoint is promised.
    assert "from the newest checkpoint, or from scratch if there is none" in capsys.readouterr().out


def test_the_launchers_help_is_the_same_but_for_its_name(capsys):
    assert said(cli.main, "--help") == 0
    launcher = capsys.readouterr().out
    assert said(cli.stampede, "train", "--help") == 0
    assert capsys.readouterr().out == launcher.replace("python launch.py", "stampede train")
    assert "configs/quickstart.yaml" in launcher and "train.epochs = " in launcher


def test_the_overview_names_every_command(capsys):
    for arguments in ([], ["--help"], ["-h"]):
        assert cli.stampede(arguments) == 0
        shown = capsys.readouterr().out
        names = [line.split()[0] for line in shown.splitlines() if line.startswith("  ")]
        assert sorted(names) == sorted(COMMANDS)
    assert cli.stampede(["--version"]) == 0
    assert capsys.readouterr().out == f"stampede {metadata.version('stampede')}\n"


def test_a_command_that_is_none(capsys):
    assert cli.stampede(["trian"]) == 2
    shown = capsys.readouterr()
    assert not shown.out and shown.err.startswith("error: there is no command 'trian'; did you")
    assert "mean 'train'?" in shown.err


@pytest.mark.parametrize(
    "command", [["launch.py"], ["-m", "stampede.engine.cli"]], ids=["launcher", "module"]
)
def test_a_mistake_is_one_sentence_and_nothing_else(command):
    wrong = [sys.executable, *command, "configs/quickstart.yaml", "train.epoch=2"]
    done = subprocess.run(wrong, cwd=ROOT, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 2 and "train.epoch" in done.stderr
    assert done.stderr.startswith("error: ") and "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_run_imports_what_draws_only_when_it_draws():
    program = (
        "import sys, stampede.engine.run\n"
        "print(sorted({'matplotlib', 'tensorboard', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "['torch']\n", done.stderr
