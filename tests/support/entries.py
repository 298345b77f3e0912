"""Entries of tensors in a checkpoint's files, replaced by someone who knows all checksums."""

import io

import torch

from stampede.engine.checkpoint import verify
from stampede.engine.errors import RunFolderError
from support.checkpoints import WEIGHTS, sign, values_of
from support.jobs import run_small

TENSOR = f"model.{WEIGHTS}"


def zipped(content):
    """As torch saves it."""
    stream = io.BytesIO()
    torch.save(content, stream)
    return stream.getvalue()


def put_into_entry(path, content, tensor=TENSOR):
    """Let a tensor's entry be these bytes, all checksums right."""
    values = values_of(path)
    (chunk,) = values["tensors"][tensor]["chunks"]
    file = path / chunk["file"]
    chunk["start"] = file.stat().st_size
    # As long as the numbers at least, which a manifest must say.
    chunk["bytes"] = max(len(content), 7 * 12 * 4)
    file.write_bytes(file.read_bytes() + content.ljust(chunk["bytes"], b"\0"))
    sign(path, values)
    verify(path)


def put_no_random_state(path, rank):
    """Let the state of a rank's random generator be none."""
    put_into_entry(path, zipped(torch.full_like(torch.get_rng_state(), 255)), f"random.rank_{rank}")


def refusal(folder, overrides, world_size=1):
    """The sentence with which a small run refuses to begin; also as a rank of several."""
    try:
        run_small(folder, overrides, world_size)
    except RunFolderError as failure:
        return str(failure)
    return "not refused"
