"""Makes the manual's tables from results, for the pages of `PAGES`.

python benchmarks/manual_tables.py            # prints them
python benchmarks/manual_tables.py --write    # replaces those in the manual
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from pathlib import Path

import floors
import incremental
import quality
import speeds
import waiting_rows
from report import RESULTS, ROOT

from stampede.files import write_file

# The tables are between these lines.
BEGIN, END = "<!-- benchmarks/manual_tables.py -->", "<!-- end -->"

# Units of growth.py's series, if not their names.
GROWN = {"batch": "samples", "trained": "steps trained before"}

NOTHING = "Not measured yet: `make bench`, then `python benchmarks/manual_tables.py --write`."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--write", action="store_true", help="replace the tables in the manual")
    options = parser.parse_args()
    for name, make in PAGES.items():
        text = make(options.results)
        if not options.write:
            print(text)
            continue
        path = ROOT / name
        page = path.read_text(encoding="utf-8")
        if page.count(BEGIN) != 1 or page.count(END) != 1:
            sys.exit(f"error: {path}: write one line {BEGIN} and one line {END}")
        before, rest = page.split(BEGIN)
        write_file(path, f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}")


def tables(results: Path) -> str:
    """The available results of `make bench`."""
    parts = []
    for name, make in (
        ("end_to_end", _end_to_end),
        ("update_kernel", _update_kernel),
        ("waiting_rows", _waiting_rows),
        ("step_breakdown", _step_breakdown),
        ("growth", _growth),
        ("communication", _communication),
        ("bf16_auc", _bf16_auc),
    ):
        path = results / f"{name}.json"
        if path.exists():
            found = json.loads(path.read_text())
            if not found["quick"]:
                parts += [make(found), _measured_on(found["machine"])]
    return "\n\n".join(parts) or NOTHING


def quality_tables(results: Path) -> str:
    """Model quality, from quality.py."""
    path = results / "quality.json"
    if not path.exists():
        return "Not measured yet: `python benchmarks/quality.py`."
    found = json.loads(path.read_text())
    return f"{quality.table(found['runs']).strip()}\n\n{_measured_on(found['machine'])}"


def incremental_tables(results: Path) -> str:
    """The value of incremental training, from incremental.py."""
    path = results / "incremental.json"
    if not path.exists():
        return "Not measured yet: `python benchmarks/incremental.py --log LOG`."
    found = json.loads(path.read_text())
    seconds = found["seconds_of_second_half"]
    rows = [
        [
            label,
            f"{found['mean'][way]['auc']:.4f}",
            f"{found['mean'][way]['logloss']:.4f}",
            f"{seconds[way]:.0f}",
        ]
        for way, label in incremental.NAMES.items()
    ]
    heads = ["trained", "AUC", "logloss", "seconds, start-up included"]
    grown = "; ".join(
        f"{line['seconds']:.1f} for {line['new']:,} new ids in a table of {line['kept']:,} rows "
        f"that may grow, {line['evicting_seconds']:.1f} if it may not and they take the rows of "
        "others"
        for line in found["growth"]
    )
    parts = [
        "![AUC of the last six periods](../benchmarks/results/incremental.png)",
        _markdown(heads, rows),
        _wrapped(f"Seconds that it takes to give new ids their rows: {grown}."),
        _measured_on(found["machine"]),
        *_many_periods(results / "many_periods.json"),
    ]
    return "\n\n".join(parts)


def torchrec_tables(results: Path) -> str:
    """TorchRec features with the two changed lines, from torchrec_features.py."""
    path = results / "torchrec_features.json"
    if not path.exists():
        return "Not measured yet: `python benchmarks/torchrec_features.py`."
    found = json.loads(path.read_text())
    works = {f"model `{name}`": result for name, result in found["models"].items()} | found["works"]
    rows = [[name, f"works, {deviation:.1e}"] for name, deviation in works.items()]
    for name, sentence in found["refused"].items():
        rows.append([name, f"refused: {sentence.replace('<', '&lt;')}"])
    sent = []
    for name, one in found["communication"].items():
        processes, plan, *precisions = name.split()
        exact = found["communication"][f"{processes} {plan} fp32 fp32"]
        share = sum(one["bytes"]) / sum(exact["bytes"])
        sent.append([processes, plan, *precisions, f"{one['deviation']:.1e}", f"{share:.0%}"])
    heads = ["processes", "plan", "forward", "backward", "deviation", "bytes"]
    parts = [
        _markdown(["of TorchRec", "with the two lines"], rows),
        "Communication in lower precision, ids and lengths of bags among the bytes:",
        _markdown(heads, sent),
        _measured_on(found["machine"]),
    ]
    return "\n\n".join(parts)


def _many_periods(path: Path) -> list[str]:
    """Cost of early and late periods, and the parts of a large period's time."""
    if not path.exists():
        return []
    found = json.loads(path.read_text())
    rows = [
        [
            "{} to {}".format(*part["periods"]),
            f"{part['cpu_seconds']:.1f}",
            f"{part['ids']:,.0f}",
            f"{part['peak_memory_bytes'] / 1e9:.2f} GB",
        ]
        for part in found["many"]
    ]
    busy = found["machine"]["other_processes"]
    parts = [
        _wrapped(
            f"A hundred files of {found['many'][0]['rows']:,} rows and four fields, one in fifty "
            "ids new in each, at most 2,000 rows of a field (`benchmarks/many_periods.py`; "
            "medians):"
        ),
        _markdown(["period", "processor seconds", "rows of all tables", "memory at most"], rows),
    ]
    if large := found.get("large"):
        shares = sorted(large["part_seconds"].items(), key=lambda one: -one[1])
        parts.append(
            _wrapped(
                f"Of the time of a period of {large['rows']:,} rows with {large['ids']:,} ids: "
                + ", ".join(f"{part} {s / large['seconds']:.0%}" for part, s in shares)
                + "."
            )
        )
    measured = _measured_on(found["machine"])
    return [*parts, f"{measured} Other programs took {busy:.0%} of the cores' time."]


