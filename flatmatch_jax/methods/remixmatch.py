"""ReMixMatch (https://arxiv.org/abs/1911.09785).

MixMatch whose guesses are aligned with the labels' distribution and anchored:
the weak view's guess labels two strong views; and a head learns rotations.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from flatmatch_jax.methods import losses
from flatmatch_jax.methods.base import Method, Prepared, standard_views
from flatmatch_jax.system import rows
from flatmatch_jax.system.arguments import Decay, NonNegative, Positive, Share
from flatmatch_jax.types import Head, Losses, PseudoLabels

_ROWS = ('labeled', 'strong', 'strong2', 'weak')  # Mixed with each other.


class ReMixMatchState(NamedTuple):
  """A moving average over the weak views."""

  probs: jax.Array  # Mean prediction [K].


def remixmatch(
  steps: int,
  temperature: Positive = 0.5,
  alpha: Positive = 0.75,
  weight: NonNegative = 1.5,
  plain_weight: NonNegative = 0.5,
  rotation_weight: NonNegative = 0.5,
  ramp: Share = 1 / 64,
  decay: Decay = 0.999,
) -> Method:
  """ReMixMatch with two strong views, of labels that are balanced.

  Args:
    steps: length of training.
    temperature: of the guesses.
    alpha: of mixup's Beta distribution.
    weight: of the loss on mixed unlabeled images.
    plain_weight: of the loss on the first strong view as it is.
    rotation_weight: of the loss on that view rotated; it is not ramped up.
    ramp: the part of training over which the other two rise.
    decay: of the mean prediction.
  """

  def init(rng, variables, info):
    del rng, variables
    return ReMixMatchState(jnp.full(info.num_classes, 1 / info.num_classes))

  def update(state, probs, step):
    mean = probs.mean(0)
    average = decay * state.probs + (1 - decay) * mean
    return ReMixMatchState(jnp.where(step == 0, mean, average))

  def prepare(predict, state, batch, rng):
    mix_rng, turn_rng = jax.random.split(rng)
    views, targets, _ = standard_views(predict, state, batch, rng)
    plain = views['strong']
    probs = jax.nn.softmax(predict(views['weak']).logits)  # [U, K]
    average = update(state.method, probs, state.step).probs
    guess = losses.sharpen(losses.align(probs, average), temperature)

    label = jax.nn.one_hot(targets['label'], probs.shape[-1])  # [B, K]
    images = rows.interleave([views[k] for k in _ROWS])
    labels = rows.interleave([label, guess, guess, guess])
    images, labels = losses.mixup(mix_rng, images, labels, alpha)
    lengths = len(label), *3 * (len(guess),)
    views = dict(zip(_ROWS, rows.separate(images, lengths), strict=True))
    targets = dict(zip(_ROWS, rows.separate(labels, lengths), strict=True))

    turns = jax.random.randint(turn_rng, (len(guess),), 0, 4)
    views |= {'strong_plain': plain, 'strong_rotated': rotate(plain, turns)}
    targets |= {'guess': guess, 'turns': turns, 'probs': probs}
    return Prepared(views, targets)

  def loss(student, teacher, targets, state, step):
    del teacher
    state = update(state, targets['probs'], step)
    labeled, *mixed = (
      losses.cross_entropy(student[k].logits, targets[k]) for k in _ROWS
    )
    plain = losses.cross_entropy(
      student['strong_plain'].logits, targets['guess']
    )
    rotation = losses.cross_entropy(
      student['strong_rotated'].heads['rotation'], targets['turns']
    )
    unlabeled = (
      losses.ramp(step, steps, ramp)
      * (weight * sum(mixed) / len(mixed) + plain_weight * plain)
      + rotation_weight * rotation
    )
    guess = targets['guess'].argmax(-1)
    metrics = {'pseudo_labels': PseudoLabels(guess, jnp.ones(guess.shape))}
    return Losses(labeled, unlabeled), state, metrics

  return Method(
    loss,
    prepare=prepare,
    init=init,
    heads=(Head('rotation', 4),),
    views=_ROWS[1:],
  )


def rotate(images, turns):
  """Turns images [U, H, H, C] left by `turns` [U] times 90 degrees."""
  turns = turns[:, None, None, None]
  return jnp.select(
    [turns == k for k in range(4)],
    [jnp.rot90(images, k, axes=(1, 2)) for k in range(4)],
  )
