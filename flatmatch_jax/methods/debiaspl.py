"""DebiasPL (https://arxiv.org/abs/2201.01490).

Pseudo-labels are biased towards some classes: what is predicted often counts
less as a guess, and must be predicted with a larger margin.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from flatmatch_jax.methods import losses
from flatmatch_jax.methods.base import Method
from flatmatch_jax.system.arguments import Decay, NonNegative, Share
from flatmatch_jax.types import Losses, PseudoLabels


class DebiasPLState(NamedTuple):
  """A moving average over the weak views; it starts at 1/K."""

  probs: jax.Array  # Mean prediction p̂ [K].


def debiaspl(
  threshold: Share = 0.95,
  debias: NonNegative = 0.5,
  decay: Decay = 0.999,
  weight: NonNegative = 1.0,
) -> Method:
  """DebiasPL on FixMatch: adaptive debiasing and the adaptive marginal loss.

  Args:
    threshold: on the confidence after debiasing.
    debias: λ, the strength of both.
    decay: of the mean prediction, which has a number per class. (USB decays it
      by the decay of the weights.)
    weight: of the unlabeled loss.
  """

  def init(rng, variables, info):
    del rng, variables
    return DebiasPLState(jnp.full(info.num_classes, 1 / info.num_classes))

  def shift(probs):
    return debias * jnp.log(probs + 1e-12)  # [K]

  def loss(student, teacher, targets, state, step):
    del step
    logits = teacher['weak'].logits  # [U, K]
    probs = jax.nn.softmax(logits - shift(state.probs))
    guess = probs.argmax(-1)
    mask = (probs.max(-1) >= threshold).astype(jnp.float32)  # [U]
    mean = jax.nn.softmax(logits).mean(0)
    state = DebiasPLState(decay * state.probs + (1 - decay) * mean)

    labeled = losses.cross_entropy(student['labeled'].logits, targets['label'])
    unlabeled = losses.cross_entropy(
      student['strong'].logits + shift(state.probs), guess, mask
    )
    metrics = {'pseudo_labels': PseudoLabels(guess, mask)}
    return Losses(labeled, weight * unlabeled), state, metrics

  return Method(loss, init=init)
