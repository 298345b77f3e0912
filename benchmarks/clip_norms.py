"""How far gradients are from CowClip's threshold, by how often an id occurs in the batch.

Of run folders with `train.clip_stats_every`: mean norms of gradients (L2 term included), of rows
and of thresholds, and the share of clipped rows, in the first and the last quarter of the training.

    python benchmarks/clip_norms.py --runs runs/synthetic_rules/trials/CowClip-*K-seed1
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from report import Report, command_line, markdown

from stampede.engine.watching.clip_statistics import NORMS


def clip_norms(options: argparse.Namespace, report: Report) -> str:
    """Norms in the first and the last quarter of each run."""
    shown = []
    for folder in options.runs:
        lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        watched = [line for line in lines if line["kind"] == "clipping"]
        quarter = -(-len(watched) // 4)
        parts = {"first": by_count(watched[:quarter]), "last": by_count(watched[-quarter:])}
        report.add(**{folder.name: parts})
        for when, counts in parts.items():
            for count in counts:
                row = [folder.name, when, count["from"], f"{count['clipped']:.3%}"]
                shown.append([*row, *(f"{count[name]:.2e}" for name in NORMS)])
    return markdown(["run", "quarter", "occurrences", "clipped", *NORMS], shown)


def by_count(lines: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """Means over the rows of several steps, by the occurrences of their ids."""
    sums: dict[int, Counter[str]] = {}
    for count in (count for line in lines for count in line["counts"]):
        total, touched = sums.setdefault(count["from"], Counter()), count["touched"]
        total.update(rows=touched, clipped=count["clipped"])
        total.update({name: touched * count[name] for name in NORMS})
    return [
        {"from": first, "rows": total["rows"]}
        | {name: total[name] / total["rows"] for name in ("clipped", *NORMS)}
        for first, total in sorted(sums.items())
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, nargs="+", required=True, help="run folders")
    command_line(clip_norms, parser=parser)
