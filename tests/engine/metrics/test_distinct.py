"""Equal scores are added up within their group, wherever the chunks end."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from stampede.engine.metrics.distinct import distinct_scores
from stampede.engine.metrics.grouped import GroupedSums
from stampede.engine.metrics.keys import pack

SAMPLES = st.lists(
    st.tuples(st.integers(0, 2), st.integers(-1, 1), st.booleans(), st.integers(0, 3)),
    min_size=1,
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(SAMPLES, st.booleans(), st.booleans(), st.lists(st.integers(0, 40), max_size=6))
def test_against_a_count_of_each(samples, grouped, weighted, cuts):
    group, score, label, weight = (np.array(column) for column in zip(*samples, strict=True))
    weight = weight if weighted else np.ones_like(weight)
    records = pack(score, label, weight)[None]
    if grouped:
        records = np.concatenate([group.astype(np.uint64)[None], records])
    else:
        group = np.zeros_like(group)
    records = records[:, np.lexsort(records[::-1])]
    chunks = [c for c in np.split(records, sorted(cuts), axis=1) if c.shape[1]]
    found = [
        tuple(value.item() for value in row)
        for scores in distinct_scores(chunks, weighted)
        for row in zip(*scores, strict=True)
    ]
    expected = []
    for g, s in sorted({*zip(group.tolist(), score.tolist(), strict=True)}, key=highest_first):
        rows = (group == g) & (score == s)
        positives = weight[rows & label].sum()
        expected.append((g, s, rows.sum(), positives, weight[rows].sum() - positives))
    assert found == expected


def highest_first(entry):
    return entry[0], -entry[1]


def test_groups_that_meet_at_a_score_stay_two():
    records = np.stack([np.array([4, 4, 5, 5], np.uint64), pack(np.ones(4), np.array([0, 1] * 2))])
    sums = GroupedSums()
    for scores in distinct_scores([records], weighted=False):
        sums.add(scores)
    assert sums.finish() == 0.5 and sums.groups == 2
