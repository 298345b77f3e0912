"""Settings that cannot be read, or are not what they should be, are refused in a sentence."""

import os

import polars as pl
import pytest
from pydantic import Field

from stampede.settings import (
    Section,
    SettingsError,
    from_key_values,
    parse_yaml,
    read_yaml,
    shown,
    yaml_value,
)


@pytest.mark.parametrize(
    "text, words",
    [
        ("a: !!bool x", "job.yaml: not valid YAML"),
        ("a: [1", "job.yaml, line 1: not valid YAML"),
        ("a: 1\nb: !!python/object/apply:os.system [true]", "line 2: not valid YAML: could not"),
        ("a: 1\nb: 2\na: 3", "not valid YAML: key 'a' is on line 1 and again on line 3; keep one"),
        ("a:\n  1: 2", "job.yaml: not valid YAML: line 2: found the key 1, expected a name"),
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


@pytest.mark.parametrize(
    "value, text",
    [
        (None, "null"),
        (True, "true"),
        ("", "''"),
        # Quoted only if it would be read as something else.
        ("010", "010"),
        ("1e-4", "'1e-4'"),
        (1e-8, "1e-08"),
        (float("inf"), ".inf"),
        (["a, b"] * 50, "[" + ", ".join(["'a, b'"] * 50) + "]"),
        ({"b": 1, "a": [False]}, "{b: 1, a: [false]}"),
    ],
)
def test_a_value_is_shown_as_in_a_file(value, text):
    assert yaml_value(value) == text
    assert parse_yaml(text, "") == value


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


def test_what_was_found_is_shown_in_short():
    for value in (3, "a'b", [400, 400], {"b": 1, "a": None}, 1.5):
        assert eval(shown(value)) == value
    for value in (["x"] * 5000, "x" * 100_000, 10**300):
        assert len(shown(value)) < 100
    frame = pl.DataFrame({"a": range(30)})
    assert shown(frame) == "DataFrame" and shown([frame]) == "list" and shown("a\nb") == "'a\\nb'"


def test_only_the_first_of_many_mistakes_are_listed():
    values = ", ".join(["x"] * 5000)
    with pytest.raises(SettingsError, match=r"names.19: found 'x'.*\n  and 4980 more") as failure:
        from_key_values([f"names=[{values}]"], _Options, "--set")
    assert len(str(failure.value)) < 3000


def test_a_key_cannot_reach_the_terminal():
    with pytest.raises(SettingsError, match="unknown key") as failure:
        from_key_values(["\x1b[2Jcount\u202e=1"], _Options, "--set")
    assert str(failure.value).replace("\n", "").isprintable()


def test_aliases_are_bounded_and_pipes_are_refused(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("a: &x [1, 2]\nb: *x\n")
    assert read_yaml(path, "") == {"a": [1, 2], "b": [1, 2]}
    lines = ["a0: &a0 [1, 1]", *(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 40))]
    for text in ("\n".join(lines), "a: &a [*a]"):
        path.write_text(text)
        with pytest.raises(SettingsError, match=r"a.yaml: not valid YAML: aliases \(\*name\) make"):
            read_yaml(path, "")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(SettingsError, match=r"a\.yaml: cannot be read as text"):
        read_yaml(path, "")


def test_a_notebook_shows_the_sentence_without_a_traceback(monkeypatch, tmp_path, capsys):
    interactiveshell = pytest.importorskip("IPython.core.interactiveshell")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    shell = interactiveshell.InteractiveShell()
    shell.run_cell("from stampede.settings import parse_yaml; parse_yaml('[', 'a.yaml')")
    shown = "".join(capsys.readouterr())
    assert shown.startswith("SettingsError: a.yaml") and "Traceback" not in shown
    shell.run_cell("1 / 0")
    assert "Traceback" in "".join(capsys.readouterr())
