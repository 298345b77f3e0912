"""Files in the layout of TorchRec's Criteo readers."""

import numpy as np

from support.prepared_arrays import arrays_of


def write_npy(folder, name, rows, fields=3, numbers=2, seed=0, ids=np.int32, **changed):
    """Three files of random rows; returns their arrays."""
    draw = np.random.default_rng(seed)
    folder.mkdir(exist_ok=True)
    arrays = {
        "dense": draw.random((rows, numbers), dtype=np.float32),
        "sparse": draw.integers(0, 40, (rows, fields)).astype(ids),
        "labels": draw.integers(0, 2, (rows, 1), dtype=np.int32),
        **changed,
    }
    for array, values in arrays.items():
        np.save(folder / f"{name}_{array}.npy", values)
    return arrays


def check_part(folder, part, parts):
    """A prepared part is those rows."""
    found, bags = arrays_of(folder, part)
    assert not bags
    ids = np.concatenate([arrays["sparse"] for arrays in parts])
    numbers = np.concatenate([arrays["dense"] for arrays in parts])
    label = np.concatenate([arrays["labels"].reshape(-1) for arrays in parts])
    np.testing.assert_array_equal(found["ids"], ids)
    np.testing.assert_array_equal(found["numbers"], numbers)
    np.testing.assert_array_equal(found["label"], label)
    assert [found[name].dtype for name in ("numbers", "label")] == [np.float32, np.uint8]
