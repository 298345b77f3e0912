"""Prepared data do not depend on the form of a log: bit by bit, for random logs and forms."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stampede.data.learning.row_meanings import vocabulary_fingerprint
from support.any_form import FORMS, KINDS, SCHEMA, drawn, rows_of, write
from support.prepared_arrays import arrays_of
from support.preparing import PARTS, prepared

TYPES = st.fixed_dictionaries({name: st.sampled_from(kinds) for name, kinds in KINDS.items()})
# Some rows in a form, with its types.
FILES = st.tuples(st.sampled_from(FORMS), TYPES, st.booleans(), st.sampled_from([None, 7, 50]))


def content(folder, files):
    prepared(
        folder / "out", "table", [*map(str, files)], schema=str(folder / "schema.yaml"),
        features="auto", test_fraction=0.2,
    )  # fmt: skip
    found = {"meaning": vocabulary_fingerprint(folder / "out")}
    for part in PARTS:
        arrays, bags = arrays_of(folder / "out", part)
        found |= {(part, name): array.tobytes() for name, array in arrays.items()}
        found |= {(part, name): lists for name, lists in bags.items()}
    return found


@pytest.mark.slow
@settings(max_examples=4)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(30, 200),
    one=FILES,
    five=st.lists(FILES, min_size=5, max_size=5),
)
def test_the_form_makes_no_difference(tmp_path_factory, seed, rows, one, five):
    columns = drawn(seed, rows)
    found = []
    for number, forms in enumerate(([("csv", None, False, None)], [one], five)):
        folder = tmp_path_factory.mktemp("log")
        (folder / "schema.yaml").write_text(SCHEMA)
        bounds = np.linspace(0, rows, len(forms) + 1).astype(int)
        files = [
            write(folder / f"log_{i}.{form}", rows_of(columns, *bounds[i : i + 2]), *options)
            for i, (form, *options) in enumerate(forms)
        ]
        found.append(content(folder, files))
        assert found[number] == found[0]
    assert len(found[0]) > 10
