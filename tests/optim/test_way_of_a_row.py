"""Follows the calls of a step from the loss to the updated rows, as the manual draws them."""

import re
import sys
from collections import Counter
from pathlib import Path

import pytest

from stampede.engine.reading import Reader
from stampede.engine.step import prefetch, train_step
from support.checkpoints import small_job
from support.paths import ROOT

PAGE = (ROOT / "docs/how-it-works.md").read_text(encoding="utf-8")
DRAWING, BESIDE = re.search(r"```\n(train_step.*?)```\n\n(Beside.*?)\n\n", PAGE, re.S).groups()
DRAWN = re.findall(r"^[ |-]*([\w.]+) +(\S+\.py) ", DRAWING, re.M)
# On one rank nothing is added up between ranks.
NAMED = [(file, name.split(".")[-1]) for name, file in DRAWN if name != "Reduction"]
FILES = {file for file, _ in NAMED}


def calls_of_a_step(folder, *overrides):
    """Calls in our files during a step, `(file, function)`, and how many arrays its tables have."""
    calls = []

    def note(frame, event, _):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT) and ".venv" not in path.parts:
            calls.append((str(path.resolve().relative_to(ROOT)), frame.f_code.co_name))

    with small_job(folder, *overrides) as (here, job, config, dataset, _):
        batches = prefetch(Reader(config, dataset, here).training(), job.front, here.device)
        for step in (1, 2):
            train_step(job, next(batches), step, here)
        sent = next(batches)
        sys.setprofile(note)
        try:
            train_step(job, sent, 3, here)
        finally:
            sys.setprofile(None)
        (tables,) = job.model.module.front.ebc.cowclip_tables()
        return calls, len(tables.arrays)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides, beside",
    [
        ([], ()),
        (["optim.embedding.rows=touched"], ()),
        # Parts of rows are measured, and added up, before they take their step.
        (["sharding.plan=column_wise"], ("optim/backends/torch.py", "optim/sharded/reduction.py")),
    ],
)
def test_each_function_runs_once_and_no_other_file_takes_part(tmp_path, overrides, beside):
    calls, arrays = calls_of_a_step(tmp_path, *overrides)
    # Of 26 tables one array, or one for each of the three parts of each.
    assert arrays == (3 * 26 if "sharding.plan=column_wise" in overrides else 1)
    found, once = Counter(calls), {}
    for file, name in NAMED:
        once[file, name] = arrays if file == "optim/backends/cpu.py" else 1
    assert {call: found[call] for call in once} == once
    # The drawing's order: where each is called first.
    places = [calls.index(call) for call in NAMED]
    assert places == sorted(places)
    first, last = places[1], calls.index(("engine/step.py", "average_gradients_"))
    taking_part = {file for file, _ in calls[first:last] if file.startswith(("optim", "engine"))}
    allowed = {*re.findall(r"`(optim/[\w/]+\.py)`", BESIDE.partition("What is measured")[0])}
    assert taking_part <= FILES | allowed | {*beside, "engine/watching/heartbeat.py"}
    # With the C++ of `optim/native`, six.
    assert len(FILES) == 5
