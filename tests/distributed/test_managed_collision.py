"""Raw ids that are given rows, and lose them again, on one process and on several."""

import pytest

from support.managed_collision import train_all
from support.ranks import run_ranks

pytestmark = pytest.mark.slow

# Small tables evict in every step, with rows that wait for their steps; where each rank's part is
# of 65,536 rows, they wait without being told.
RUNS = [
    ("waiting", (True, 64, "all", False)),
    ("waiting", (False, 64, "touched", False)),
    ("waiting", (True, 64, "touched", True)),
    ("waiting", (False, 64, "all", True)),
    (None, (True, 1 << 17, "all", False)),
]


@pytest.mark.cases(1)
@pytest.mark.parametrize("count, runs", [(1, RUNS[:2]), (2, RUNS), (4, RUNS[1:2])])
def test_every_id_has_one_row_and_rows_follow_the_equations(count, runs):
    ranks = run_ranks(count, train_all, runs)
    for (_, (_, _, moved, _)), *found in zip(runs, *ranks, strict=True):
        assert all(one["mapped"] == found[0]["mapped"] for one in found)
        assert len(set(found[0]["mapped"]["feature_0"])) > 10
        assert found[0]["deviation"] < 1e-4
        assert found[0]["waited"] == (moved == "all")
