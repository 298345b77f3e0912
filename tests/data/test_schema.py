"""Schemas: what is refused, and the examples of their documentation."""

import re

import numpy as np
import pytest

from stampede.data.prepare import main
from stampede.data.schema.schema import load_schema
from stampede.settings import SettingsError
from support.paths import ROOT
from support.prepared_arrays import arrays_of, manifest_of

GOOD = "label: y\nids: [user]\n"


@pytest.mark.parametrize(
    "text, words",
    [
        ("ids: [user]", ["label: not given"]),
        ("label:\nids: [user]", ["label: not given; write the name of its column"]),
        ("label: y", ["ids: not given"]),
        ("label: y\nids: {}", ["ids: found {}"]),
        (GOOD + "idz: 3", ["idz: unknown key; did you mean 'ids'?"]),
        (GOOD + "separator: ab", ["separator: found 'ab'; write one character"]),
        (GOOD + "quote: ab", ["quote: found 'ab'"]),
        (GOOD + "columns: [y]", ["column 'user' is used but not in columns: y"]),
        (GOOD + "columns: [y, user, y]", ["a name appears twice"]),
        (GOOD + "numbers: [user]", ["'user' is an id field and a number"]),
        (GOOD + "numbers: {x: {transform: lg}}", ["numbers.x.transform.0: found 'lg'", "log1p"]),
        (GOOD + "numbers: {x: {transform: [minmax, log1p]}}", ["numbers.x", "log1p and another"]),
        (GOOD + "numbers: {x: {fil: 1}}", ["numbers.x.fil: unknown key; did you mean 'fill'?"]),
        ("label: y\nids: {u: {encode: hsh}}", ["ids.u.encode: found 'hsh'", "mean 'hash'?"]),
        ("label: y\nids: {u: {encode: hash}}", ["ids.u.buckets: not given"]),
        ("label: y\nids: {u: {min_cout: 2}}", ["ids.u.min_cout", "did you mean 'min_count'?"]),
        ("label: y\nids: {u: {max_ids: 2}}", ["ids.u", "max_ids without separator"]),
        ("label: y\nids: {u: {min_count: 0}}", ["ids.u.min_count: found 0"]),
        ("label: y\nids: {w: {encode: weekday}}", ["ids.w", "needs the section `time`"]),
        ("label: y\nids: {../u: {}}", ["field '../u': write letters, digits"]),
        ("label: y\nids: [user", ["line 3: not valid YAML"]),
    ],
)
def test_mistakes_name_the_key_and_the_remedy(tmp_path, text, words):
    path = tmp_path / "schema.yaml"
    path.write_text(text + "\n")
    with pytest.raises(SettingsError) as raised:
        load_schema(path)
    assert str(raised.value).startswith(str(path))
    assert all(word in str(raised.value) for word in words), str(raised.value)


def documented():
    text = (ROOT / "docs/schema.md").read_text()
    return re.findall(r"```yaml\n# (\S+)\n(.*?)```", text, flags=re.DOTALL)


def made_up(name):
    draw = np.random.default_rng(0)
    lines = ["userId,movieId,rating,timestamp"] if name == "movielens.yaml" else []
    for i in range(300):
        if name == "movielens.yaml":
            lines.append(
                f"{draw.integers(40)},{draw.integers(90)},{i % 6},{1_700_000_000 + 999 * i}"
            )
        else:
            genres = "|".join(draw.choice(["a", "b", "c"], draw.integers(0, 3)))
            lines.append(
                f"{i % 2};u{draw.integers(9)};{draw.integers(90)};{genres};{draw.random():.2f};NA;"
                f"{draw.integers(20)};2024-0{1 + i // 100}-01;{draw.random():.2f}"
            )
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("name, text", documented())
def test_documented_examples_prepare(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    (tmp_path / "log.csv").write_text(made_up(name))
    by_day = ["--set", "split=by_column", "--set", "split_column=day"]
    further = [] if name == "movielens.yaml" else [*by_day, "--set", "test_from=2024-03-01"]
    log, schema, out = (str(tmp_path / part) for part in ("log.csv", name, "out"))
    assert main(["table", log, "--schema", schema, "--out", out, *further]) == 0
    manifest = manifest_of(tmp_path / "out")
    test, _ = arrays_of(tmp_path / "out", "test")
    if name == "movielens.yaml":
        assert test["label"].tolist() == [int(i % 6 >= 4) for i in range(270, 300)]
    else:
        assert test["label"].tolist() == [i % 2 for i in range(200, 300)]
        assert manifest["fields"][-1]["multi"] and manifest["has_weight"]
