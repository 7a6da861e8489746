"""Supervised learning: the labeled images alone, the baseline of them all."""

from flatmatch_jax.methods import losses
from flatmatch_jax.methods.base import Method
from flatmatch_jax.types import Losses


def supervised() -> Method:
  """Cross-entropy on weakly augmented labeled images."""

  def loss(student, teacher, targets, state, step):
    del teacher, step
    labeled = losses.cross_entropy(student['labeled'].logits, targets['label'])
    return Losses(labeled, 0.0), state, {}

  return Method(loss, views=())