def _markdown(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _wrapped(text: str) -> str:
    """A paragraph in lines as long as the manual's."""
    return textwrap.fill(text, 110, break_long_words=False, break_on_hyphens=False)


def _measured_on(machine: dict) -> str:
    instructions = ", ".join(machine["bf16_instructions"]) or "no instructions for bf16"
    return (
        f"Measured at {machine['commit']} on {machine['cores']} cores: {machine['cpu']}, "
        f"{instructions}."
    )


def _end_to_end(found: dict) -> str:
    measured = found["floors"]
    rows = [
        [
            f"{line.batch:,}",
            line.trainer,
            f"{line.speed:,.0f}",
            speeds.cell(line.to_peer),
            speeds.cell(line.bar, 1),
            speeds.cell(line.to_floor),
            speeds.cell(line.floor_to_peer),
        ]
        for line in speeds.lines(found["samples_per_second"], measured)
    ]
    heads = ["batch", "trainer", "samples/s", "/ SparseAdam", "bar", "/ MLP alone"]
    mlp, flops = measured["mlp_samples_per_second"], measured["gemm_flops"]
    floor = "; ".join(
        f"{precision}: {' and '.join(f'{speed:,.0f}' for speed in mlp[precision].values())} "
        f"samples/s, the bare products {flops[precision] / 1e9:,.0f} GFLOP/s"
        for precision in floors.PRECISIONS
    )
    said = (
        f"The MLP alone, forward and backward, in tiles of "
        f"{' and '.join(map(str, floors.ROWS))} rows, {floor}; copying "
        f"{measured['copy_bytes_per_second'] / 1e9:.0f} GB/s."
    )
    parts = [
        "![Training speed](../benchmarks/results/end_to_end.png)",
        _wrapped(said),
        _markdown([*heads, "MLP alone / SparseAdam"], rows),
    ]
    if beside := speeds.all_beside_touched(found["samples_per_second"]):
        parts.append("\n".join(f"- {one}" for one in beside))
    if beside := "; ".join(speeds.beside_our_allocator(found["samples_per_second"])):
        parts.append(
            _wrapped(
                "`sparse_adam keeps memory` is SparseAdam with our allocator's setting. Samples/s "
                f"of `rows: all` over its, without a bar: {beside}."
            )
        )
    return "\n\n".join(parts)


def _update_kernel(found: dict) -> str:
    rows = []
    for batch, one in found["backward"].items():
        ms = {name: 1e3 * seconds for name, seconds in one["seconds"].items()}
        step = {
            name: 1e3 * seconds
            for name, seconds in found["all_rows"][batch]["seconds_per_step"].items()
        }
        rows.append(
            [
                f"{int(batch):,}",
                f"{one['distinct_ids']:,}",
                f"{ms['fbgemm']:.1f}",
                f"{ms['stampede']:.1f}",
                f"{ms['stampede'] / ms['fbgemm']:.2f}",
                f"{ms['torch']:.1f}",
                f"{step['touched']:.1f}",
                f"{step['deferred']:.1f}",
                f"{step['swept']:.1f}",
            ]
        )
    heads = ["batch", "distinct ids", "FBGEMM", "ours", "ratio", "plain PyTorch"]
    heads += ["`touched`", "`all`", "`all`, swept"]
    said = (
        "The update of the tables alone, in milliseconds. FBGEMM (its fused Adagrad), ours and "
        "plain PyTorch: the backward pass of a lookup, only rows of the batch. The last three "
        "columns: forward and backward of our step with the last flush, by `rows`; `all`, swept is "
        "`all` with a sweep of all rows in every step."
    )
    return f"{_wrapped(said)}\n\n{_markdown(heads, rows)}"


def _waiting_rows(found: dict) -> str:
    rows = [
        [
            f"{one['ids']:,}",
            f"{one['batch']:,}",
            f"{one['ids'] / one['distinct_ids']:.1f}",
            *(f"{1e3 * one['seconds_per_step'][name]:.1f}" for name in ("waiting", "swept")),
            one["chosen"],
        ]
        for one in found["points"]
    ]
    worst = max(map(waiting_rows.chosen_to_better, found["points"]))
    said = (
        "`rows: all`, rows that wait beside a sweep of all rows in each step: milliseconds of "
        "forward and backward of the tables, with the last flush. The chosen way takes at most "
        f"{worst:.2f} times as long as the better of the two:"
    )
    heads = ["ids", "batch", "ids / distinct ids", "waiting", "swept", "chosen"]
    return f"{_wrapped(said)}\n\n{_markdown(heads, rows)}"


def _step_breakdown(found: dict) -> str:
    parts = found["microseconds_per_sample"]
    names = list(next(iter(parts.values())))
    rows = [
        [*_batch_and(name), *(f"{one[part]:.2f}" for part in names)] for name, one in parts.items()
    ]
    picture = "![A training step](../benchmarks/results/step_breakdown.png)"
    table = _markdown(["batch", "", *names], rows)
    return f"{picture}\n\nA step, microseconds a sample:\n\n{table}"


def _batch_and(name: str) -> list[str]:
    batch, computed = name.split(maxsplit=1)
    return [f"{int(batch):,}", computed]


def _growth(found: dict) -> str:
    rows = [
        [
            f"{int(value):,} {GROWN.get(name, name)}",
            f"{1e3 * one['seconds_per_step']:.0f}",
            f"{one['samples_per_second']:,.0f}",
            f"{one['table_bytes'] / 1e9:.2f}",
            f"{one['peak_bytes'] / 1e9:.2f}",
        ]
        for name, points in found["growth"].items()
        for value, one in points.items()
    ]
    said = (
        f"Growth from batch {found['batch']:,}, {found['ids']:,} ids and {found['fields']} fields, "
        "each by itself:"
    )
    heads = ["", "ms a step", "samples/s", "tables GB", "peak memory GB"]
    each = f"Each further id adds {found['bytes_per_id']:.0f} bytes to the peak."
    return f"{_wrapped(said)}\n\n{_markdown(heads, rows)}\n\n{each}"


def _communication(found: dict) -> str:
    rows = []
    for name, one in found["communication"].items():
        world_size, plan, batch = name.split()
        rows.append(
            [
                world_size,
                plan,
                f"{int(batch):,}",
                f"{1e3 * one['seconds_per_step']:.0f}",
                f"{one['waiting_share']:.0%}",
                f"{one['exchange_share']:.0%}",
                f"{sum(one['sent_bytes_per_step'].values()) / 1e6:.1f}",
            ]
        )
    heads = ["processes", "plan", "batch", "ms a step", "waiting", "exchange", "MB a rank sends"]
    said = (
        "Several gloo processes with a thread each on these cores. Waiting: the share of a step in "
        "which a rank is blocked in collectives, also by slower ranks. Exchange: the share that "
        "the same exchanges take by themselves."
    )
    return f"{_wrapped(said)}\n\n{_markdown(heads, rows)}"


def _bf16_auc(found: dict) -> str:
    rows = [
        [
            precision,
            " ".join(f"{auc:.4f}" for auc in best),
            f"{found['mean'][precision]:.4f}",
            f"{found['standard_error'][precision]:.4f}",
        ]
        for precision, best in found["best_auc"].items()
    ]
    said = (
        "Best test AUC on the Criteo sample, CowClip at batch 1024; bf16 - fp32 is "
        f"{found['difference']:+.5f}, with a standard error of "
        f"{found['standard_error_of_difference']:.5f} over the pairs of seeds:"
    )
    return f"{_wrapped(said)}\n\n{_markdown(['', 'each seed', 'mean', 'standard error'], rows)}"


# The function that makes the tables of each page.
PAGES = {
    "docs/speed.md": tables,
    "docs/choices.md": quality_tables,
    "docs/incremental.md": incremental_tables,
    "docs/torchrec.md": torchrec_tables,
}


if __name__ == "__main__":
    main()
