"""Which labels a method guesses, how far it trusts them, and how right."""

import jax
import numpy as np

from flatmatch_jax.methods.base import Method
from flatmatch_jax.step import train_step
from flatmatch_jax.step.forward import Forward
from flatmatch_jax.types import Losses


def make_guess(forward: Forward, method: Method):
  """Returns `guess(state, batch) -> PseudoLabels`, those of the step."""

  @jax.jit
  def guess(state, batch):
    views, targets, _ = train_step.prepare(forward, method, state, batch)
    objective = train_step.make_objective(forward, method, state)
    _, found = objective(state.params, Losses(1.0, 1.0), views, targets)
    return found.metrics['pseudo_labels']

  return guess


def quality(label, weight, truth, num_classes: int) -> dict[str, np.ndarray]:
  """How good guesses [n] of weights [n] are for each true class.

  Images whose truth is unknown, -1, are left out. A class without images, or
  without trusted ones, has NaN.

  Returns:
    used: mean weight of the images of a class [K].
    accuracy: percent of that weight whose guess is right [K].
    confusion: weight by truth and guess [K, K].
    images: number of images of a class [K].
  """
  known = np.asarray(truth) >= 0
  label, weight, truth = (np.asarray(x)[known] for x in (label, weight, truth))
  confusion = np.bincount(
    num_classes * truth + label, weight, num_classes**2
  ).reshape(num_classes, num_classes)
  images = np.bincount(truth, minlength=num_classes)
  trusted = confusion.sum(1)
  share = lambda part, whole: part / np.where(whole > 0, whole, np.nan)
  return {
    'used': share(trusted, images),
    'accuracy': 100 * share(np.diagonal(confusion), trusted),
    'confusion': confusion,
    'images': images,
  }
