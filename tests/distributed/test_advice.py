"""On two ranks rank 0 fits the regression, while the other one waits."""

import json

import pytest

from support.jobs import lines, run_small
from support.ranks import run_ranks

pytestmark = pytest.mark.slow


def test_two_ranks_say_what_one_says(tmp_path):
    for ranks in (1, 2):
        run_ranks(
            ranks,
            run_small,
            tmp_path,
            ["evaluate.compare_with_lr=true", f"run.name=of_{ranks}"],
            ranks,
        )
    found = [
        json.loads((tmp_path / name / "summary.json").read_text()) for name in ("of_1", "of_2")
    ]
    for summary in found:
        del summary["logistic_regression"]["seconds"]
    assert found[0]["logistic_regression"] == found[1]["logistic_regression"]
    assert found[0]["advice"][0] == found[1]["advice"][0]
    for name, summary in zip(("of_1", "of_2"), found, strict=True):
        said = [line["text"] for line in lines(tmp_path / name) if line["kind"] == "advice"]
        assert said == summary["advice"] != []
