"""The results of `end_to_end.py` as a table and as a picture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import floors
from machine import CORES
from matplotlib.figure import Figure
from report import markdown, wrapped

# Smallest ratio to SparseAdam at its default allocator (issue 5).
BARS = {
    "1024 fp32 touched": 1.3,
    "1024 fp32 all": 1.0,
    "8192 fp32 all": 1.7,
    "8192 bf16 all": 4.0,
    "65536 fp32 all": 2.2,
    "65536 bf16 all": 5.0,
}


class Line(NamedTuple):
    """A contender, its peer and its floor.

    Attributes:
        batch: global batch size.
        trainer: readable name.
        speed: samples/s.
        to_peer: ratio to SparseAdam with the default allocator, if measured.
        bar: smallest required ratio, if any.
        to_floor: share of the MLP's speed alone in that precision.
        floor_to_peer: ratio of the MLP alone to the peer.
    """

    batch: int
    trainer: str
    speed: float
    to_peer: float | None
    bar: float | None
    to_floor: float
    floor_to_peer: float | None


def lines(speeds: dict[str, float], measured_floors: dict) -> Iterator[Line]:
    """A line for each contender."""
    for name, speed in speeds.items():
        batch, trainer, *rest = name.split()
        peer = speeds.get(f"{batch} sparse_adam")
        ours = trainer in floors.PRECISIONS
        precision = trainer if ours else "fp32"
        floor = floors.mlp_samples_per_second(measured_floors, precision, int(batch))
        yield Line(
            int(batch),
            " ".join([f"stampede {trainer}" if ours else trainer, *rest]),
            speed,
            None if peer is None else speed / peer,
            BARS.get(name),
            speed / floor,
            None if peer is None else floor / peer,
        )


def tables(found: dict) -> str:
    """The results as Markdown."""
    measured = found["floors"]
    rows = [
        [
            f"{line.batch:,}",
            line.trainer,
            f"{line.speed:,.0f}",
            cell(line.to_peer),
            cell(line.bar, 1),
            cell(line.to_floor),
            cell(line.floor_to_peer),
        ]
        for line in lines(found["samples_per_second"], measured)
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
        wrapped(said),
        markdown([*heads, "MLP alone / SparseAdam"], rows),
    ]
    if beside := all_beside_touched(found["samples_per_second"]):
        parts.append("\n".join(f"- {one}" for one in beside))
    if beside := "; ".join(beside_our_allocator(found["samples_per_second"])):
        parts.append(
            wrapped(
                "`sparse_adam keeps memory` is SparseAdam with our allocator's setting. Samples/s "
                f"of `rows: all` over its, without a bar: {beside}."
            )
        )
    return "\n\n".join(parts)


def all_beside_touched(speeds: dict[str, float]) -> list[str]:
    """The cost of `rows: all`, a sentence for each batch size with both measured."""
    found = []
    for name, touched in speeds.items():
        batch, precision, *rows = name.split()
        everything = speeds.get(f"{batch} {precision} all")
        if rows == ["touched"] and everything:
            found.append(
                f"batch {int(batch):,}, {precision}: `rows: all` takes {touched / everything:.2f} "
                "times as long as `touched`" + (", bar 1.15" if int(batch) == 65536 else "")
            )
    return found


def beside_our_allocator(speeds: dict[str, float]) -> list[str]:
    """Ratios to SparseAdam with our launcher's allocator setting; they have no bar."""
    found = []
    for name, peer in speeds.items():
        batch, trainer, *setting = name.split()
        if trainer == "sparse_adam" and setting:
            ours = {
                precision: speeds.get(f"{batch} {precision} all") for precision in floors.PRECISIONS
            }
            shown = ", ".join(f"{p} {speed / peer:.2f}" for p, speed in ours.items() if speed)
            if shown:
                found.append(f"batch {int(batch):,}: {shown}")
    return found


def cell(value: float | None, digits: int = 2) -> str:
    """A formatted number; empty for None."""
    return "" if value is None else f"{value:.{digits}f}"


def draw(speeds: dict[str, float], measured_floors: dict, path: Path) -> None:
    """Samples/s by batch size, with the MLP alone as a line above each bar."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    batches = sorted({int(name.split()[0]) for name in speeds})
    shown = {
        "dense_adam": ("plain PyTorch, dense Adam", "0.8"),
        "sparse_adam": ("plain PyTorch, SparseAdam", "0.6"),
        "fp32 all": ("stampede, fp32", "tab:blue"),
        "bf16 all": ("stampede, bf16", "tab:orange"),
    }
    width = 0.8 / len(shown)
    for number, (key, (label, color)) in enumerate(shown.items()):
        places = [place + number * width for place in range(len(batches))]
        heights = [speeds.get(f"{batch} {key}", 0.0) / 1e3 for batch in batches]
        axes.bar(places, heights, width, label=label, color=color)
        if key.endswith("all"):
            tops = [
                floors.mlp_samples_per_second(measured_floors, key.split()[0], batch) / 1e3
                for batch in batches
            ]
            left, right = ([p + side * width / 2 for p in places] for side in (-1, 1))
            axes.hlines(tops, left, right, color="black", linewidth=1.5)
    axes.plot([], [], color="black", label="the MLP alone")
    axes.set_xticks([p + 1.5 * width for p in range(len(batches))], [f"{b:,}" for b in batches])
    axes.set(xlabel="batch", ylabel="thousand samples/s", title=f"DeepFM, {CORES} cores")
    # Room for the legend above the bars.
    axes.set_ylim(0, 1.35 * axes.get_ylim()[1])
    axes.legend(loc="upper left", ncols=3)
    axes.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=120)
