"""What is learned from the training part: vocabularies, ranges, quantiles."""

from stampede.data.learning.learned import Learned
from stampede.data.learning.learner import Learner

__all__ = ["Learned", "Learner"]
