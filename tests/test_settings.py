"""Settings that cannot be read, or are not what they should be, are refused in a sentence."""

import os

import pytest
from pydantic import Field

from stampede.settings import Section, SettingsError, from_key_values, parse_yaml, read_yaml, shown


@pytest.mark.parametrize(
    "text, words",
    [
        ("a: !!bool x", "job.yaml: not valid YAML"),
        ("a: !!timestamp x", "job.yaml: not valid YAML"),
        ("a: [1", "job.yaml, line 1: not valid YAML"),
        ("a: 1\nb: !!python/object/apply:os.system [true]", "line 2: not valid YAML: could not"),
        ("a: 1\nb: 2\na: 3", "job.yaml: key 'a' is on line 1 and again on line 3; keep one"),
        ("a:\n  1: 2", "job.yaml: line 2: found the key 1, expected a name"),
    ],
)
def test_it_is_refused_with_a_sentence(text, words):
    with pytest.raises(SettingsError) as failure:
        parse_yaml(text, "job.yaml")
    assert words in str(failure.value)


def test_numbers_are_what_looks_like_numbers():
    text = "[1e-4, 010, 12:00, 2024-03-01, 1_000, .5, -3, .inf]"
    expected = [1e-4, "010", "12:00", "2024-03-01", "1_000", 0.5, -3, float("inf")]
    assert parse_yaml(text, "") == expected


def test_an_alias_still_works():
    text = "a: &a {k: 1, l: [2]}\nb: [*a, *a]"
    assert parse_yaml(text, "") == {"a": {"k": 1, "l": [2]}, "b": [{"k": 1, "l": [2]}] * 2}


@pytest.mark.parametrize(
    "text, words",
    [
        ("!!int 0x" + "f" * 900_000, "line 1: found a number of 900,002 characters"),
        ("a: 1\nb: !!float " + "1:" * 450_000 + "1", "line 2: found a number of"),
        ("1" * 401, "line 1: found a number of 401 characters; 400 are the most"),
        ("a: &a [1]\nb: &b [*a, *a]\nc: [*b]", "line 2: at most 100 aliases"),
        ("a: &a [*a]", "line 1: at most 100 aliases"),
        ("a: &a 1\nb: [" + "*a, " * 101 + "]", "line 2: at most 100 aliases"),
    ],
)
def test_what_would_take_for_ever_is_refused(text, words):
    with pytest.raises(SettingsError, match=words):
        parse_yaml(text, "job.yaml")


def test_files_that_are_no_files_or_too_large(tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    with (tmp_path / "large.yaml").open("wb") as file:
        file.truncate(1 << 40)
    for name, words in (("pipe.yaml", "is not a file"), ("large.yaml", "are the most")):
        with pytest.raises(SettingsError, match=f"{name}: cannot be read as text .*{words}"):
            read_yaml(tmp_path / name, "")


def test_files_that_are_not_sections(tmp_path):
    (tmp_path / "list.yaml").write_text("- 1\n")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    for name, words in (
        ("list.yaml", "found list, expected sections"),
        ("bytes.yaml", "cannot be read as text"),
        ("absent.yaml", "no such file; look there"),
    ):
        with pytest.raises(SettingsError, match=f"{name}: {words}"):
            read_yaml(tmp_path / name, "look there")


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
