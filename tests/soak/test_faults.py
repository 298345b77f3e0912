"""Runs that meet a fault end with a sentence and a status, and go on once it is mended.

`make soak` injects hundreds of faults, `make slow` one of each of two kinds.
"""

import pytest

from support.faults import KINDS, Base, inject
from support.soak import write_results

RESULTS = {}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The run that faults happen to; results are written if the soak was whole."""
    RESULTS.clear()
    yield Base(tmp_path_factory.mktemp("faults"))
    if RESULTS.keys() == KINDS.keys():
        write_results("faults_soak", "fault", RESULTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "checkpoint damaged"])
def test_one_fault(base, name):
    inject(KINDS[name], base, f"{name} 0")


@pytest.mark.soak
@pytest.mark.parametrize("name", KINDS)
def test_faults(base, name):
    times, outcomes, failures = KINDS[name].times, [], []
    for number in range(times):
        try:
            outcomes.append(inject(KINDS[name], base, f"{name} {number}"))
        except AssertionError as failure:
            failures.append(f"{name} {number}: {str(failure)[-3000:]}")
    assert not failures, "\n\n".join(failures)
    again, seconds = map(max, zip(*outcomes, strict=True))
    RESULTS[name] = {
        "injected": times,
        "ended as expected": len(outcomes),
        "steps done again at most": again,
        "longest seconds": round(seconds, 1),
    }
