"""Dash (https://arxiv.org/abs/2109.00650).

Unlabeled images count while their loss is below a threshold, and the threshold
falls as training goes on.
"""

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import optax

from flatmatch_jax.methods import losses
from flatmatch_jax.methods.base import Method
from flatmatch_jax.system.arguments import (
  Count,
  NonNegative,
  Number,
  Positive,
  PositiveCount,
  Share,
)
from flatmatch_jax.types import Losses, PseudoLabels


class DashState(NamedTuple):
  """Where the threshold starts from."""

  initial_loss: jax.Array  # ρ̂


def dash(
  decrease: Annotated[float, Number(1, 1e6)] = 1.27,
  scale: Positive = 1.0001,
  min_threshold: Share = 0.05,
  temperature: Positive = 0.5,
  warmup_steps: Count = 2048,
  interval: PositiveCount = 10 * 1024,
  weight: NonNegative = 1.0,
) -> Method:
  """Dash with the threshold ρ_k = max(C·γ^-k·ρ̂, ρ_min) in interval k.

  C is `scale`, γ is `decrease`. ρ̂ is the initial network's loss on the first
  labeled batch: after the warm-up on few labels it would be nothing, and the
  test set is not for training.
  """

  def init(rng, variables, info):
    del rng, variables
    return DashState(jnp.log(float(info.num_classes)))

  def loss(student, teacher, targets, state, step):
    first = losses.cross_entropy(teacher['labeled'].logits, targets['label'])
    state = DashState(jnp.where(step == 0, first, state.initial_loss))
    warm = step >= warmup_steps
    k = jnp.maximum(step - warmup_steps, 0) // interval
    threshold = scale * decrease ** -k.astype(jnp.float32) * state.initial_loss
    at_floor = threshold <= min_threshold
    threshold = jnp.maximum(threshold, min_threshold)

    logits = teacher['weak'].logits  # [U, K]
    guess = logits.argmax(-1)
    target = jnp.where(
      at_floor,
      jax.nn.one_hot(guess, logits.shape[-1]),
      jax.nn.softmax(logits / temperature),
    )
    weak_loss = optax.softmax_cross_entropy(logits, target)  # [U]
    mask = (warm & (weak_loss <= threshold)).astype(jnp.float32)

    labeled = losses.cross_entropy(student['labeled'].logits, targets['label'])
    unlabeled = losses.cross_entropy(student['strong'].logits, target, mask)
    metrics = {
      'pseudo_labels': PseudoLabels(guess, mask),
      'threshold': threshold,
    }
    return Losses(labeled, weight * unlabeled), state, metrics

  return Method(loss, init=init)
