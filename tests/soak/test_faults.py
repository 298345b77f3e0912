"""Runs that meet a fault end with a sentence and a status, and go on once it is mended.

`make soak` injects hundreds of faults, `make slow` a tenth of them.
"""

import pytest

from support.soak.cases import Base
from support.soak.disturbances import may_mount
from support.soak.faults import KINDS
from support.soak.injecting import inject
from support.soak.results import write_results

pytestmark = pytest.mark.slow

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


def cases():
    """A tenth of the times of each kind, and the times of the soak."""
    for name, kind in KINDS.items():
        yield pytest.param(name, -(-kind.times // 10), id=name)
        yield pytest.param(name, kind.times, id=f"{name}, soak", marks=pytest.mark.soak)


def test_the_soak_is_long_enough():
    assert sum(kind.times for kind in KINDS.values()) >= 200


@pytest.mark.parametrize("name, times", cases())
def test_fault(base, name, times):
    kind = KINDS[name]
    if kind.needs_disk and not may_mount(base.folder):
        pytest.skip("this user may not mount a disk")
    outcomes, failures = [], []
    for number in range(times):
        try:
            outcomes.append(inject(kind, base, f"{name} {number}"))
        except AssertionError as failure:
            failures.append(f"{name} {number}: {str(failure)[-3000:]}")
    if outcomes and times == kind.times:
        RESULTS[name] = {
            "injected": times,
            "ended as expected": len(outcomes),
            "steps done again at most": max(outcome.again for outcome in outcomes),
            "longest seconds": round(max(outcome.seconds for outcome in outcomes), 1),
        }
    assert not failures, "\n\n".join(failures)
