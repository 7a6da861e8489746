"""DASO (https://arxiv.org/abs/2106.05682), for long tails.

A classifier favours classes with many images; similarity to the mean features
of each class favours the others. The more often a class is guessed, the more
its guesses follow the latter.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from flatmatch_jax.methods import losses
from flatmatch_jax.methods.base import Method, Prepared, standard_views
from flatmatch_jax.system.arguments import (
  Count,
  NonNegative,
  Positive,
  PositiveCount,
  Share,
)
from flatmatch_jax.types import Entries, Losses, Pending, PseudoLabels


class DASOState(NamedTuple):
  """The last L labeled images of each class, and what has been guessed."""

  # Features [K * L, D], class by class, zeros where there are none yet. Only a
  # batch's rows are read and written: ImageNet's take 2 GB with a ResNet-50.
  queue: jax.Array
  sums: jax.Array  # [K, D]: of each class in the queue.
  entered: jax.Array  # [K]: how many images of each class ever have.
  counts: jax.Array  # [K]: guesses in this interval.
  shares: jax.Array  # [K]: of the guesses in the last one.


def daso(
  threshold: Share = 0.95,
  temperature: Positive = 0.05,
  blend_temperature: Positive = 1.5,
  queue: PositiveCount = 256,
  interval: PositiveCount = 100,
  pretrain_steps: Count = 5000,
  weight: NonNegative = 1.0,
  alignment_weight: NonNegative = 1.0,
) -> Method:
  """DASO on FixMatch.

  Args:
    threshold: on the confidence of the blended guess.
    temperature: of similarities.
    blend_temperature: of the classes' shares; the larger, the more alike they
      are. The paper takes 0.3 for CIFAR-10 if labeled and unlabeled images
      have different tails.
    queue: images of each class whose mean is its prototype; the state holds
      their features, 4 bytes per number.
    interval: steps over which guesses are counted.
    pretrain_steps: of FixMatch, before anything is blended.
    weight: of the loss of classes.
    alignment_weight: of the loss of similarities.
  """

  def init(rng, variables, info):
    del rng
    classes = info.num_classes
    size = len(variables['params']['classifier']['kernel'])
    return DASOState(
      queue=jnp.zeros((classes * queue, size)),
      sums=jnp.zeros((classes, size)),
      entered=jnp.zeros(classes, jnp.int32),
      counts=jnp.zeros(classes, jnp.int32),
      shares=jnp.full(classes, 1 / classes),
    )

  def prepare(predict, state, batch, rng):
    views, targets, _ = standard_views(predict, state, batch, rng)
    prediction = predict(views['labeled'], state.ema_params)
    targets['features'] = prediction.features
    return Prepared(views, targets)

  def loss(student, teacher, targets, state, step):
    state, entries = enter(state, targets['features'], targets['label'], step)
    blends = step >= pretrain_steps

    def similarities(prediction):
      features = losses.unit(prediction.features)
      return features @ losses.unit(prototypes(state)).T / temperature  # [U, K]

    probs = jax.nn.softmax(teacher['weak'].logits)  # [U, K]
    semantic = jax.nn.softmax(similarities(teacher['weak']))
    shares = state.shares ** (1 / blend_temperature)
    part = (shares / shares.max())[probs.argmax(-1), None]  # υ [U, 1]
    blended = (1 - part) * probs + part * semantic
    target = jnp.where(blends, blended, probs)
    guess = target.argmax(-1)
    mask = (target.max(-1) >= threshold).astype(jnp.float32)  # [U]

    labeled = losses.cross_entropy(student['labeled'].logits, targets['label'])
    unlabeled = weight * losses.cross_entropy(
      student['strong'].logits, guess, mask
    ) + alignment_weight * blends * losses.cross_entropy(
      similarities(student['strong']), semantic
    )
    metrics = {'pseudo_labels': PseudoLabels(guess, mask)}
    pending = Pending(count(state, guess, step), entries)
    return Losses(labeled, unlabeled), pending, metrics

  def count(state, guess, step):
    counts = state.counts + of_each_class(guess, len(state.counts))
    is_over = (step + 1) % interval == 0
    return state._replace(
      counts=jnp.where(is_over, 0, counts),
      shares=jnp.where(is_over, counts / counts.sum(), state.shares),
    )

  return Method(loss, prepare, init=init)


def enter(state: DASOState, features, label, step) -> Pending:
  """Puts `features` [B, D] in the places of the oldest of their classes.

  Sums follow what comes and goes. Each step one class is summed anew, so that
  rounding, above all of features that were large for a while, does not add up.
  """
  classes, length = len(state.entered), queue_length(state)
  row = jnp.arange(len(label))
  same = label[:, None] == label
  earlier = jnp.sum(same & (row < row[:, None]), axis=1)
  later = jnp.sum(same & (row > row[:, None]), axis=1)
  place = label * length + (state.entered[label] + earlier) % length
  fits = later < length  # Of more than fit, the last ones.
  old = state.queue[place]
  new = jnp.where(fits[:, None], features, old)
  one_hot = jax.nn.one_hot(label, classes)
  change = jnp.dot(one_hot.T, new - old, precision='highest')
  anew = step % classes
  rows = jax.lax.dynamic_slice_in_dim(state.queue, anew * length, length)
  state = state._replace(
    sums=state.sums.at[anew].set(rows.sum(0)) + change,
    entered=state.entered + of_each_class(label, classes),
  )
  places = jnp.where(fits, place, len(state.queue))
  return Pending(state, {'queue': Entries(places, new)})


def prototypes(state: DASOState) -> jax.Array:
  """The mean features [K, D] of each class; zeros of one not seen."""
  number = jnp.clip(state.entered, 1, queue_length(state))
  return state.sums / number[:, None]


def queue_length(state: DASOState) -> int:
  return len(state.queue) // len(state.entered)


def of_each_class(label, classes: int) -> jax.Array:
  """How many `label` [n] there are of each class [K]."""
  return jax.nn.one_hot(label, classes, dtype=jnp.int32).sum(0)
