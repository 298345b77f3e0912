"""Sizes of memory as people write them."""

import pytest

from stampede.engine.planning.sizes import parse_bytes, readable
from stampede.settings import SettingsError


@pytest.mark.parametrize(
    "text, size",
    [
        ("141GB", 141 * 10**9),
        ("80GiB", 80 * 2**30),
        ("512MB", 512 * 10**6),
        ("1.5 TB", 15 * 10**11),
        ("4tib", 4 * 2**40),
        (".5KiB", 512),
        ("7B", 7),
    ],
)
def test_sizes_are_read(text, size):
    assert parse_bytes(text, "--device-memory") == size


@pytest.mark.parametrize(
    "text", ["", "141", "GB", "141G", "-3GB", "0GB", "1e3GB", "3 G B", "80gbit"]
)
def test_what_is_no_size_is_refused_with_examples(text):
    with pytest.raises(SettingsError, match=r"--device-memory: found '.*141GB.*80GiB.*units"):
        parse_bytes(text, "--device-memory")


@pytest.mark.parametrize(
    "count, text",
    [
        (0, "0 B"),
        (999, "999 B"),
        (999_600, "1.00 MB"),
        (163.2e9, "163.2 GB"),
        (1.44e12, "1.44 TB"),
        (99.5e9, "99.50 GB"),
    ],
)
def test_sizes_are_shown(count, text):
    assert readable(count) == text
