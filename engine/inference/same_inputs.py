"""Whether what is to be scored means what the inputs of a model meant."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from stampede.data import DataError
from stampede.data.learning.row_meanings import vocabulary_fingerprint
from stampede.data.prepared.manifest import Manifest, read_manifest
from stampede.engine.errors import RunFolderError


class ModelInputs(Protocol):
    """What a checkpoint says of its inputs."""

    @property
    def vocabulary_sizes(self) -> Mapping[str, int]:
        """Rows of each field's table, by field."""

    @property
    def numbers(self) -> int:
        """Number of numeric inputs."""

    @property
    def vocabulary_sha256(self) -> str | None:
        """See `vocabulary_fingerprint`; None where the checkpoint does not say."""


def check_trained_with(folder: Path, inputs: ModelInputs, model: Path, remedy: str) -> Manifest:
    """Refuse vocabularies and ranges that are not those that a model was trained with.

    Args:
        folder: a prepared folder, perhaps without rows.
        inputs: of the model; where they lack the fingerprint, sizes are compared.
        model: the checkpoint, for the message.
        remedy: what to do where the folder is damaged, or another one.

    Returns:
        Manifest of the folder.

    Raises:
        RunFolderError, DataError: they are not, or are damaged.
    """
    manifest = read_manifest(folder, remedy)
    # First, as it bounds what the vocabularies may hold.
    check_same_inputs(manifest, inputs, folder, model)
    expected = inputs.vocabulary_sha256
    if expected is not None and vocabulary_fingerprint(folder, remedy) != expected:
        raise RunFolderError(
            f"{folder}: these are not the vocabularies that {model} was trained with (their "
            f"SHA-256 differs), so nobody knows what its ids are; {remedy}"
        )
    return manifest


def check_same_inputs(found: Manifest, inputs: ModelInputs, where: Path, model: Path) -> None:
    """Refuse data whose fields are not those that a model was trained on.

    Args:
        found: the data's.
        inputs: of the model.
        where: the data, for the message.
        model: the checkpoint, for the message.

    Raises:
        DataError: names the first difference.
    """
    fields = {entry.name: entry.rows for entry in found.fields}
    for name, rows in inputs.vocabulary_sizes.items():
        if name not in fields:
            has = ", ".join(fields)
            raise DataError(f"{where}: no id field {name!r}, which {model} needs; it has {has}")
        if fields[name] != rows:
            raise DataError(
                f"{where}: the table of {name!r} has {fields[name]:,} rows, but {rows:,} in "
                f"{model}: its vocabulary is another one. Score the raw files, or prepare them "
                "with `stampede apply`"
            )
    if list(fields) != list(inputs.vocabulary_sizes):
        raise DataError(
            f"{where}: the id fields are {', '.join(fields)}, but in {model} they are "
            f"{', '.join(inputs.vocabulary_sizes)}"
        )
    if len(found.numbers) != inputs.numbers:
        raise DataError(f"{where}: {len(found.numbers)} numbers, but {inputs.numbers} in {model}")


def check_same_vocabularies(found: Manifest, kept: Manifest, where: Path) -> None:
    """Refuse prepared data whose rows of tables mean other ids than those of a run.

    Raises:
        DataError: they do.
    """
    learned, theirs = (
        {Path(entry.name).name: entry.sha256 for entry in manifest.learned}
        for manifest in (kept, found)
    )
    differing = sorted(name for name in learned if theirs.get(name, learned[name]) != learned[name])
    if learned and theirs and differing:
        raise DataError(
            f"{where}: its {differing[0]} is not the one that the model was trained with, so its "
            "ids mean something else. Score the raw files, or prepare them with "
            "`stampede apply`"
        )
