"""SimMatch (https://arxiv.org/abs/2203.06915).

Two views of an image should have the same class and the same similarities to
the labeled images, and each of the two predictions corrects the other.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from flatmatch_jax.methods import losses
from flatmatch_jax.methods.base import Method, Prepared, standard_views
from flatmatch_jax.system.arguments import Decay, NonNegative, Positive, Share
from flatmatch_jax.types import Head, Losses, PseudoLabels

_SIZE = 128  # Of an embedding.


class SimMatchState(NamedTuple):
  """What is remembered of L labeled images, and of all predictions."""

  bank: jax.Array  # Embeddings [L, D] of length one.
  label: jax.Array  # [L]: -1 of an image that has not been seen.
  probs: jax.Array  # Mean prediction [K].


def simmatch(
  threshold: Share = 0.95,
  temperature: Positive = 0.1,
  smoothing: Share = 0.9,
  bank_share: Share = 0.7,
  decay: Decay = 0.996,
  weight: NonNegative = 1.0,
  similarity_weight: NonNegative = 1.0,
) -> Method:
  """SimMatch with a temporal ensemble of embeddings, as for CIFAR.

  The bank that a batch is compared with is that before it. Images that have
  not been seen do not count; in the first step that is all of them, and there
  are no similarities. An image that a batch has twice enters as its mean.

  Args:
    threshold: on the smoothed prediction's confidence.
    temperature: of similarities.
    smoothing: α, the share of the classifier in the target.
    bank_share: share of an embedding that is kept when its image comes again.
    decay: of the mean prediction, by which predictions are aligned. The
      authors' code averages the last 256 batches.
    weight: of the loss of classes.
    similarity_weight: of the loss of similarities.
  """

  def init(rng, variables, info):
    del rng, variables
    number = sum(info.class_counts)
    uniform = jnp.full(info.num_classes, 1 / info.num_classes)
    return SimMatchState(
      jnp.zeros((number, _SIZE)), jnp.full(number, -1, jnp.int32), uniform
    )

  def prepare(predict, state, batch, rng):
    views, targets, _ = standard_views(predict, state, batch, rng)
    targets['place'] = batch.labeled['index']
    return Prepared(views, targets)

  def embed(prediction):
    return losses.unit(prediction.heads['embedding'])

  def remember(state, teacher, targets, mean):
    means, label = losses.by_place(
      targets['place'],
      embed(teacher['labeled']),
      targets['label'],
      len(state.bank),
    )
    mixed = bank_share * state.bank + (1 - bank_share) * means
    return SimMatchState(
      bank=jnp.where(label[:, None] >= 0, losses.unit(mixed), state.bank),
      label=jnp.where(label >= 0, label, state.label),
      probs=mean,
    )

  def loss(student, teacher, targets, state, step):
    is_known = state.label >= 0  # [L]
    # An image that was not seen yet is of no class.
    label = jnp.where(is_known, state.label, len(state.probs))

    def similarities(prediction):
      logits = embed(prediction) @ state.bank.T / temperature  # [U, L]
      return jnp.where(is_known, logits, -1e9)

    probs = jax.nn.softmax(teacher['weak'].logits)  # [U, K]
    average = decay * state.probs + (1 - decay) * probs.mean(0)
    mean = jnp.where(step == 0, probs.mean(0), average)
    probs = losses.align(probs, mean)
    alike = jax.nn.softmax(similarities(teacher['weak']))
    # Similarities adjusted by classes, and classes by similarities.
    unfolded = alike * probs.at[:, label].get(mode='fill', fill_value=0)
    unfolded /= unfolded.sum(-1, keepdims=True) + 1e-12
    of_class = jnp.zeros_like(probs).at[:, label].add(alike, mode='drop')
    smoothed = smoothing * probs + (1 - smoothing) * of_class
    target = jnp.where(is_known.any(), smoothed, probs)
    mask = (target.max(-1) >= threshold).astype(jnp.float32)  # [U]

    labeled = losses.cross_entropy(student['labeled'].logits, targets['label'])
    unlabeled = weight * losses.cross_entropy(
      student['strong'].logits, target, mask
    ) + similarity_weight * losses.cross_entropy(
      similarities(student['strong']), unfolded
    )
    state = remember(state, teacher, targets, mean)
    metrics = {'pseudo_labels': PseudoLabels(target.argmax(-1), mask)}
    return Losses(labeled, unlabeled), state, metrics

  return Method(
    loss,
    prepare,
    init=init,
    heads=(Head('embedding', _SIZE, hidden=True),),
  )
