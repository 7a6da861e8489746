"""SoftMatch (https://arxiv.org/abs/2301.10921).

No pseudo-label is thrown away: its weight falls like a Gaussian with how far
its confidence is below the mean.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from flatmatch_jax.methods import losses
from flatmatch_jax.methods.base import Method
from flatmatch_jax.system.arguments import Decay, NonNegative
from flatmatch_jax.types import Losses, PseudoLabels


class SoftMatchState(NamedTuple):
  """Moving averages over the weak views."""

  probs: jax.Array  # Mean prediction [K], before alignment.
  mean: jax.Array  # Mean μ of the aligned confidence, from 1/K.
  variance: jax.Array  # Its variance σ², from 1.


def softmatch(
  num_sigmas: NonNegative = 2.0, decay: Decay = 0.999, weight: NonNegative = 1.0
) -> Method:
  """SoftMatch with uniform alignment and truncated Gaussian weights."""

  def init(rng, variables, info):
    del rng, variables
    uniform = jnp.full(info.num_classes, 1 / info.num_classes)
    return SoftMatchState(uniform, uniform[0], jnp.ones(()))

  def average(old, new):
    return decay * old + (1 - decay) * new

  def loss(student, teacher, targets, state, step):
    probs = jax.nn.softmax(teacher['weak'].logits)  # [U, K]
    guess = probs.argmax(-1)  # [U], of the predictions before alignment.
    # The first batch is where the mean prediction starts.
    mean_probs = jnp.where(
      step == 0, probs.mean(0), average(state.probs, probs.mean(0))
    )
    confidence = losses.align(probs, mean_probs).max(-1)  # [U]
    state = SoftMatchState(
      probs=mean_probs,
      mean=average(state.mean, confidence.mean()),
      variance=average(state.variance, confidence.var(ddof=1)),
    )
    shortfall = jnp.maximum(state.mean - confidence, 0.0)
    # Where all confidences are equal for long, the variance underflows.
    variance = jnp.maximum(state.variance, 1e-8)
    weights = jnp.exp(-((num_sigmas * shortfall) ** 2) / (2 * variance))  # [U]

    labeled = losses.cross_entropy(student['labeled'].logits, targets['label'])
    unlabeled = losses.cross_entropy(student['strong'].logits, guess, weights)
    metrics = {'pseudo_labels': PseudoLabels(guess, weights)}
    return Losses(labeled, weight * unlabeled), state, metrics

  return Method(loss, init=init)
