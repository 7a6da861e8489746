"""MixMatch (https://arxiv.org/abs/1905.02249).

Labeled images and unlabeled ones with guessed labels are mixed in pairs.
"""

import jax
import jax.numpy as jnp

from flatmatch_jax import losses
from flatmatch_jax.methods.base import Method, standard_views
from flatmatch_jax.types import Losses, PseudoLabels

_GUESSED = ('weak', 'weak2')
_ROWS = ('labeled', *_GUESSED)


def mixmatch(
  steps: int,
  temperature: float = 0.5,
  alpha: float = 0.5,
  weight: float = 100.0,
  ramp: float = 0.4,
) -> Method:
  """MixMatch with two weak views and one mixing share for the whole batch."""

  def prepare(predict, state, batch, rng):
    views, targets = standard_views(predict, state, batch, rng)
    probs = [jax.nn.softmax(predict(views[k]).logits) for k in _GUESSED]
    guess = losses.sharpen(jnp.mean(jnp.stack(probs), 0), temperature)  # [U, K]
    label = jax.nn.one_hot(targets['label'], guess.shape[-1])  # [B, K]
    images = jnp.concatenate([views[k] for k in _ROWS])
    labels = jnp.concatenate([label, guess, guess])
    images, labels = losses.mixup(rng, images, labels, alpha)
    # Each part keeps the name of what it mostly is. So running statistics are
    # of the mixed 'weak' rows: mixed, as all that the network is trained on,
    # and mostly of unlabeled images, which are many, not of the few labeled.
    ends = [len(label), len(label) + len(guess)]
    views = dict(zip(_ROWS, jnp.split(images, ends), strict=True))
    targets = dict(zip(_ROWS, jnp.split(labels, ends), strict=True))
    return views, targets | {'guess': guess.argmax(-1)}

  def loss(student, teacher, targets, state, step):
    del teacher
    labeled = losses.cross_entropy(
      student['labeled'].logits, targets['labeled']
    )
    logits = jnp.concatenate([student[k].logits for k in _GUESSED])  # [2U, K]
    labels = jnp.concatenate([targets[k] for k in _GUESSED])
    unlabeled = losses.mse(logits, labels)
    scale = weight * losses.ramp(step, steps, ramp)
    guess = targets['guess']
    metrics = {'pseudo_labels': PseudoLabels(guess, jnp.ones(len(guess)))}
    return Losses(labeled, scale * unlabeled), state, metrics

  return Method(loss, prepare, views=_GUESSED)
