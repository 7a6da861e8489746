"""Pseudo-Label (Lee, 2013; as tested in https://arxiv.org/abs/1804.09170).

A confident prediction is the label of the very image it was made on.
"""

import jax
import jax.numpy as jnp

from flatmatch_jax.methods import losses
from flatmatch_jax.methods.base import Method
from flatmatch_jax.system.arguments import NonNegative, Share
from flatmatch_jax.types import Losses, PseudoLabels


def pseudo_label(
  steps: int,
  threshold: Share = 0.95,
  weight: NonNegative = 1.0,
  ramp: Share = 0.4,
) -> Method:
  """Pseudo-Label with a fixed threshold; target and prediction share a view."""

  def loss(student, teacher, targets, state, step):
    probs = jax.nn.softmax(teacher['weak'].logits)  # [U, K]
    guess = probs.argmax(-1)
    mask = (probs.max(-1) >= threshold).astype(jnp.float32)  # [U]
    labeled = losses.cross_entropy(student['labeled'].logits, targets['label'])
    unlabeled = losses.cross_entropy(student['weak'].logits, guess, mask)
    scale = weight * losses.ramp(step, steps, ramp)
    metrics = {'pseudo_labels': PseudoLabels(guess, mask)}
    return Losses(labeled, scale * unlabeled), state, metrics

  return Method(loss, views=('weak',))
