"""CoMatch (https://arxiv.org/abs/2011.11183).

Pseudo-labels are smoothed over images with similar embeddings, and embeddings
of images with similar pseudo-labels are drawn together.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from flatmatch_jax.methods import losses
from flatmatch_jax.methods.base import Method
from flatmatch_jax.system.arguments import (
  Decay,
  NonNegative,
  Positive,
  PositiveCount,
  Share,
)
from flatmatch_jax.types import Head, Losses, PseudoLabels

_SIZE = 64  # Of an embedding.


class CoMatchState(NamedTuple):
  """The last M images, the newest first, and a moving average."""

  embeddings: jax.Array  # [M, D]
  probs: jax.Array  # [M, K]: aligned predictions, or labels.
  mean: jax.Array  # Mean prediction [K].


def comatch(
  threshold: Share = 0.95,
  temperature: Positive = 0.2,
  smoothing: Share = 0.9,
  contrast_threshold: Share = 0.8,
  memory: PositiveCount = 2560,
  decay: Decay = 0.97,
  weight: NonNegative = 1.0,
  contrast_weight: NonNegative = 1.0,
) -> Method:
  """CoMatch with two strong views.

  Args:
    threshold: on the smoothed prediction's confidence.
    temperature: of similarities.
    smoothing: α, the share of the image's own prediction in its label.
    contrast_threshold: from which two pseudo-labels are similar.
    memory: number of images to smooth over; by default five of the paper's
      batches. Smoothing begins when they are complete.
    decay: of the mean prediction, by which predictions are aligned. The
      authors' code averages the last 32 batches.
    weight: of the loss of classes.
    contrast_weight: of the loss of embeddings.
  """

  def init(rng, variables, info):
    del rng, variables
    uniform = jnp.full(info.num_classes, 1 / info.num_classes)
    return CoMatchState(
      jnp.zeros((memory, _SIZE)), jnp.zeros((memory, len(uniform))), uniform
    )

  def embed(prediction):
    return losses.unit(prediction.heads['embedding'])

  def smooth(probs, embeddings, state):
    weights = jax.nn.softmax(embeddings @ state.embeddings.T / temperature)
    smoothed = smoothing * probs + (1 - smoothing) * (weights @ state.probs)
    is_full = state.probs[-1].sum() > 0
    return jnp.where(is_full, smoothed, probs)

  def loss(student, teacher, targets, state, step):
    probs = jax.nn.softmax(teacher['weak'].logits)  # [U, K]
    average = decay * state.mean + (1 - decay) * probs.mean(0)
    mean = jnp.where(step == 0, probs.mean(0), average)
    aligned = losses.align(probs, mean)
    weak = embed(teacher['weak'])
    target = smooth(aligned, weak, state)
    mask = (target.max(-1) >= threshold).astype(jnp.float32)  # [U]

    # A graph of pseudo-labels, and one of embeddings.
    graph = target @ target.T  # [U, U]
    graph = jnp.where(jnp.eye(len(graph), dtype=bool), 1.0, graph)
    graph = jnp.where(graph >= contrast_threshold, graph, 0.0)
    graph /= graph.sum(-1, keepdims=True)
    first, second = embed(student['strong']), embed(student['strong2'])

    labeled = losses.cross_entropy(student['labeled'].logits, targets['label'])
    unlabeled = weight * losses.cross_entropy(
      student['strong'].logits, target, mask
    ) + contrast_weight * losses.cross_entropy(
      first @ second.T / temperature, graph
    )
    known = jax.nn.one_hot(targets['label'], len(mean))
    last = lambda *x: jnp.concatenate(x)[:memory]
    state = CoMatchState(
      last(weak, embed(teacher['labeled']), state.embeddings),
      last(aligned, known, state.probs),
      mean,
    )
    metrics = {'pseudo_labels': PseudoLabels(target.argmax(-1), mask)}
    return Losses(labeled, unlabeled), state, metrics

  return Method(
    loss,
    init=init,
    heads=(Head('embedding', _SIZE, hidden=True),),
    views=('weak', 'strong', 'strong2'),
  )
