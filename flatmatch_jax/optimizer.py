"""SGD with Nesterov momentum, coupled weight decay and a 7/16 cosine."""

import math

import jax
import jax.numpy as jnp
import optax


def cosine_schedule(learning_rate: float, steps: int) -> optax.Schedule:
  """`learning_rate`·cos(7π/16·t/T): from 1 down to 0.19509 of it."""

  def schedule(step):
    return learning_rate * jnp.cos(7 * math.pi / 16 * step / steps)

  return schedule


def sgd(
  schedule: optax.Schedule, weight_decay: float, momentum: float = 0.9
) -> optax.GradientTransformation:
  """Decay enters the gradient, at θ; kernels only, not biases and norms."""

  def kernels(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)

  return optax.chain(
    optax.add_decayed_weights(weight_decay, kernels),
    optax.sgd(schedule, momentum, nesterov=True),
  )
