"""DeFixMatch (https://arxiv.org/abs/2203.07512).

FixMatch without bias: what its unlabeled loss would be on the labeled images is
subtracted, so that on average only the labeled loss remains.
"""

import jax
import jax.numpy as jnp

from flatmatch_jax.methods import losses
from flatmatch_jax.methods.base import Method
from flatmatch_jax.system.arguments import NonNegative, Share
from flatmatch_jax.types import Losses, PseudoLabels


def defixmatch(threshold: Share = 0.95, weight: NonNegative = 0.5) -> Method:
  """DeFixMatch; the labeled loss is the mean of weak and strong views.

  The subtracted term is of labeled images, and so part of the labeled loss.
  """

  def consistency(student, teacher):
    probs = jax.nn.softmax(teacher.logits)
    guess = probs.argmax(-1)
    mask = (probs.max(-1) >= threshold).astype(jnp.float32)
    value = losses.cross_entropy(student.logits, guess, mask)
    return value, PseudoLabels(guess, mask)

  def loss(student, teacher, targets, state, step):
    del step
    weak, strong = (
      losses.cross_entropy(student[view].logits, targets['label'])
      for view in ('labeled', 'labeled_strong')
    )
    excess, _ = consistency(student['labeled_strong'], teacher['labeled'])
    labeled = (weak + strong) / 2 - weight * excess
    unlabeled, guesses = consistency(student['strong'], teacher['weak'])
    metrics = {'pseudo_labels': guesses}
    return Losses(labeled, weight * unlabeled), state, metrics

  return Method(loss, views=('weak', 'strong', 'labeled_strong'))
