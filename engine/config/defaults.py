"""Configurations that older versions saved: keys that came later, and keys that are gone."""

from __future__ import annotations

from typing import Any

from stampede.settings import Section

# Keys of older versions, which their runs and checkpoints hold.
_GONE = (
    "checkpoint.force",
    "evaluate.memory_gb",
    "train.on_divergence.rollbacks",
    "train.on_divergence.dense_lr_factor",
)


def without_gone_keys(saved: dict[str, Any]) -> dict[str, Any]:
    """A whole configuration that was saved, without the keys that no version has any more."""
    return _without(saved, "")


def _without(values: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {
        key: _without(value, f"{prefix}{key}.") if isinstance(value, dict) else value
        for key, value in values.items()
        if prefix + key not in _GONE
    }


def with_defaults(saved: dict[str, Any], section: Section) -> dict[str, Any]:
    """A configuration that was saved, and the default of every key that came later.

    What a run does by default is what it did before it could be told otherwise.

    Args:
        saved: of this section, as JSON has it; it may be of an older version.
        section: of now. Where `saved` has a section of another kind, nothing is added there: what
            it lacks came with the kind.
    """
    fields = type(section).model_fields
    absent = {
        name: field.get_default(call_default_factory=True)
        for name, field in fields.items()
        if name not in saved and not field.is_required()
    }
    added = section.model_copy(update=absent).model_dump(mode="json", include=set(absent))
    filled = {**added, **saved}
    for name, field in fields.items():
        part, before = getattr(section, name), saved.get(name)
        if not isinstance(part, Section) or not isinstance(before, dict):
            continue
        kind = field.discriminator
        if kind is None or before.get(kind) == getattr(part, kind):
            filled[name] = with_defaults(before, part)
    return filled
