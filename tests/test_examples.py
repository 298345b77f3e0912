"""The programs in examples/ run as they are, and learn."""

import copy
import functools
import re

import pytest

from support.forked import ended, run_program, torchrun
from support.paths import ROOT
from support.waiting import HANG

EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))


@functools.cache
def output_of(name, processes=None):
    """What an example prints, alone or under torchrun; each is run once."""
    program = ROOT / "examples" / name
    if processes is None:
        done = run_program(program, [], ROOT, HANG)
    else:
        done = ended(torchrun(program, [], processes), HANG)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def losses_in(output):
    return [float(loss) for loss in re.findall(r"loss.*?(\d+\.\d+)", output)]


@pytest.mark.wide
@pytest.mark.parametrize("name", EXAMPLES)
def test_it_learns(name):
    losses = losses_in(output_of(name))
    assert len(losses) >= 2 and losses[-1] < losses[0] - 0.05


@pytest.mark.slow
def test_torchrec_training_learns_on_two_processes_too(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    losses = losses_in(output_of("torchrec_training.py", processes=2))
    # Printed by one of them.
    assert len(losses) == 2 and losses[1] < losses[0] - 0.05
    # Other clicks, of other ranks: it ran on two.
    assert losses != losses_in(output_of("torchrec_training.py"))


@pytest.mark.slow
def test_plain_pytorch_comes_close_to_the_truth():
    # The entropy of the clicks themselves is about 0.46, that of a coin 0.69.
    assert losses_in(output_of("plain_pytorch.py"))[-1] < 0.53


@pytest.mark.wide
def test_the_notebook_runs_and_shows_no_warnings(tmp_path):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    (tmp_path / "examples").mkdir()
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    shipped = nbformat.read(ROOT / "examples/quickstart.ipynb", 4)
    notebook = nbformat.from_dict(copy.deepcopy(shipped))
    for cell in notebook.cells:
        # A tenth of the rows.
        cell.source = cell.source.replace("60_000", "6_000").replace("20_000", "2_000")
    nbclient.NotebookClient(
        notebook,
        timeout=HANG,
        kernel_name="python3",
        resources={"metadata": {"path": tmp_path / "examples"}},
        coalesce_streams=True,
    ).execute()
    for cell, shown in zip(notebook.cells, shipped.cells, strict=True):
        if cell.cell_type == "code":
            bars = [one for one in cell.outputs if one.get("name") == "stderr"]
            kinds = [one.output_type for one in cell.outputs if one not in bars]
            assert kinds == [one.output_type for one in shown.outputs]
            for told in bars:
                assert not re.search("warning|IProgress|torchrec|Traceback", told.text, flags=re.I)
    assert "score" in notebook.cells[-1].outputs[-1].data["text/plain"]
