"""No test measures the machine by a limit of time: it may be many times slower than yours."""

import re

from hypothesis import HealthCheck, settings

from support.paths import ROOT

# A few seconds as a limit, in the places where limits stand.
_LIMIT = re.compile(r"\btimeout=\d|\bdeadline=\d|(?:process|thread|child)\.(?:wait|join)\(\d")
# `test_a_second_signal_ends_at_once` stops a program of minutes at once.
_MEANT = {"tests/engine/test_stopping.py": 1}


def test_cases_of_hypothesis_have_no_time_limit():
    assert settings.default.deadline is None
    assert HealthCheck.too_slow in settings.default.suppress_health_check


def test_limits_of_time_only_end_hangs():
    """They are `support.waiting.HANG`."""
    found = {
        str(path.relative_to(ROOT)): len(_LIMIT.findall(path.read_text()))
        for path in (ROOT / "tests").rglob("*.py")
    }
    assert {name: count for name, count in found.items() if count} == _MEANT
