"""Unsupervised data augmentation (https://arxiv.org/abs/1904.12848).

Sharpened predictions on the weak view are the targets of the strong view.
"""

import jax
import jax.numpy as jnp

from flatmatch_jax.methods import losses
from flatmatch_jax.methods.base import Method
from flatmatch_jax.system.arguments import NonNegative, Positive, Share
from flatmatch_jax.types import Losses, PseudoLabels, UserError

# Annealing of the training signal: from 0 to 1 as training goes from 0 to 1.
SCHEDULES = {
  'none': lambda done: jnp.ones_like(done),
  'linear': lambda done: done,
  'exp': lambda done: jnp.exp(5 * (done - 1)),
  'log': lambda done: 1 - jnp.exp(-5 * done),
}


def uda(
  steps: int,
  threshold: Share = 0.8,
  temperature: Positive = 0.4,
  weight: NonNegative = 1.0,
  tsa: str = 'none',
) -> Method:
  """UDA with soft targets where the prediction is confident.

  `tsa` anneals the training signal: a labeled image counts only while the
  probability of its label is at most a limit that rises with the steps, and the
  labeled loss is the mean over the images that count.
  """
  if tsa not in SCHEDULES:
    raise UserError(
      f'Unknown tsa={tsa!r} of uda. Known: {", ".join(SCHEDULES)}.'
    )

  def loss(student, teacher, targets, state, step):
    logits = teacher['weak'].logits  # [U, K]
    # Sharp predictions are always confident: the mask takes those before.
    probs = jax.nn.softmax(logits)
    mask = (probs.max(-1) >= threshold).astype(jnp.float32)  # [U]
    target = jax.nn.softmax(logits / temperature)
    limit = _rescale(SCHEDULES[tsa](step / steps), probs.shape[-1])
    known = jax.nn.softmax(teacher['labeled'].logits)  # [B, K]
    right = jnp.take_along_axis(known, targets['label'][:, None], -1)[:, 0]
    counts = (right <= limit).astype(jnp.float32)  # [B]
    labeled = losses.cross_entropy(
      student['labeled'].logits, targets['label'], counts
    )
    labeled *= len(counts) / jnp.maximum(counts.sum(), 1.0)
    unlabeled = losses.cross_entropy(student['strong'].logits, target, mask)
    metrics = {'pseudo_labels': PseudoLabels(probs.argmax(-1), mask)}
    return Losses(labeled, weight * unlabeled), state, metrics

  return Method(loss)


def _rescale(share, num_classes):
  """From 0..1 to 1/K..1: a guess at random has 1/K."""
  return 1 - (1 - share) * (1 - 1 / num_classes)
