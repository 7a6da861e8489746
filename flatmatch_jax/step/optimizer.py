"""SGD with coupled weight decay, AdamW with decoupled, Muon; schedules."""

import functools
import math

import jax
import jax.numpy as jnp
import optax

from flatmatch_jax import models
from flatmatch_jax.models import vit
from flatmatch_jax.types import UserError


def cosine_schedule(
  learning_rate: float, steps: int, warmup_steps: int = 0
) -> optax.Schedule:
  """`learning_rate`·cos(7π/16·t/T): from 1 down to 0.19509 of it.

  Before it the rate climbs from 0 in a straight line; t and T count the steps
  after these `warmup_steps`, which must be fewer than `steps`.
  """
  return _warmed_up(
    lambda t, end: jnp.cos(7 * math.pi / 16 * t / end),
    learning_rate,
    steps,
    warmup_steps,
  )


def linear_schedule(
  learning_rate: float, steps: int, warmup_steps: int = 0
) -> optax.Schedule:
  """In a straight line from `learning_rate` to 5% of it: for short runs."""
  return _warmed_up(
    lambda t, end: 1 - 0.95 * t / end, learning_rate, steps, warmup_steps
  )


SCHEDULES = {'cosine': cosine_schedule, 'linear': linear_schedule}


def _warmed_up(shape, learning_rate, steps, warmup_steps):
  """`learning_rate` times `shape(t, T)`, after a climb from 0."""

  def schedule(step):
    after, left = step - warmup_steps, steps - warmup_steps
    falling = learning_rate * shape(after, left)
    if not warmup_steps:
      return falling
    climb = learning_rate * step / warmup_steps
    return jnp.where(step < warmup_steps, climb, falling)

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

  With a `layer_decay` below 1 layer k of n learns, and decays, at
  layer_decay^(n + 1 - k) of the rate: k is 0 for the stem, n for the last block
  of a ViT or the last stage of a ResNet, n + 1 for the heads.
  """
  return optax.chain(
    optax.scale_by_adam(),
    optax.add_decayed_weights(weight_decay, _kernels),
    optax.identity() if layer_decay == 1 else _scale_by_layer(layer_decay),
    optax.scale_by_learning_rate(schedule),
  )


def muon(
  schedule: optax.Schedule, weight_decay: float, momentum: float = 0.9
) -> optax.GradientTransformation:
  """Muon (https://kellerjordan.github.io/posts/muon) on a sphere.

  For networks that normalize the output of every convolution, so that only the
  direction of a kernel matters. Each step scales a kernel to the norm that
  Kaiming's initialization gives it on average, and moves it by the learning
  rate times this norm, along the orthogonalized momentum. Everything else is
  trained by `sgd` at three times the rate.
  """
  return optax.chain(
    optax.add_decayed_weights(weight_decay, _decays_under_muon),
    optax.trace(momentum, nesterov=True),
    _scale_by_sphere(schedule),
  )


OPTIMIZERS = ('sgd', 'adamw', 'muon')


def create(
  name: str, schedule: optax.Schedule, weight_decay: float, layer_decay: float
) -> optax.GradientTransformation:
  """One of OPTIMIZERS."""
  if name == 'adamw':
    return adamw(schedule, weight_decay, layer_decay)
  return {'sgd': sgd, 'muon': muon}[name](schedule, weight_decay)


def _decays_under_muon(params):
  kernels = _kernels(params)
  return jax.tree.map(lambda decays, p: decays and p.ndim == 2, kernels, params)


def _scale_by_sphere(schedule) -> optax.GradientTransformation:
  def init(params):
    del params
    return optax.ScaleByScheduleState(jnp.zeros((), jnp.int32))

  def update(updates, state, params):
    rate = schedule(state.count)

    def step(direction, p):
      if p.ndim != 4:
        return -3 * rate * direction
      length = math.sqrt(2 * p.shape[-1])
      direction = orthogonalize(direction)
      unit = lambda x: x / jnp.maximum(jnp.linalg.norm(x), 1e-12)
      return length * (unit(p) - rate * unit(direction)) - p

    updates = jax.tree.map(step, updates, params)
    return updates, optax.ScaleByScheduleState(state.count + 1)

  return optax.GradientTransformation(init, update)


def orthogonalize(kernel, iterations: int = 4):
  """`kernel` [.., n] as a matrix whose singular values are brought near one.

  Muon's Newton-Schulz iteration x ← (a + b·xxᵀ + c·(xxᵀ)²)·x. All factors are
  polynomials of the first xxᵀ, so they are multiplied up before they meet x,
  which is the larger matrix.
  """
  matrix = kernel.reshape(-1, kernel.shape[-1])
  tall = matrix.shape[0] > matrix.shape[1]
  x = matrix.T if tall else matrix
  x = x / jnp.maximum(jnp.linalg.norm(x), 1e-12)
  # In a TPU's default, bfloat16, small eigenvalues turn negative and grow.
  dot = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
  one = jnp.eye(len(x), dtype=x.dtype)
  square, product = dot(x, x.T), one
  for _ in range(iterations):
    factor = 3.4445 * one - 4.7750 * square + 2.0315 * dot(square, square)
    product = dot(factor, product)
    square = dot(dot(factor, square), factor)
  x = dot(product, x)
  return (x.T if tall else x).reshape(kernel.shape)


def _kernels(params):
  """True for what decays: neither vectors nor a ViT's embeddings."""
  return jax.tree_util.tree_map_with_path(
    lambda path, p: p.ndim > 1 and path[0].key not in vit.EMBEDDINGS, params
  )


def _scale_by_layer(layer_decay: float) -> optax.GradientTransformation:
  def network_of(params):
    if (network := models.with_layers(params)) is None:
      raise UserError(
        f'A layer_decay of {layer_decay} needs the layers of a ViT or a ResNet;'
        ' set it to 1 for other networks.'
      )
    return network

  def init(params):
    network_of(params)
    return optax.EmptyState()

  def update(updates, state, params=None):
    del params
    network = network_of(updates)
    depth = network.depth(updates)

    def scale(path, x):
      layer = network.layer(tuple(entry.key for entry in path), depth)
      return x * layer_decay ** (depth + 1 - layer)

    return jax.tree_util.tree_map_with_path(scale, updates), state

  return optax.GradientTransformation(init, update)
