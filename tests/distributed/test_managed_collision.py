"""Raw ids that are given rows, and lose them again, on one process and on several."""

import pytest

from support.managed_collision import train_all
from support.ranks import run_ranks

pytestmark = pytest.mark.slow

# Small tables evict in every step, with rows that wait for their steps; where each rank's part is
# of 65,536 rows, they wait without being told.
RUNS = [
    (way, (pooled, rows, moved, by_hand))
    for way, rows, by_hand in (
        ("waiting", 64, False),
        ("waiting", 64, True),
        (None, 1 << 17, False),
    )
    for pooled in (True, False)
    for moved in ("all", "touched")
]


@pytest.mark.parametrize("count", [1, 2])
def test_every_id_has_one_row_and_rows_follow_the_equations(count):
    ranks = run_ranks(count, train_all, RUNS)
    for (_, (_, _, moved, _)), *found in zip(RUNS, *ranks, strict=True):
        assert all(one["mapped"] == found[0]["mapped"] for one in found)
        assert len(set(found[0]["mapped"]["feature_0"])) > 10
        assert all(one["deviation"] < 1e-4 for one in found)
        assert found[0]["waited"] == (moved == "all")
