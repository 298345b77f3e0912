"""Times of a window: of a rank, and of all ranks together."""

import numpy as np
import pytest

from stampede.engine.monitor import StepTime, sentence_of, together, window_of


def steps_of(computing, waiting=0.0):
    """Steps that read for a tenth of a second, compute and wait in a collective."""
    return [
        StepTime(
            {"reading the next batch": 0.1, "computing": one, "adding up the loss": waiting},
            waited=waiting,
        )
        for one in computing
    ]


def test_percentiles_and_means_of_a_rank():
    computing = np.random.default_rng(0).permutation(np.arange(101.0))
    window = window_of(steps_of(computing, waiting=0.4), 7)
    assert window.percentiles == pytest.approx(
        {"p50": 50.5, "p90": 90.5, "p99": 99.5, "max": 100.5}
    )
    assert window.steps == 101 and window.mean == pytest.approx(50.5)
    assert sum(window.phases.values()) == pytest.approx(window.mean)
    assert window.own == pytest.approx(50.1)
    assert window.shares["data_share"] == pytest.approx(0.1 / 50.5)
    assert window.shares["communication_share"] == pytest.approx(0.4 / 50.5)


def test_the_slowest_rank_is_the_one_that_waits_least():
    """Steps of all ranks last equally long, as they wait for each other."""
    windows = [
        window_of(steps_of([1.0], 2.0), 10),
        window_of(steps_of([2.9], 0.1), 30),
        window_of(steps_of([2.0], 1.0), 20),
    ]
    assert len({round(window.mean, 9) for window in windows}) == 1
    found = together(windows)
    assert found["slowest_seconds"] == pytest.approx({"rank": 1, "own": 3.0, "others": 1.6})
    assert found["peak_memory_bytes"] == 30
    assert found["communication_seconds"] == pytest.approx(3.1 / 3)
    assert sum(found["phase_seconds"].values()) == pytest.approx(found["step_seconds"]["mean"])
    # A resumed run is compared without them.
    assert all(name.endswith(("_seconds", "_bytes")) for name in found)


def test_percentiles_of_all_ranks_are_the_worst():
    found = together([window_of(steps_of([1.0, 9.0]), 0), window_of(steps_of([5.0, 5.0]), 0)])
    assert found["step_seconds"]["p50"] == pytest.approx(5.1)
    assert found["step_seconds"]["max"] == pytest.approx(9.1)


def test_the_sentence_for_the_console():
    line = {"step": 1500, **together([window_of(steps_of([0.8], 0.1), 2 * 10**9)])}
    assert sentence_of(line, 1) == (
        "step 1,500: p50 1 s, p90 1 s, p99 1 s, max 1 s; reading 10.0%; memory 2.00 GB"
    )
    windows = [window_of(steps_of([0.2], 0.2), 0), window_of(steps_of([0.4]), 0)]
    assert sentence_of({"step": 3, **together(windows)}, 2) == (
        "step 3: p50 500 ms, p90 500 ms, p99 500 ms, max 500 ms; reading 20.0%; "
        "communication 20.0%; slowest rank 1: 500 ms of its own, the others 300 ms; memory 0 MB"
    )
