"""Settings of all tests."""

import gc
import logging
import os
from collections import Counter

# The tensors are small: threads would cost more than they bring, many times more on a busy machine.
# Of processes that tests start, too.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# As launched runs with `train.reproducible` set it; tests run some of them in this process.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
# Spark and HDFS live for seconds: Java's second compiler would cost more than it brings, half of
# all that they compute.
os.environ.setdefault("JAVA_TOOL_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")

import pytest
from hypothesis import HealthCheck, settings

# Until all is imported: of that nothing is garbage, and there is a million of it.
gc.disable()

# The same cases in every run, so that what fails is a matter of the change at hand. Others are
# tried with HYPOTHESIS_PROFILE=random, and by the soaks, whose seeds are their own.
# No case and no drawing of one has a time limit: on a busy machine any may take seconds.
UNTIMED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("same", derandomize=True, **UNTIMED)
settings.register_profile("random", **UNTIMED)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

# Files whose tests take longest, which begin first: no worker is left alone with one at the end.
LONGEST = (
    "test_cluster_walk.py",
    "test_on_spark.py",
    "test_every_store.py",
    "test_manual_commands.py",
    "test_object_stores.py",
    "test_every_plan.py",
    "test_loop.py",
    "test_gpu_script.py",
    "test_examples.py",
    "test_tune.py",
    "test_restarts.py",
    "test_onnx_file.py",
    "test_wheel.py",
    "test_stores.py",
    "test_manual.py",
)


def pytest_configure(config):
    """Where there is no GPU, Triton's kernels run in its interpreter.

    That must be said before anything imports Triton, as TorchRec does.
    """
    # What hands the tests to workers runs none, and they wait for it.
    if config.option.dist != "no" and not hasattr(config, "workerinput"):
        return
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    seen = Counter()
    for item in items:
        if mark := item.get_closest_marker("cases"):
            function = item.nodeid.partition("[")[0]
            if seen[function] >= mark.args[0]:
                item.add_marker("wide")
            seen[function] += 1
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(LONGEST)))


def pytest_collection_finish():
    """Optimizers look for modules among all objects: let them not see a million of imports."""
    from support import small_runs

    small_runs.leave_out()
    # TorchRec logs all that its planner is given, which pytest would keep.
    logging.getLogger("MethodLogger-NullHandler").setLevel("WARNING")
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def few_objects():
    """What a file's tests have imported is left out of the search, too."""
    yield
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    gc.unfreeze()


@pytest.fixture
def drawing(monkeypatch):
    """Runs draw their pictures."""
    from support import small_runs

    engine = "stampede.engine"
    monkeypatch.setattr(f"{engine}.results.run_folder.draw_curve", small_runs.draw_curve)
    monkeypatch.setattr(f"{engine}.periods.results.draw_periods", small_runs.draw_periods)
