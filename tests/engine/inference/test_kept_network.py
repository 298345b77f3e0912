"""A run keeps the file of its network, and refuses another one."""

import pytest

from stampede.engine import export, predict
from stampede.engine.errors import RunFolderError
from stampede.engine.run import run
from support.jobs import run_small, small_config
from support.own_networks import NUMBERS_ONLY, own_network
from support.predicting import refused, scores

ALLOWED = "--allow-import"
FLIPPED = NUMBERS_ONLY.replace("return self", "return -self")


@pytest.fixture
def network(tmp_path):
    """Overrides of a run in `small`, which has been trained."""
    overrides = own_network(tmp_path, "numbers_only", NUMBERS_ONLY)
    run_small(tmp_path, overrides)
    return overrides


def check_refusals(tmp_path, words):
    """What the commands that use the run say."""
    folder = tmp_path / "small"
    for main, arguments in (
        (predict.main, ["@run", tmp_path / "s.parquet"]),
        (export.main, [tmp_path / "package"]),
    ):
        said = refused(main, tmp_path, folder, *arguments, ALLOWED)
        assert str(tmp_path / "own.py") in said and str(folder / "network.py") in said
        assert words in said


@pytest.mark.slow
def test_a_file_that_has_changed_is_refused_and_not_executed(tmp_path, network):
    own, folder = tmp_path / "own.py", tmp_path / "small"
    before = scores(folder, ["@run"], tmp_path, ALLOWED)
    own.write_text(FLIPPED + f"\nopen({str(tmp_path / 'executed')!r}, 'w')\n")
    check_refusals(tmp_path, "own.py has changed since")
    assert not (tmp_path / "executed").exists()
    own.write_text(FLIPPED)
    with pytest.raises(RunFolderError, match=r"own.py has changed since .*small was trained"):
        run_small(tmp_path, [*network, "train.epochs=2", "checkpoint.resume=auto"])
    own.write_bytes((folder / "network.py").read_bytes())
    assert scores(folder, ["@run"], tmp_path, ALLOWED).equals(before)
    # Runs of older versions kept no copy; they are used unchecked, and keep one when continued.
    (folder / "network.py").unlink()
    assert scores(folder, ["@run"], tmp_path, ALLOWED).equals(before)
    run_small(tmp_path, [*network, "train.epochs=2", "checkpoint.resume=auto"])
    assert (folder / "network.py").read_text() == NUMBERS_ONLY


@pytest.mark.slow
def test_a_file_that_is_gone(tmp_path, network):
    (tmp_path / "own.py").rename(tmp_path / "renamed.py")
    check_refusals(tmp_path, "is missing; the run has a copy")
    # The same file may be in another place.
    moved = [f"model.import={tmp_path}/renamed.py", *network[1:]]
    run_small(tmp_path, [*moved, "train.epochs=2", "checkpoint.resume=auto"])
    assert len(scores(tmp_path / "small", ["@run"], tmp_path, ALLOWED))


def test_the_executed_file_is_kept_even_if_it_changes_meanwhile(tmp_path):
    network = own_network(tmp_path, "numbers_only", NUMBERS_ONLY)
    config = small_config(tmp_path, *network)
    (tmp_path / "own.py").write_text(FLIPPED)
    run(config)
    assert (tmp_path / "small/network.py").read_text() == NUMBERS_ONLY
    # A run that begins again keeps what it executes.
    for path in (tmp_path / "small/checkpoints").iterdir():
        path.rename(tmp_path / path.name)
    (tmp_path / "small/summary.json").unlink()
    run_small(tmp_path, [*network, "checkpoint.resume=auto"])
    assert (tmp_path / "small/network.py").read_text() == FLIPPED
