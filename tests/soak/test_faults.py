"""Runs that meet a fault end with a sentence and a status, and go on once it is mended.

`make soak` injects hundreds of faults, `make slow` one of each of two kinds.
"""

import pytest

from support.soak.disturbances import may_mount
from support.soak.faults import KINDS, Base, inject
from support.soak.runs import write_results

RESULTS = {}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The run that faults happen to; results are written if the soak was whole."""
    base = Base(tmp_path_factory.mktemp("faults"))
    RESULTS.clear()
    yield base
    base.close()
    if RESULTS.keys() == KINDS.keys():
        write_results("faults_soak", "fault", RESULTS)


def test_the_soak_is_long_enough():
    assert sum(kind.times for kind in KINDS.values()) >= 200


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "bit of a checkpoint flipped"])
def test_one_fault(base, name):
    inject(KINDS[name], base, f"{name} 0")


@pytest.mark.soak
@pytest.mark.parametrize("name", KINDS)
def test_faults(base, name):
    kind = KINDS[name]
    if kind.needs_disk and not may_mount(base.folder):
        pytest.skip("this user may not mount a disk")
    outcomes, failures = [], []
    for number in range(kind.times):
        try:
            outcomes.append(inject(kind, base, f"{name} {number}"))
        except AssertionError as failure:
            failures.append(f"{name} {number}: {str(failure)[-3000:]}")
    if outcomes:
        RESULTS[name] = {
            "injected": kind.times,
            "ended as expected": len(outcomes),
            "steps done again at most": max(outcome.again for outcome in outcomes),
            "longest seconds": round(max(outcome.seconds for outcome in outcomes), 1),
        }
    assert not failures, "\n\n".join(failures)
