"""MixMatch (https://arxiv.org/abs/1905.02249).

Labeled images and unlabeled ones with guessed labels are mixed in pairs.
"""

import jax
import jax.numpy as jnp

from flatmatch_jax.methods import losses
from flatmatch_jax.methods.base import Method, Prepared, standard_views
from flatmatch_jax.system import rows
from flatmatch_jax.system.arguments import NonNegative, Positive, Share
from flatmatch_jax.types import Losses, PseudoLabels

_GUESSED = ('weak', 'weak2')
_ROWS = ('labeled', *_GUESSED)


def mixmatch(
  steps: int,
  temperature: Positive = 0.5,
  alpha: Positive = 0.5,
  weight: NonNegative = 100.0,
  ramp: Share = 0.4,
) -> Method:
  """MixMatch with two weak views and one mixing share for the whole batch."""

  def prepare(predict, state, batch, rng):
    views, targets, _ = standard_views(predict, state, batch, rng)
    probs = [jax.nn.softmax(predict(views[k]).logits) for k in _GUESSED]
    guess = losses.sharpen(jnp.mean(jnp.stack(probs), 0), temperature)  # [U, K]
    label = jax.nn.one_hot(targets['label'], guess.shape[-1])  # [B, K]
    images = rows.interleave([views[k] for k in _ROWS])
    labels = rows.interleave([label, guess, guess])
    images, labels = losses.mixup(rng, images, labels, alpha)
    # Each part keeps the name of what it mostly is. So running statistics are
    # of the mixed 'weak' rows: mixed, as all that the network is trained on,
    # and mostly of unlabeled images, which are many, not of the few labeled.
    lengths = len(label), len(guess), len(guess)
    views = dict(zip(_ROWS, rows.separate(images, lengths), strict=True))
    targets = dict(zip(_ROWS, rows.separate(labels, lengths), strict=True))
    return Prepared(views, targets | {'guess': guess.argmax(-1)})

  def loss(student, teacher, targets, state, step):
    del teacher
    labeled = losses.cross_entropy(
      student['labeled'].logits, targets['labeled']
    )
    first, second = (
      losses.mse(student[k].logits, targets[k]) for k in _GUESSED
    )
    unlabeled = (first + second) / 2
    scale = weight * losses.ramp(step, steps, ramp)
    guess = targets['guess']
    metrics = {'pseudo_labels': PseudoLabels(guess, jnp.ones(len(guess)))}
    return Losses(labeled, scale * unlabeled), state, metrics

  return Method(loss, prepare, views=_GUESSED)
