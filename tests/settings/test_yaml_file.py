"""YAML that means harm, or that no one can read."""

import os
import time

import pytest
from pydantic import Field

from stampede.settings import Section, SettingsError, from_key_values, parse_yaml, read_yaml, shown


def refusal(text):
    with pytest.raises(SettingsError) as failure:
        parse_yaml(text, "job.yaml")
    return str(failure.value)


@pytest.mark.parametrize(
    "text, words",
    [
        ("a: !!bool x", "job.yaml: not valid YAML"),
        ("a: !!int ''", "job.yaml: not valid YAML"),
        ("a: !!timestamp x", "job.yaml: not valid YAML"),
        ('a: "\\UFFFFFFFF"', "job.yaml: not valid YAML"),
        ("a: " + "[" * 3000, "job.yaml: not valid YAML"),
        ("a: 1\nb: !!python/object/apply:os.system [true]", "line 2: not valid YAML: could not"),
        ('a: 1\nb: "x\\0y"', r"job.yaml: line 2: found the character '\x00'; leave it out"),
        ('a: "\\ud800"', r"line 1: found the character '\ud800'; leave it out"),
        ("a: 1\nb: !!int 0x" + "f" * 9000, "line 2: found a number of too many digits"),
        ("a: " + "9" * 400, "line 1: found a number of too many digits"),
        ("a: &a\n  b: *a", "job.yaml: line 1: found an alias within what it stands for"),
        ("&a [*a]", "line 1: found an alias within what it stands for"),
    ],
)
def test_it_is_refused_with_a_sentence(text, words):
    assert words in refusal(text)


@pytest.mark.parametrize("inner", ["[{}]", "{{<<: [{}]}}", "{{b: [{}]}}"])
def test_aliases_that_multiply(inner):
    lines = ["a0: &a0 {k: 1}"]
    lines += [f"a{i}: &a{i} " + inner.format(", ".join([f"*a{i - 1}"] * 9)) for i in range(1, 25)]
    started = time.perf_counter()
    assert "its aliases stand for more than 100,000 values" in refusal("\n".join(lines))
    assert time.perf_counter() - started < 300


def test_an_alias_still_works():
    text = "a: &a {k: 1, l: [2]}\nb: [*a, *a]"
    assert parse_yaml(text, "") == {"a": {"k": 1, "l": [2]}, "b": [{"k": 1, "l": [2]}] * 2}


def test_a_file_without_an_end(tmp_path):
    (tmp_path / "job.yaml").write_text("a: 1\n" + "#" * (1 << 20))
    for path in (tmp_path / "job.yaml", "/dev/zero"):
        link = tmp_path / "link.yaml"
        link.unlink(missing_ok=True)
        os.symlink(path, link)
        with pytest.raises(SettingsError, match=r"link.yaml: is longer than 1,048,576 bytes"):
            read_yaml(link, "")


class _Options(Section):
    count: int = Field(1, ge=1)
    names: list[int] = Field([])


@pytest.mark.parametrize("value", ["[" * 300 + "]" * 300, "x" * 100_000, "-" + "9" * 300])
def test_what_was_found_is_shown_in_short(value):
    with pytest.raises(SettingsError, match="count: found") as failure:
        from_key_values([f"count={value}"], _Options, "--set")
    assert len(str(failure.value)) < 1000


def test_of_many_mistakes_some_are_told():
    values = ", ".join(["x"] * 5000)
    with pytest.raises(SettingsError, match=r"names.19: found 'x'.*\n  and 4980 more") as failure:
        from_key_values([f"names=[{values}]"], _Options, "--set")
    assert len(str(failure.value)) < 3000


def test_short_values_are_shown_whole():
    for value in (3, "a'b", [400, 400], {"b": 1, "a": None}, 1.5, float("inf")):
        assert eval(shown(value), {"inf": float("inf")}) == value


def test_a_key_cannot_reach_the_terminal():
    with pytest.raises(SettingsError, match="unknown key") as failure:
        from_key_values(["\x1b[2Jcount\u202e=1"], _Options, "--set")
    assert str(failure.value).replace("\n", "").isprintable()
