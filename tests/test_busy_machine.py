"""No test measures the machine by a limit of time: it may be many times slower than yours."""

import re

from hypothesis import HealthCheck, settings

from support.paths import ROOT

# A few seconds as a limit, in the places where limits stand.
_LIMIT = re.compile(r"\btimeout=\d|\bdeadline=\d|(?:process|thread|child)\.(?:wait|join)\(\d")


def test_cases_of_hypothesis_have_no_time_limit():
    assert settings.default.deadline is None
    assert HealthCheck.too_slow in settings.default.suppress_health_check


def test_limits_of_time_only_end_hangs():
    """They are `support.waiting.HANG`."""
    found = [
        f"{path.relative_to(ROOT)}: {limit}"
        for path in (ROOT / "tests").rglob("*.py")
        for limit in _LIMIT.findall(path.read_text())
    ]
    assert not found
