"""Prepared rows with several ids, numbers and weights, for models beside a run."""

import numpy as np

from stampede.data.prepared.reader import open_prepared
from support.prepared import drawn_fields, drawn_rows, write_prepared

VOCABULARY = 60


def drawn(rows, seed):
    """Rows whose clicks follow their ids and numbers; validation and test have unseen ids."""
    arrays = drawn_rows(rows, multi=1, weight=True, vocabulary=VOCABULARY, seed=seed)
    if seed == 0:
        # The training part lacks the last ids.
        for name in ("ids", "values_0"):
            arrays[name] = np.minimum(arrays[name], VOCABULARY - 10)
    arrays["numbers"][:, 0] = np.log1p(arrays["numbers"][:, 0])
    truth = np.random.default_rng(9).normal(0, 0.7, VOCABULARY)
    logits = truth[arrays["ids"]].sum(1) + arrays["numbers"][:, 1] - 1
    logits += dense(arrays)[:, -VOCABULARY:] @ truth[::-1]
    draw = np.random.default_rng(seed + 100)
    arrays["label"] = (draw.random(rows) < 1 / (1 + np.exp(-logits))).astype(np.uint8)
    return arrays


def dense(arrays):
    """Counts of every field's ids, `[rows, numbers + fields * vocabulary]`."""
    counts = np.zeros((len(arrays["label"]), VOCABULARY))
    sample = np.repeat(np.arange(len(counts)), np.diff(arrays["offsets_0"]))
    np.add.at(counts, (sample, arrays["values_0"]), 1)
    columns = [np.eye(VOCABULARY)[ids] for ids in arrays["ids"].T]
    return np.concatenate([arrays["numbers"], *columns, counts], 1)


def opened(folder, parts, **options):
    fields = drawn_fields(multi=1, vocabulary=VOCABULARY)
    return open_prepared(write_prepared(folder, parts, fields, **options))
