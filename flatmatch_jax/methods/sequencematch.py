"""SequenceMatch (https://arxiv.org/abs/2310.15787).

A medium view stands between the weak and the strong one, and each view learns
from the weaker ones.
"""

import jax
import jax.numpy as jnp

from flatmatch_jax.methods import losses
from flatmatch_jax.methods.base import Method
from flatmatch_jax.methods.refixmatch import consistency
from flatmatch_jax.system.arguments import NonNegative, Positive, Share
from flatmatch_jax.types import Losses

_PAIRS = (('weak', 'medium'), ('medium', 'strong'), ('weak', 'strong'))


def sequencematch(
  threshold: Share = 0.95,
  temperature: Positive = 0.5,
  weight: NonNegative = 1.0,
) -> Method:
  """ReFixMatch, and divergences of all pairs of views.

  A pair counts where its weaker view is confident, as in the authors' code. USB
  asks the weak view for all pairs, and takes a softmax of probabilities.
  """

  def loss(student, teacher, targets, state, step):
    del step
    labeled = losses.cross_entropy(student['labeled'].logits, targets['label'])
    unlabeled, guesses = consistency(
      student['strong'].logits, teacher['weak'].logits, threshold, temperature
    )
    for weaker, stronger in _PAIRS:
      logits = teacher[weaker].logits
      sure = jax.nn.softmax(logits).max(-1) >= threshold
      unlabeled += losses.kl(
        jax.nn.softmax(logits / temperature),
        student[stronger].logits,
        sure.astype(jnp.float32),
      )
    metrics = {'pseudo_labels': guesses}
    return Losses(labeled, weight * unlabeled), state, metrics

  return Method(loss, views=('weak', 'medium', 'strong'))
