"""Runs that are stopped within an epoch, and what continues from there."""

import json
import signal

import pytest

from stampede.engine.errors import InterruptedRunError
from stampede.engine.processes import processes
from stampede.engine.training import evaluate as evaluation
from stampede.engine.watching import stop
from stampede.engine.watching.stop import Agreement, StopRequestedError
from support.jobs import run_small, same_end, without_times
from support.stopping import ask_to_stop, kill, run_disturbed

pytestmark = pytest.mark.slow

# 8 steps an epoch.
LONG = ["train.epochs=2", "evaluate.every=3"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    run_small(folder, LONG)
    return folder / "small"


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "action, step, saved",
    [(kill, 12, 10), (ask_to_stop, 4, 4), (ask_to_stop, 16, 16)],
)
def test_a_run_continues_from_its_newest_checkpoint(
    tmp_path, capsys, undisturbed, action, step, saved
):
    """After a kill; a signal stops it after the step, and saves it."""
    every = ["checkpoint.every_steps=5", "checkpoint.keep=100"] if action is kill else []
    stop = run_disturbed(tmp_path, [*LONG, *every], step, action)
    if action is ask_to_stop:
        assert f"SIGTERM after step {step}" in str(stop) and stop.signal == signal.SIGTERM
    run_small(tmp_path, [*LONG, *every, "checkpoint.resume=auto"])
    assert f"continuing after step {saved} from" in capsys.readouterr().out
    same_end(tmp_path / "small", undisturbed)


@pytest.mark.wide
@pytest.mark.parametrize("which, step", [(1, 3), (5, 8)])
def test_an_interrupted_evaluation_is_repeated(tmp_path, monkeypatch, undisturbed, which, step):
    evaluate, begun = evaluation.evaluate, []

    def disturbed(*arguments):
        if len(begun) == which:
            ask_to_stop()
        begun.append(arguments)
        return evaluate(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "evaluate", disturbed)
        with pytest.raises(InterruptedRunError, match=f"SIGTERM after step {step}"):
            run_small(tmp_path, LONG)
    run_small(tmp_path, [*LONG, "checkpoint.resume=auto"])
    same_end(tmp_path / "small", undisturbed)


@pytest.mark.wide
def test_checkpoints_by_the_clock(tmp_path, undisturbed):
    run_small(tmp_path, [*LONG, "checkpoint.every_minutes=1e-9", "checkpoint.keep=100"])
    same_end(tmp_path / "small", undisturbed)
    names = {path.name for path in (tmp_path / "small/checkpoints").iterdir()}
    within = {f"step_{step:08d}" for step in range(1, 16) if step != 8}
    assert names == within | {"epoch_0001", "epoch_0002"}


@pytest.mark.wide
def test_an_epoch_without_an_evaluation_can_end_with_a_checkpoint(tmp_path):
    overrides = ["train.epochs=3", "evaluate.every_epochs=3"]
    run_small(tmp_path, overrides)
    whole = without_times(tmp_path / "small")
    overrides += ["checkpoint.every_steps=8", "run.name=again"]
    run_disturbed(tmp_path, overrides, 10, kill)
    run_small(tmp_path, [*overrides, "checkpoint.resume=auto"])
    assert without_times(tmp_path / "again") == whole


def test_a_second_signal_ends_at_once_unless_it_is_torchruns_copy(monkeypatch):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with processes("cpu") as here, (agreement := Agreement(here)).noting_signals():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.raise_signal(number)
        with pytest.raises(StopRequestedError, match="SIGINT"):
            agreement.after(1)
        monkeypatch.setattr(stop, "_ONE_REQUEST_SECONDS", 0.0)
        with pytest.raises(SystemExit) as end:
            signal.raise_signal(signal.SIGTERM)
    assert end.value.code == 128 + signal.SIGTERM
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_continued_run_may_have_fewer_epochs_than_already_begun(tmp_path):
    overrides = ["train.epochs=5", "evaluate.every_epochs=5"]
    run_disturbed(tmp_path, overrides, 10)
    run_small(tmp_path, ["train.epochs=1", *overrides[1:], "checkpoint.resume=auto"])
    summary = json.loads((tmp_path / "small/summary.json").read_text())
    assert summary["steps"] == 10 and summary["auc"] > 0
