"""An update rule and a clip of one's own: Lion (arXiv 2302.06675), and a root of the count."""

from dataclasses import dataclass

from torch import Tensor

from stampede.optim import Clip, CowClipOptimizer, RowStep, Rule, register_clip, register_rule


@register_rule("lion")
@dataclass(frozen=True)
class Lion(Rule):
    """`w = w - lr * sign(b1*m + (1-b1)*g); m = b2*m + (1-b2)*g`.

    Args:
        betas: share of the momentum in a step and in the next momentum, in [0, 1).
    """

    element_states = ("exp_avg",)  # shaped like the weights; zero at first
    moves_without_gradient = True  # with `rows="all"`, rows outside of the batch move too

    betas: tuple[float, float] = (0.9, 0.99)

    def __post_init__(self) -> None:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas is {self.betas!r}; write two numbers in [0, 1)")

    def step_(self, rows: RowStep) -> None:
        """Move rows, in place."""
        (in_step, kept), momentum = self.betas, rows.states["exp_avg"]
        rows.weights.sub_(rows.grads.lerp(momentum, in_step).sign(), alpha=rows.lr)
        momentum.lerp_(rows.grads, 1 - kept)


@register_clip("root_count")
@dataclass(frozen=True)
class RootCountClip(Clip):
    """Clips the gradient of a row to `threshold * sqrt(count)`.

    Args:
        threshold: gradient norm allowed an id that occurs once in the batch, above 0.
    """

    threshold: float = 1.0

    def largest_norm(self, weight_norm: Tensor, counts: Tensor, width: int) -> Tensor:
        """The largest gradient norm of each row."""
        return self.threshold * counts.to(weight_norm.dtype).sqrt()


class CowClipLion(CowClipOptimizer):
    """Lion with a clip, for plain PyTorch and `apply_optimizer_in_backward`."""

    rule_type = Lion
    default_lr = 1e-4
