"""Sampling classes in proportion to a softmax: a tree of features, simple samplers beside it, and a loss for training.

`p(j | x) = exp(x . y_j + b_j) / Z(x)` over n classes costs O(n d) for each x. `FeatureTree` draws from an estimate of
it in O(m log n), states the probability of what it drew, and follows class vectors as they change.
"""

from bochner.sampling.loss import SampledSoftmaxLoss
from bochner.sampling.samplers import Draws, ExactSampler, LogUniformSampler, Sampler, UniformSampler
from bochner.sampling.tree import FeatureTree

__all__ = [
    "Draws",
    "ExactSampler",
    "FeatureTree",
    "LogUniformSampler",
    "SampledSoftmaxLoss",
    "Sampler",
    "UniformSampler",
]
