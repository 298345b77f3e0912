"""Batches on their way to the devices that need them, while the one before is computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from stampede.data import Batch
from stampede.models import EmbeddingFront
from stampede.models.embedding_front import SentIds


class SentBatch(NamedTuple):
    """This rank's part of a global batch on its device, its ids on their way to their rows.

    Attributes:
        batch: the part.
        ids: to be looked up once.
    """

    batch: Batch
    ids: SentIds


def send(batch: Batch, front: EmbeddingFront, device: torch.device) -> SentBatch:
    """Copy a batch to the device and send its ids; both go on while others compute."""
    if device.type == "cuda" and batch.label.device != device:
        batch = _copied_aside(batch, device)
    else:
        batch = batch.to(device)
    return SentBatch(batch, front.send(batch.sparse))


def sent_ahead(
    batches: Iterable[Batch], front: EmbeddingFront, device: torch.device
) -> Iterator[SentBatch]:
    """Send each batch before the one ahead of it is handed out.

    The source is a batch further than its consumer.
    """
    ahead = None
    for batch in batches:
        sent = send(batch, front, device)
        if ahead is not None:
            yield ahead
        ahead = sent
    if ahead is not None:
        yield ahead


def _copied_aside(batch: Batch, device: torch.device) -> Batch:
    """A copy, made on a stream of its own: the steps that are queued need not end first."""
    here, aside = torch.cuda.current_stream(device), _copying(device)
    with torch.cuda.stream(aside):
        copied = batch.to(device, non_blocking=True)
    here.wait_stream(aside)
    copied.record_stream(here)
    return copied


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _copying(device: torch.device) -> torch.cuda.Stream:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]
