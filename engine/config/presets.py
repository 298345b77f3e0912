"""Presets: values for the keys of a configuration that are not given."""

from __future__ import annotations

from typing import Any, Literal

Preset = Literal["auto", "paper"]

# Settings of the CowClip paper and its code (arXiv 2204.06240) at batch 1024, scaled by its rule.
_PAPER: dict[str, Any] = {
    "optim": {
        "embedding": {
            "lr": 1e-4,
            "l2": 1e-5,
            "schedule": {"warmup": 0.0, "decay": "constant"},
            "betas": [0.9, 0.999],
        },
        "dense": {
            "lr": 8e-4,
            "schedule": {"warmup": 1.0, "decay": "constant"},
            "betas": [0.9, 0.999],
        },
        "scaling": {"rule": "cowclip", "base_batch_size": 1024},
    },
    "model": {"first_order_scale": 1.0, "dropout": 0.0, "initial_bias": "zero"},
    "train": {"batch_size": 8192, "epochs": 10, "averaging": 0, "replay": 0},
    "evaluate": {"every_epochs": 1, "patience": 0, "metric": "auc", "calibrate": False},
}

# What differs for Avazu; the bound is the paper's for batches from 4096 on.
_PAPER_ON_AVAZU: dict[str, Any] = {
    "optim": {"embedding": {"clip": {"bound": 1e-4}}, "dense": {"lr": 1e-4}}
}

_WITH_BETAS = (None, "adam", "rowwise_adam")


def with_preset(values: dict[str, Any]) -> dict[str, Any]:
    """The values of a configuration file, completed by its `preset`; the check comes later."""
    return below_old_runs(values) if values.get("preset", "auto") == "paper" else values


def below_old_runs(values: dict[str, Any]) -> dict[str, Any]:
    """A configuration completed by the paper's values, which all runs used before the recipe."""
    kind = at(values, "data.kind")
    below = merged(_PAPER, _PAPER_ON_AVAZU if kind == "avazu" else {})
    if kind in ("criteo_kaggle", "criteo_1tb", "avazu", "table"):
        below = merged(below, {"data": {"features": "paper"}})
    optimizer = at(values, "optim.embedding.optimizer")
    embedding = below["optim"]["embedding"]
    if optimizer not in _WITH_BETAS:
        del embedding["betas"]
    # The paper's warm-up is an epoch, whose steps only the recipe can count.
    if at(values, "optim.dense.schedule.unit") == "steps":
        del below["optim"]["dense"]["schedule"]["warmup"]
    return merged(below, values)


# Keys of earlier versions, with the values that said that a run did not use them; `...` stands for
# all values of a key that changed nothing in the model.
_REMOVED = (
    ("optim.embedding", {"ar_alpha": 0.0, "min_shrinkage": 0.1, "begin_again": "never"}),
    ("optim.embedding.clip", {"quantile": None}),
    ("train", {"on_divergence": ..., "clip_stats_every": ...}),
)


def without_removed(saved: dict[str, Any]) -> dict[str, Any]:
    """A saved configuration without the removed keys, except those that its run made use of."""
    saved = merged(saved, {})
    for section, unused in _REMOVED:
        found = at(saved, section)
        if isinstance(found, dict):
            for key, value in unused.items():
                if value is ... or found.get(key, value) == value:
                    found.pop(key, None)
    return saved


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """A new dictionary of both, section by section; values of `above` win."""
    found = {
        name: merged(part, {}) if isinstance(part, dict) else part for name, part in below.items()
    }
    for name, value in above.items():
        both = isinstance(value, dict) and isinstance(found.get(name), dict)
        found[name] = merged(found[name], value) if both else value
    return found


def at(values: Any, key: str) -> Any:
    """The value at a dotted key of nested sections; None if it is absent."""
    for name in key.split("."):
        values = values.get(name) if isinstance(values, dict) else None
    return values


def flat_keys(values: Any, prefix: str = "") -> dict[str, Any]:
    """Values of nested sections by dotted key, such as `train.batch_size`."""
    if not isinstance(values, dict):
        return {prefix[:-1]: values}
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat.update(flat_keys(value, f"{prefix}{key}."))
    return flat
