"""What a manifest may say."""

import json

import pytest

from stampede.data import DataError
from stampede.data.prepared.manifest import read_manifest
from support.prepared import drawn_fields, drawn_rows, write_prepared, write_small


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


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "a/../../x", "./../x", "..", ".", "a//x", "a/b/c", "x\n", "~/x"]
)
def test_names_that_lead_out_of_the_folder_are_refused(tmp_path, name):
    folder = write_small(tmp_path / "data")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["parts"]["test"][0]["files"]["ids"]["name"] = name
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(DataError, match=r"parts.test.0.files.ids.name.*no name of a file in this"):
        read_manifest(folder)


def test_what_is_wrong_is_told_in_short(tmp_path):
    (tmp_path / "manifest.json").write_text(json.dumps({"x" * 100_000: 1}))
    with pytest.raises(DataError) as refusal:
        read_manifest(tmp_path)
    assert len(str(refusal.value)) < 5000
