"""Schemas: what is refused."""

import pytest

from stampede.data.schema.schema import load_schema
from stampede.settings import SettingsError

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
