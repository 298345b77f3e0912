"""What a manifest may say."""

import json

import pytest

from stampede.data import DataError
from stampede.data.prepared.manifest import read_manifest
from support.prepared import drawn_fields, drawn_rows, write_prepared


@pytest.mark.parametrize("name", ["a.b", "", "a/b", "é", "-a", "a\n"])
def test_names_that_the_schema_refuses_are_refused(tmp_path, name):
    folder = write_prepared(
        tmp_path / "data", {"train": drawn_rows(4), "test": drawn_rows(4)}, drawn_fields()
    )
    text = (folder / "manifest.json").read_text()
    for old in ("C1", "I1"):
        manifest = text.replace(json.dumps(old), json.dumps(name))
        assert manifest != text
        (folder / "manifest.json").write_text(manifest)
        with pytest.raises(DataError, match=r"manifest.json: damaged.*(fields|numbers)\.0"):
            read_manifest(folder)
