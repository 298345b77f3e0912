"""The rule and the clip of `examples/own_rule/lion.py`, a file of a user's own."""

import runpy
from unittest import mock

from stampede.optim import registry
from support.paths import ROOT

FILE = ROOT / "examples/own_rule/lion.py"
# A configuration may execute the file too.
with mock.patch.dict(registry.RULES), mock.patch.dict(registry.CLIPS):
    _NAMES = runpy.run_path(str(FILE), run_name="own_rule")
Lion, RootCountClip, CowClipLion = (
    _NAMES[name] for name in ("Lion", "RootCountClip", "CowClipLion")
)
