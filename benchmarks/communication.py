"""Share of a training step that gloo processes on one machine spend in communication.

Two figures, for ranks with one thread each. "waiting": the time a rank is blocked in a collective,
from timers around `Work.wait`, which all calls of torch.distributed go through; it includes waiting
for ranks that compute longer and, if there are more ranks than cores, for a core. "exchange": the
time of the same collectives on buffers of the same sizes without other work. Both are shares of the
time of the steps with the last flush; means over the ranks.

    python benchmarks/communication.py
"""

from __future__ import annotations

import argparse
import inspect
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from clicks import IDS, write_clicks
from report import Report, command_line, markdown, wrapped
from timing import Stopwatch, seconds_of
from torch import Tensor
from torch.utils import _pytree as pytree
from tqdm import tqdm
from training import training

from support.ranks import run_ranks

ROWS = 1 << 18
RANKS = (2, 4)
# Whole epochs.
STEPS = {8192: 32, 65536: 4}
PLANS = ("table_wise", "row_wise")

COLLECTIVES = (
    "all_to_all_single",
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter",
    "reduce_scatter_tensor",
)

# Names of a rank's input in the different collectives.
_INPUTS = ("input", "tensor", "input_tensor", "input_list")


def communication(options: argparse.Namespace, report: Report) -> str:
    """Shares of a step, by number of processes, plan and batch size."""
    rows, ids = (16_384, 200_000) if options.quick else (ROWS, IDS)
    ranks, plans = (RANKS[:1], PLANS[:1]) if options.quick else (RANKS, PLANS)
    steps = {4096: 2} if options.quick else STEPS
    clicks = write_clicks(options.folder, rows, ids)
    found: dict[str, dict] = {}
    points = [(n, plan, batch) for n in ranks for batch in steps for plan in plans]
    # The plan matters less where the dense layers take most of the step.
    points = [point for point in points if point[1:] != ("row_wise", max(STEPS))]
    for world_size, plan, batch in tqdm(points, desc="communication", unit="run", ncols=100):
        overrides = [f"data.path={clicks}", f"train.batch_size={batch}", f"sharding.plan={plan}"]
        overrides.append(f"evaluate.batch_size={batch}")
        each = run_ranks(world_size, train_and_wait, overrides, steps[batch])
        report.others.mine(sum(rank.pop("processor_seconds") for rank in each))
        found[f"{world_size} {plan} {batch}"] = summarize(each, steps[batch])
        report.add(rows=rows, ids=ids, communication=found)
    return tables(report.found)


class Recorder:
    """Records the collectives of a step, to run them again without other work between them.

    Attributes:
        sent_bytes: of this rank, by collective.
    """

    def __init__(self) -> None:
        self._calls: list[Callable[[], Any]] = []
        self.sent_bytes: Counter[str] = Counter()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record all collectives inside the context."""
        with ExitStack() as stack:
            for name in COLLECTIVES:
                recorded = self._recorded(name, getattr(dist, name))
                stack.enter_context(mock.patch.object(dist, name, recorded))
            yield

    def _recorded(self, name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            # Buffers of the same shape: the real ones may be freed or in use.
            again, more = pytree.tree_map_only(Tensor, torch.zeros_like, (arguments, options))
            self._calls.append(partial(collective, *again, **more))
            given = inspect.signature(collective).bind(*arguments, **options).arguments
            handed_in = pytree.tree_leaves([given.get(key) for key in _INPUTS])
            self.sent_bytes[name] += sum(part.nbytes for part in handed_in if part is not None)
            return collective(*arguments, **options)

        return call

    def run_again(self) -> None:
        """Run all recorded collectives, one after the other."""
        for call in self._calls:
            if (work := call()) is not None:
                work.wait()


def train_and_wait(overrides: list[str], steps: int) -> dict[str, Any]:
    """Train as one of several ranks.

    Returns:
        Seconds of the steps with the last flush, seconds and number of this rank's waits in
        collectives, seconds of the collectives alone, bytes sent in a step, and the processor time
        of this process.
    """
    watch, recorder = Stopwatch(), Recorder()
    with training(overrides) as job:
        job.seconds(2)
        with recorder.recording():
            job.step()
        job.flush()
        dist.barrier()
        with watch.watching(dist.Work, "wait", "waited"):
            total = job.seconds(steps)
        dist.barrier()
        recorder.run_again()
        dist.barrier()
        alone = seconds_of(lambda: [recorder.run_again() for _ in range(steps)])
    return {
        "seconds": total,
        "waited": watch.seconds["waited"],
        "waits": watch.calls["waited"],
        "alone": alone,
        "sent_bytes": dict(recorder.sent_bytes),
        "processor_seconds": time.process_time(),
    }


def summarize(ranks: list[dict], steps: int) -> dict:
    """Means over the ranks."""
    seconds, sent = statistics.mean(rank["seconds"] for rank in ranks), Counter()
    for rank in ranks:
        sent.update(rank["sent_bytes"])
    return {
        "steps": steps,
        "seconds_per_step": seconds / steps,
        "waiting_share": statistics.mean(rank["waited"] / rank["seconds"] for rank in ranks),
        "exchange_share": statistics.mean(rank["alone"] / rank["seconds"] for rank in ranks),
        "waits_per_step": ranks[0]["waits"] / steps,
        "sent_bytes_per_step": {name: round(sent[name] / len(ranks)) for name in sorted(sent)},
    }


def tables(found: dict) -> str:
    """The results as Markdown."""
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
    return f"{wrapped(said)}\n\n{markdown(heads, rows)}"


if __name__ == "__main__":
    command_line(communication)
