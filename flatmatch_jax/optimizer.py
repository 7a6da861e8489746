"""SGD with coupled weight decay, AdamW with decoupled, and a 7/16 cosine."""

import math

import jax
import jax.numpy as jnp
import optax

from flatmatch_jax.models import vit
from flatmatch_jax.types import UserError


def cosine_schedule(
  learning_rate: float, steps: int, warmup_steps: int = 0
) -> optax.Schedule:
  """`learning_rate`·cos(7π/16·t/T): from 1 down to 0.19509 of it.

  Before it the rate climbs from 0 in a straight line; t and T count the steps
  after these `warmup_steps`, which must be fewer than `steps`.
  """

  def schedule(step):
    after, left = step - warmup_steps, steps - warmup_steps
    cosine = learning_rate * jnp.cos(7 * math.pi / 16 * after / left)
    if not warmup_steps:
      return cosine
    climb = learning_rate * step / warmup_steps
    return jnp.where(step < warmup_steps, climb, cosine)

  return schedule


def sgd(
  schedule: optax.Schedule, weight_decay: float, momentum: float = 0.9
) -> optax.GradientTransformation:
  """Decay enters the gradient, at θ; kernels only, not biases and norms."""
  return optax.chain(
    optax.add_decayed_weights(weight_decay, _kernels),
    optax.sgd(schedule, momentum, nesterov=True),
  )


def adamw(
  schedule: optax.Schedule, weight_decay: float, layer_decay: float = 1.0
) -> optax.GradientTransformation:
  """Decay is apart from the gradient; of kernels, not of a ViT's embeddings.

  With a `layer_decay` below 1 layer k of a ViT of depth n learns, and decays,
  at layer_decay^(n + 1 - k) of the rate: k is 0 for the stem, n for the last
  block and the norm, n + 1 for the heads.
  """
  return optax.chain(
    optax.scale_by_adam(),
    optax.add_decayed_weights(weight_decay, _kernels),
    optax.identity() if layer_decay == 1 else _scale_by_layer(layer_decay),
    optax.scale_by_learning_rate(schedule),
  )


def _kernels(params):
  """True for what decays: neither vectors nor a ViT's embeddings."""
  return jax.tree_util.tree_map_with_path(
    lambda path, p: p.ndim > 1 and path[0].key not in vit.EMBEDDINGS, params
  )


def _scale_by_layer(layer_decay: float) -> optax.GradientTransformation:
  def init(params):
    if not vit.depth(params):
      raise UserError(
        f'A layer_decay of {layer_decay} needs the layers of a ViT; set it to '
        '1 for other networks.'
      )
    return optax.EmptyState()

  def update(updates, state, params=None):
    del params
    depth = vit.depth(updates)

    def scale(path, x):
      layer = vit.layer(tuple(entry.key for entry in path), depth)
      return x * layer_decay ** (depth + 1 - layer)

    return jax.tree_util.tree_map_with_path(scale, updates), state

  return optax.GradientTransformation(init, update)
