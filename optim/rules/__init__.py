"""How a row moves once its gradient is known: the base optimizers under the clip."""

from stampede.optim.rules.adagrad import Adagrad, RowWiseAdagrad
from stampede.optim.rules.adam import Adam, EpsPlacement, RowWiseAdam, adam_, torch_eps
from stampede.optim.rules.rule import RowGradientSquares, Rule
from stampede.optim.rules.sgd import SGD

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "EpsPlacement",
    "RowGradientSquares",
    "RowWiseAdagrad",
    "RowWiseAdam",
    "Rule",
    "adam_",
    "torch_eps",
]
