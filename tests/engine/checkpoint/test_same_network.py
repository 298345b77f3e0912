"""Another network than was trained is told from a damaged checkpoint."""

import pytest

from stampede.engine.errors import RunFolderError
from stampede.models.registry import _NETWORKS
from support.jobs import run_small
from support.other_network import OWN, refusal
from support.predicting import predict
from support.ranks import run_ranks

# What becomes of the file, and what is said.
EDITS = {
    "width": ("4", "6", r"network.first.\w+ is \[4.*\] in the checkpoint, \[6.*\] now"),
    "renamed": ("last", "end", r"network.end.\w+ \[1.*\] is not in the checkpoint"),
    "removed": ("scale", None, r"network.scale.\w+ \[4\] is in the checkpoint only"),
}


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """Networks that are registered during a test are gone after it."""
    monkeypatch.setattr("stampede.models.registry._NETWORKS", dict(_NETWORKS))


@pytest.fixture
def own(tmp_path):
    """Overrides of a run that was trained, which has no copy of the file."""
    (tmp_path / "own.py").write_text(OWN)
    overrides = [f"model.import={tmp_path}/own.py", "model.name=own_layers"]
    run_small(tmp_path, overrides)
    (tmp_path / "small/network.py").unlink(missing_ok=True)
    return overrides


def edit(path, old, new):
    text = OWN
    if new is None:
        # The layer is gone, and what called it.
        text = text.replace("        self.scale = nn.LayerNorm(4)\n", "")
        old, new = "self.scale(self.first(inputs))", "self.first(inputs)"
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize("case", EDITS)
def test_an_edited_file(tmp_path, own, case):
    old, new, said = EDITS[case]
    edit(tmp_path / "own.py", old, new)
    goes_on = [*own, "train.epochs=2", "checkpoint.resume=auto"]
    pattern = rf"(?s)not the one that was trained \({said}\).*is not damaged"
    with pytest.raises(RunFolderError, match=pattern):
        run_small(tmp_path, goes_on)
    # The checkpoint was left where it is.
    (tmp_path / "own.py").write_text(OWN)
    run_small(tmp_path, goes_on)


def test_an_edited_configuration(tmp_path):
    run_small(tmp_path, [])
    config = tmp_path / "small/config.yaml"
    text = config.read_text()
    for old, new, name in (
        ("- 16\n  - 16\n", "- 16\n  - 8\n", "network.mlp."),
        ("  dim: 10\n", "  dim: 7\n", "front.ebc"),
    ):
        assert text.count(old) == 1
        config.write_text(text.replace(old, new))
        status, said = predict(tmp_path / "small", "@run", tmp_path / "s.parquet")
        assert status == 2 and "the network is not the one that was trained" in said
        assert name in said and "delete" not in said


def test_all_ranks_say_so(tmp_path, own):
    edit(tmp_path / "own.py", *EDITS["width"][:2])
    overrides = [*own, "train.epochs=2", "checkpoint.resume=auto", "sharding.plan=table_wise"]
    said = run_ranks(2, refusal, tmp_path, overrides, 2)
    assert "is not the one that was trained" in said[0] and said[0] == said[1]
