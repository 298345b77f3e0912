"""The training of `parity` in plain float64 PyTorch, and how far another one is from it."""

import math
from functools import cache

from support.parity import DEFAULTS, Holder, build_collection, global_batch, sharded_loss
from support.unsharded import Unsharded


def train_reference(case, start, meanwhile=None, gradient_factor=1, force_counts=None, **changes):
    """The same in float64; `changes` make it another rule, for negative tests.

    Args:
        meanwhile: called with the tables and the number of each step, after it.
        gradient_factor: what all gradients are multiplied by.
        force_counts: as if every row of a batch had occurred so often.
    """
    settings = {**DEFAULTS, **case.arguments, "rule": case.rule, **changes}
    settings.pop("on_nonfinite", None)
    if case.rule not in ("adam", "rowwise_adam"):
        settings.setdefault("eps", 1e-8)
    model = Unsharded(Holder(build_collection(case, "cpu")), None, force_counts, **settings)
    paths = {name: path for path, (_, name) in model.parts.items()}
    model.copy_tables({path: start[name] for name, path in paths.items()})
    for step in range(1, case.steps + 1):
        batch = global_batch(case, step)
        model.step(lambda plain, b=batch: sharded_loss(case, plain, b) * gradient_factor)
        if meanwhile is not None:
            meanwhile(model.reference, step)
    tables = model.reference
    for kind in ("weights", "first", "second"):
        values = getattr(tables, kind)
        setattr(tables, kind, {name: values[path] for name, path in paths.items()})
    return tables


_STARTS = {}
# The largest deviation, of the largest movement, that float32 may make in some steps.
TOLERANCE = 1e-4


def start_of(case, found):
    """The tables that a case begins with, which are the same on any number of processes."""
    start = _STARTS.setdefault(case, found["start"])
    assert all(start[name].equal(found["start"][name]) for name in start)
    return start


@cache
def reference_of(case, **options):
    """See `train_reference`; from the start of a case that `start_of` has seen."""
    return train_reference(case, _STARTS[case], **options)


def assert_follows(case, found, **options):
    """Check a result of `parity` against that in float64, which is returned."""
    start, expected = start_of(case, found), reference_of(case, **options)
    assert deviation(case, start, found["weights"], expected) < TOLERANCE
    assert state_deviation(case, found["states"], expected) < TOLERANCE
    return expected


def deviation(case, start, weights, reference):
    """Largest difference of any weight, relative to the largest movement."""
    movement = max(float((reference.weights[n] - start[n].double()).abs().max()) for n in start)
    worst = max(float((weights[n].double() - reference.weights[n]).abs().max()) for n in start)
    return worst / movement if math.isfinite(worst) else math.inf


def state_deviation(case, states, reference):
    """Largest difference of any state, each relative to the largest value of its kind."""
    worst = 0.0
    second = {"adam": "exp_avg_sq", "rowwise_adam": "exp_avg_sq"}.get(case.rule)
    pairs = []
    if case.rule in ("adam", "rowwise_adam") or case.arguments.get("momentum"):
        pairs.append(("momentum1", reference.first))
    if second is not None:
        pairs.append((second, reference.second))
    if case.rule in ("adagrad", "rowwise_adagrad"):
        pairs.append(("momentum1", reference.second))
    for key, expected in pairs:
        largest = max(float(value.abs().max()) for value in expected.values())
        for name in case.names:
            got = states[name][key].double()
            target = expected[name] if got.ndim == 2 else expected[name][:, 0]
            worst = max(worst, float((got - target).abs().max()) / largest)
    return worst
