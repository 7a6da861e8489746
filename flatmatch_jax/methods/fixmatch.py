"""FixMatch (https://arxiv.org/abs/2001.07685).

Confident predictions on the weak view are the labels of the strong view.
"""

import jax
import jax.numpy as jnp

from flatmatch_jax.methods import losses
from flatmatch_jax.methods.base import Method
from flatmatch_jax.system.arguments import NonNegative, Share
from flatmatch_jax.types import Losses, PseudoLabels


def fixmatch(threshold: Share = 0.95, weight: NonNegative = 1.0) -> Method:
  """FixMatch with hard pseudo-labels and a fixed confidence threshold."""

  def loss(student, teacher, targets, state, step):
    del step
    probs = jax.nn.softmax(teacher['weak'].logits)  # [U, K]
    guess = probs.argmax(-1)
    mask = (probs.max(-1) >= threshold).astype(jnp.float32)  # [U]
    labeled = losses.cross_entropy(student['labeled'].logits, targets['label'])
    unlabeled = losses.cross_entropy(student['strong'].logits, guess, mask)
    metrics = {'pseudo_labels': PseudoLabels(guess, mask)}
    return Losses(labeled, weight * unlabeled), state, metrics

  return Method(loss)
