"""ReFixMatch (https://arxiv.org/abs/2308.07509).

FixMatch that also learns from predictions it is not sure of: as distributions.
"""

import jax
import jax.numpy as jnp

from flatmatch_jax.methods import losses
from flatmatch_jax.methods.base import Method
from flatmatch_jax.system.arguments import NonNegative, Positive, Share
from flatmatch_jax.types import Losses, PseudoLabels


def refixmatch(
  threshold: Share = 0.95,
  temperature: Positive = 0.5,
  weight: NonNegative = 1.0,
) -> Method:
  """Hard labels from the `threshold` on; below it, sharpened predictions."""

  def loss(student, teacher, targets, state, step):
    del step
    labeled = losses.cross_entropy(student['labeled'].logits, targets['label'])
    unlabeled, guesses = consistency(
      student['strong'].logits, teacher['weak'].logits, threshold, temperature
    )
    metrics = {'pseudo_labels': guesses}
    return Losses(labeled, weight * unlabeled), state, metrics

  return Method(loss)


def consistency(logits, teacher, threshold, temperature):
  """The loss of `logits` [U, K], and what the `teacher` [U, K] guesses.

  The authors' code takes the divergence of the unsure rows only, as here; USB
  takes that of the sure ones, which already have a label.
  """
  probs = jax.nn.softmax(teacher)
  guess = probs.argmax(-1)
  mask = (probs.max(-1) >= threshold).astype(jnp.float32)  # [U]
  target = jax.nn.softmax(teacher / temperature)
  value = losses.cross_entropy(logits, guess, mask)
  value += losses.kl(target, logits, 1 - mask)
  return value, PseudoLabels(guess, mask)
