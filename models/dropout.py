"""Dropout whose masks depend on the sample and the step, not on how the batch is divided."""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import torch
from torch import Tensor, nn

from stampede.models import cpu

# SplitMix64: the increment, then shifts and factors of the mixing (Steele, Lea, Flood, "Fast
# splittable pseudorandom number generators", OOPSLA 2014), as signed integers.
_STEP = 0x9E3779B97F4A7C15 - 2**64
_MIX = [(30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64), (31, 1)]
# Of 32 bits: MurmurHash3's, after a Weyl sequence over the elements of a sample.
_ELEMENT = 0x9E3779B1 - 2**32
_FACTORS = 0x85EBCA6B - 2**32, 0xC2B2AE35 - 2**32


def seed_of(*numbers: int) -> int:
    """A seed made of int64 numbers, as an int64 number."""
    packed = struct.pack(f"{len(numbers)}q", *numbers)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little", signed=True)


def sample_keys(seed: int, step: int, rows: Tensor) -> Tensor:
    """A key for each sample of a training step: `[n]` int64.

    Args:
        rows: `[n]` int64, the sample's row in the training part.
    """
    drawn = seed_of(seed, step)
    if rows.device.type == "cpu" and cpu.available():
        # Torch's operations would take a tenth of the time of a small batch's step.
        return torch.ops.stampede_dense.sample_keys(rows.contiguous(), drawn)
    return _mixed(rows * _STEP + drawn)


class Draws:
    """The keys of the samples that pass through a network, and the masks drawn so far."""

    def __init__(self) -> None:
        self.begin(None)

    def begin(self, keys: Tensor | None) -> None:
        """Begin a pass; without keys, masks come from torch's generator."""
        self.keys, self.masks = keys, 0

    def mask(self) -> tuple[Tensor, int]:
        """The keys, and the number of the next mask of this pass."""
        self.masks += 1
        return self.keys, self.masks


class SampleDropout(nn.Dropout):
    """`nn.Dropout` with masks drawn for each sample, see `dropped`."""

    def __init__(self, p: float, draws: Draws) -> None:
        super().__init__(p)
        self.draws = draws

    @property
    def drops(self) -> bool:
        """Whether it drops anything now."""
        return self.training and self.p > 0

    @property
    def has_keys(self) -> bool:
        """Whether its masks are drawn for each sample."""
        return self.draws.keys is not None

    def forward(self, input: Tensor) -> Tensor:
        """The input times 0 or `1 / (1 - p)`; its first dimension goes over the samples."""
        if self.drops and self.has_keys:
            return dropped(input, *self.draws.mask(), self.p)
        return super().forward(input)


def draw_by_sample(network: nn.Module) -> Draws | None:
    """Replace every `nn.Dropout` of a network, in place; None if there is none."""
    draws = Draws()
    # By id: a module may be there several times.
    found: dict[int, SampleDropout] = {}
    for module in list(network.modules()):
        for name, child in list(module._modules.items()):
            if type(child) is nn.Dropout:
                one = found.setdefault(id(child), SampleDropout(child.p, draws))
                setattr(module, name, one)
    return draws if found else None


def dropped(values: Tensor, keys: Tensor, mask: int, p: float) -> Tensor:
    """`values` times 0 with probability p, else times `1 / (1 - p)`.

    An element's factor is a hash of its sample's key, the number of the mask and the element's
    place in the sample, on a CPU and on a GPU alike.

    Args:
        values: `[n * k, ...]`, sample after sample. If n does not divide the first dimension, all
            of it counts as the first sample's.
        keys: `[n]` int64, see `sample_keys`.
    """
    if not values.numel():
        return values
    if values.shape[0] % len(keys):
        keys = keys[:1]
    if cpu.computing_dtype(values) is not None:
        return _Dropped.apply(values, keys, mask, p)
    return (values * _factors(values, keys, mask, p)).to(values.dtype)


class _Dropped(torch.autograd.Function):
    """The C++ kernel; the backward pass draws the mask again."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, keys: Tensor, mask: int, p: float) -> Tensor:
        ctx.mask = keys, mask, p
        return cpu.dropout_(values.clone(memory_format=torch.contiguous_format), *ctx.mask)

    @staticmethod
    @cpu.no_double_backward
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad = grad.clone(memory_format=torch.contiguous_format)
        return cpu.dropout_(grad, *ctx.mask), None, None, None


def _factors(values: Tensor, keys: Tensor, mask: int, p: float) -> Tensor:
    """0 or `1 / (1 - p)` for every element, in plain torch; see `cpu.dropout_`."""
    key = _mixed(keys + ((mask * _STEP + 2**63) % 2**64 - 2**63))
    low, high = key.to(torch.int32)[:, None], (key >> 32).to(torch.int32)[:, None]
    places = torch.arange(values.numel() // len(keys), dtype=torch.int32, device=values.device)
    mixed = places * _ELEMENT + low
    mixed = (mixed ^ _shifted(mixed, 16, 32)) * _FACTORS[0] ^ high
    mixed = (mixed ^ _shifted(mixed, 13, 32)) * _FACTORS[1]
    mixed = mixed ^ _shifted(mixed, 16, 32)
    # An unsigned comparison, by moving both sides.
    is_kept = (mixed ^ -(2**31)) >= cpu.dropout_threshold(p) - 2**31
    return (is_kept * (1 / (1 - p))).view(values.shape)


def _mixed(keys: Tensor) -> Tensor:
    for shift, factor in _MIX:
        keys = (keys ^ _shifted(keys, shift, 64)) * factor
    return keys


def _shifted(values: Tensor, shift: int, bits: int) -> Tensor:
    """The unsigned shift to the right, of signed integers."""
    return (values >> shift) & ((1 << (bits - shift)) - 1)
