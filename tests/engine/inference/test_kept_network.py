"""A run knows the file of its network again."""

import pytest

from stampede.engine import export
from stampede.engine.errors import RunFolderError
from stampede.engine.run import run
from stampede.models.registry import _NETWORKS
from support.jobs import run_small, small_config
from support.own_networks import NUMBERS_ONLY, own_network
from support.predicting import predict, run_command, scores

ALLOWED = "--allow-import"
FLIPPED = NUMBERS_ONLY.replace("return self", "return -self")


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """Networks that are registered during a test are gone after it."""
    monkeypatch.setattr("stampede.models.registry._NETWORKS", dict(_NETWORKS))


@pytest.fixture
def network(tmp_path):
    """Overrides of a run that was trained in `small`."""
    overrides = own_network(tmp_path, "numbers_only", NUMBERS_ONLY)
    run_small(tmp_path, overrides)
    return overrides


def refused(tmp_path):
    """What the commands that use the run say."""
    folder = tmp_path / "small"
    for status, said in (
        predict(folder, "@run", tmp_path / "s.parquet", ALLOWED),
        run_command(export.main, folder, tmp_path / "package", ALLOWED),
    ):
        assert status == 2 and said.count("error: ") == 1
        assert str(tmp_path / "own.py") in said and str(folder / "network.py") in said
        yield said
    assert not (tmp_path / "package").exists() and not (tmp_path / "s.parquet").exists()


@pytest.mark.slow
def test_a_file_that_has_changed_is_refused_and_not_executed(tmp_path, network):
    own, folder = tmp_path / "own.py", tmp_path / "small"
    before = scores(folder, ["@run"], tmp_path, ALLOWED)
    (tmp_path / "scores.parquet").unlink()
    own.write_text(FLIPPED + f"\nopen({str(tmp_path / 'executed')!r}, 'w')\n")
    for said in refused(tmp_path):
        assert "own.py has changed since" in said
    assert not (tmp_path / "executed").exists()
    own.write_text(FLIPPED)
    with pytest.raises(RunFolderError, match=r"own.py has changed since .*small was trained"):
        run_small(tmp_path, [*network, "train.epochs=2", "checkpoint.resume=auto"])
    own.write_bytes((folder / "network.py").read_bytes())
    assert scores(folder, ["@run"], tmp_path, ALLOWED).equals(before)
    # Runs of older versions kept no copy; they are used as they are, and keep one then.
    (folder / "network.py").unlink()
    assert scores(folder, ["@run"], tmp_path, ALLOWED).equals(before)
    run_small(tmp_path, [*network, "train.epochs=2", "checkpoint.resume=auto"])
    assert (folder / "network.py").read_text() == NUMBERS_ONLY


@pytest.mark.slow
def test_a_file_that_is_gone(tmp_path, network):
    (tmp_path / "own.py").rename(tmp_path / "renamed.py")
    for said in refused(tmp_path):
        assert "is missing; the run has a copy" in said
    # The same in another place is the same.
    moved = [f"model.import={tmp_path}/renamed.py", *network[1:]]
    run_small(tmp_path, [*moved, "train.epochs=2", "checkpoint.resume=auto"])
    assert predict(tmp_path / "small", "@run", tmp_path / "s.parquet", ALLOWED)[0] == 0


def test_what_was_executed_is_kept_whatever_became_of_the_file(tmp_path):
    config = small_config(tmp_path, *own_network(tmp_path, "numbers_only", NUMBERS_ONLY))
    (tmp_path / "own.py").write_text(FLIPPED)
    run(config)
    assert (tmp_path / "small/network.py").read_text() == NUMBERS_ONLY


def test_a_run_that_begins_anew_keeps_the_file_anew(tmp_path, network):
    (tmp_path / "own.py").write_text(FLIPPED)
    for path in (tmp_path / "small/checkpoints").iterdir():
        path.rename(tmp_path / path.name)
    (tmp_path / "small/summary.json").unlink()
    run_small(tmp_path, [*network, "checkpoint.resume=auto"])
    assert (tmp_path / "small/network.py").read_text() == FLIPPED
