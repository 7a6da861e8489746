"""Π-Model (https://arxiv.org/abs/1610.02242).

Two weak views of an image should be classified alike.
"""

import jax
import jax.numpy as jnp

from flatmatch_jax.methods import losses
from flatmatch_jax.methods.base import Method
from flatmatch_jax.system.arguments import NonNegative, Share
from flatmatch_jax.types import Losses, PseudoLabels


def pi_model(
  steps: int, weight: NonNegative = 10.0, ramp: Share = 0.4
) -> Method:
  """Π-Model: the gradient takes one of the two views, the other is a target."""

  def loss(student, teacher, targets, state, step):
    probs = jax.nn.softmax(teacher['weak'].logits)  # [U, K]
    labeled = losses.cross_entropy(student['labeled'].logits, targets['label'])
    unlabeled = losses.mse(student['weak2'].logits, probs)
    scale = weight * losses.ramp(step, steps, ramp)
    guess = probs.argmax(-1)
    metrics = {'pseudo_labels': PseudoLabels(guess, jnp.ones(len(guess)))}
    return Losses(labeled, scale * unlabeled), state, metrics

  return Method(loss, views=('weak', 'weak2'))
