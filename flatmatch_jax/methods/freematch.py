"""FreeMatch (https://arxiv.org/abs/2205.07246).

The confidence threshold follows the model's own mean confidence, class by
class, and a fairness loss keeps the predictions diverse.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from flatmatch_jax.methods import losses
from flatmatch_jax.methods.base import Method
from flatmatch_jax.system.arguments import Count, Decay, NonNegative, Share
from flatmatch_jax.types import Losses, PseudoLabels, UserError


class FreeMatchState(NamedTuple):
  """Moving averages over the weak views; all start at 1/K."""

  threshold: jax.Array  # Mean confidence τ, a scalar.
  probs: jax.Array  # Mean prediction p̃ [K].
  histogram: jax.Array  # Frequency of each guessed class h̃ [K].


def freematch(
  fairness_weight: NonNegative = 0.05,
  decay: Decay = 0.999,
  weight: NonNegative = 1.0,
  min_threshold: Share = 0.0,
  max_threshold: Share = 1.0,
  warmup_steps: Count = 0,
) -> Method:
  """FreeMatch with self-adaptive thresholds and self-adaptive fairness.

  On SVHN the thresholds are held between two bounds, after `warmup_steps` on
  labeled images alone that leave the averages where they start.
  """
  if min_threshold > max_threshold:
    raise UserError(
      f'min_threshold={min_threshold} is above max_threshold={max_threshold}; '
      'set either in config.method_args.'
    )

  def init(rng, variables, info):
    del rng, variables
    uniform = jnp.full(info.num_classes, 1 / info.num_classes)
    return FreeMatchState(uniform[0], uniform, uniform)

  def average(old, new):
    return decay * old + (1 - decay) * new

  def loss(student, teacher, targets, state, step):
    probs = jax.nn.softmax(teacher['weak'].logits)  # [U, K]
    confidence, guess = probs.max(-1), probs.argmax(-1)  # [U]
    frequency = jax.nn.one_hot(guess, probs.shape[-1]).mean(0)  # [K]
    warm = step >= warmup_steps
    new = FreeMatchState(
      threshold=average(state.threshold, confidence.mean()),
      probs=average(state.probs, probs.mean(0)),
      histogram=average(state.histogram, frequency),
    )
    state = jax.tree.map(lambda x, old: jnp.where(warm, x, old), new, state)
    thresholds = state.threshold * state.probs / state.probs.max()  # [K]
    thresholds = jnp.clip(thresholds, min_threshold, max_threshold)
    selected = warm & (confidence >= thresholds[guess])
    mask = selected.astype(jnp.float32)  # [U]

    labeled = losses.cross_entropy(student['labeled'].logits, targets['label'])
    unlabeled = weight * losses.cross_entropy(
      student['strong'].logits, guess, mask
    ) + fairness_weight * fairness(student['strong'].logits, mask, state)
    metrics = {
      'pseudo_labels': PseudoLabels(guess, mask),
      'threshold': state.threshold,
    }
    return Losses(labeled, unlabeled), state, metrics

  return Method(loss, init=init)


def fairness(logits, mask, state: FreeMatchState):
  """Minus the cross-entropy between expected and present class frequencies.

  Both are mean predictions divided by histograms; a class that is absent from
  a histogram is left out of it. Zero where nothing is selected.
  """
  probs = jax.nn.softmax(logits)  # [U, K]
  number = jnp.maximum(mask.sum(), 1.0)
  present = (probs * mask[:, None]).sum(0) / number  # [K]
  guesses = jax.nn.one_hot(probs.argmax(-1), probs.shape[-1])
  histogram = jax.lax.stop_gradient((guesses * mask[:, None]).sum(0) / number)
  expected = _normalized_ratio(state.probs, state.histogram)
  present = _normalized_ratio(present, histogram)
  value = jnp.sum(expected * jnp.log(present + 1e-12))
  return jnp.where(mask.sum() > 0, value, 0.0)


def _normalized_ratio(probs, histogram):
  """`probs / histogram` scaled to sum one; zero where the histogram is."""
  safe = jnp.where(histogram > 0, histogram, 1.0)
  ratio = jnp.where(histogram > 0, probs / safe, 0.0)
  total = ratio.sum()
  return ratio / jnp.where(total > 0, total, 1.0)
