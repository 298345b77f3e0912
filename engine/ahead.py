"""Batches on their way to the devices that need them, while the one before is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from stampede.data import Batch
from stampede.engine.pulse import Pulse
from stampede.models import EmbeddingFront
from stampede.models.embedding_front import SentIds


class SentBatch(NamedTuple):
    """This rank's part of a global batch on its device, its ids on their way to their rows.

    Attributes:
        batch: the part.
        ids: to be looked up once.
        ready: on a GPU, when the batch is there.
        position: of the batches after this one.
    """

    batch: Batch
    ids: SentIds
    ready: torch.cuda.Event | None = None
    position: Any = None

    def received(self) -> Batch:
        """The batch, for the current stream."""
        if self.ready is not None:
            here = torch.cuda.current_stream()
            here.wait_event(self.ready)
            self.batch.record_stream(here)
            self.ids.context.record_stream(here)
        return self.batch


def send(batch: Batch, front: EmbeddingFront, device: torch.device) -> SentBatch:
    """Copy a batch to the device and send its ids."""
    batch = batch.to(device, non_blocking=True)
    return SentBatch(batch, front.send(batch.sparse))


def sent_ahead(
    batches: Iterable[Batch],
    front: EmbeddingFront,
    device: torch.device,
    position: Callable[[], Any] | None = None,
    pulse: Pulse | None = None,
) -> Iterator[SentBatch]:
    """Send each batch before the one ahead of it is handed out.

    Args:
        position: tells how far `batches` have come; they are a batch further than their consumer.
        pulse: is told of reading and of sending.
    """
    source, ahead = iter(batches), None
    pulse = pulse or Pulse()
    # On a GPU all this happens on a stream of its own: TorchRec waits for the device when it sends
    # ids, and on this stream the steps that are queued need not end first. What is launched here is
    # small, and is to go before what these steps still have to launch.
    aside = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
    while True:
        with torch.cuda.stream(aside):
            pulse.beat("reading the next batch")
            batch = next(source, None)
            pulse.beat("sending ids")
            sent = None if batch is None else send(batch, front, device)
            if sent is not None and aside is not None:
                sent = sent._replace(ready=aside.record_event())
            if sent is not None and position is not None:
                sent = sent._replace(position=position())
            pulse.beat("between steps")
        if ahead is not None:
            yield ahead
        if sent is None:
            return
        ahead = sent
