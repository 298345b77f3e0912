"""Scores for all samples of a model that was trained on a share of the negatives."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional


def corrected(logits: Tensor, negative_rate: float) -> Tensor:
    """Logits among all samples, of logits among those that a log kept.

    A log that keeps every click but only a share w of the other samples has clicks with
    probability p where all samples have them with probability p / (p + (1 - p) / w), which shifts
    the logit by log(w) (He et al., "Practical Lessons from Predicting Clicks on Ads at Facebook",
    6.3). With several goals the samples without the first one are thinned out, and the others
    happen only after it: theirs become p / (p1 + (1 - p1) / w), p1 being that of the first.

    Args:
        logits: `[n]`, or `[n, goals]`.
        negative_rate: w, above 0 and at most 1; 1 changes nothing.
    """
    if negative_rate == 1.0:
        return logits
    shift = math.log(negative_rate)
    if logits.ndim == 1:
        return logits + shift
    first, others = logits[:, :1], logits[:, 1:]
    # (1 - p1) + w * (p1 - p), with which p / (p1 + (1 - p1) / w) has the odds w * p to one.
    against = torch.sigmoid(first) - torch.sigmoid(others)
    against = torch.sigmoid(-first) + against * negative_rate
    against = against.clamp_min(torch.finfo(logits.dtype).tiny)
    shifted = functional.logsigmoid(others) + shift - against.log()
    return torch.cat([first + shift, shifted], 1)
