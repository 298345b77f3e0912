"""Dense layers in each precision, and how near they are to float64."""

import torch

PRECISIONS = {"fp32": (torch.float32, 1e-5), "bf16": (torch.bfloat16, 2e-2)}


def autocast(precision):
    return torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16")


def assert_near(found, exact, precision):
    # A rounding is as large as what was rounded, which sums of it need not be.
    largest = exact.abs().max().item() if exact.numel() else 0.0
    tolerance = PRECISIONS[precision][1]
    torch.testing.assert_close(
        found.double(), exact.double(), rtol=tolerance, atol=tolerance * max(largest, 1e-6)
    )


def rounded(tensor, precision):
    """Values that the products take as they are."""
    return tensor.to(PRECISIONS[precision][0]).float()
