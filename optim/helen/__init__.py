"""Helen: sharpness-aware training of CTR models, each id perturbed by how frequent it is.

Source: "Helen: Optimizing CTR Prediction Models with Frequency-wise Hessian Eigenvalue
Regularization" (arXiv 2403.00798) and the authors' code, NUS-HPC-AI-Lab/Helen, called the
repository. Every step takes two gradients of one batch: the first moves the tables to where the
loss is higher, the second, taken there, updates the weights from where they stood before.
"""

from stampede.optim.helen.optimizer import Helen
from stampede.optim.helen.perturbation import HelenSettings, perturbation

__all__ = ["Helen", "HelenSettings", "perturbation"]
