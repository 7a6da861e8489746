"""A trained model as a function from images to probabilities."""

from collections.abc import Sequence
import functools
from typing import Protocol

import jax
import numpy as np

from flatmatch_jax.data import augment, evaluation
from flatmatch_jax.system import sharding
from flatmatch_jax.types import PyTree


class Classify(Protocol):
  """Probabilities [N, K] of images [N, H, W, C] for each of the weights."""

  def __call__(
    self, weights: Sequence[PyTree], batch_stats: PyTree, images, keep=...
  ) -> list[np.ndarray]: ...


def apply(model, mean, std, variables: PyTree, images) -> jax.Array:
  """Probabilities [N, K] of uint8 images [N, H, W, C]."""
  images = augment.normalize(images, mean, std)
  return jax.nn.softmax(model.apply(variables, images, train=False).logits)


def make_classifier(
  model, mean, std, batch_size: int, mesh: jax.sharding.Mesh
) -> Classify:
  """Returns `classify(weights, batch_stats, images, keep)`.

  For each of `weights`, which are trees of parameters, it gives probabilities
  [N, K], or what `keep` makes of the rows [n, K] of a batch: of a million
  images and a thousand classes all of them are gigabytes. Images that are
  decoded as they are asked for are so once for all. They are uint8 and enter as
  they are, in batches of one size, each spread over all devices: the last one
  is filled up, and its filling cut off again, so each image counts once. Every
  process has all images and gets all the probabilities, but decodes and
  classifies only its own rows.
  """
  devices = mesh.size
  batch_size = -(-batch_size // devices) * devices
  batches = evaluation.make_batches(batch_size, mesh)
  gather = sharding.make_gather(mesh)

  @functools.partial(jax.jit, out_shardings=sharding.replicated(mesh))
  def probabilities(params, batch_stats, images):
    variables = {'params': gather(params), 'batch_stats': batch_stats}
    return apply(model, mean, std, variables, images)

  def classify(weights, batch_stats, images, keep=np.asarray):
    rows: list[list] = [[] for _ in weights]
    for batch in batches(images):
      for row, params in zip(rows, weights, strict=True):
        # Taken off the device at once: for ImageNet they are gigabytes.
        found = np.asarray(probabilities(params, batch_stats, batch))
        row.append(keep(found))
    return [np.concatenate(row)[: len(images)] for row in rows]

  return classify


def surest(probabilities):
  """The largest of each row [n, K] and its class, as [n, 2] of one type."""
  confidence, guess = probabilities.max(-1), probabilities.argmax(-1)
  # Exact: classes are fewer than 2^24.
  return np.stack([confidence, guess.astype(confidence.dtype)], -1)


def report(probabilities, labels) -> dict:
  """How good probabilities [N, K] are, in percent, and the confusion [K, K].

  The calibration error is the mean difference of confidence and accuracy over
  15 bins of equal width, weighted by their images. A class without images has
  no error: None. Probabilities that are not numbers are no confidence.
  """
  labels, guess = np.asarray(labels), probabilities.argmax(-1)
  classes = probabilities.shape[-1]
  confusion = np.bincount(
    classes * labels + guess, minlength=classes**2
  ).reshape(classes, classes)  # Rows are the truth.
  total, right = confusion.sum(1), np.diagonal(confusion)
  class_errors = 100.0 * (total - right) / np.where(total, total, np.nan)
  bins = reliability(probabilities, labels)
  gaps = np.abs(bins['confidence'] - bins['accuracy'])
  return {
    'error': 100.0 * int(total.sum() - right.sum()) / len(labels),
    'balanced_error': float(np.nanmean(class_errors)),
    'calibration_error': float(100 * np.sum(bins['share'] * gaps)),
    'class_errors': [None if np.isnan(e) else float(e) for e in class_errors],
    'confusion': confusion.tolist(),
  }


def reliability(probabilities, labels, bins: int = 15) -> dict[str, np.ndarray]:
  """Images by confidence, in bins of equal width: what share of all they are,
  and their mean confidence and accuracy, 0 in a bin without images."""
  confidence = np.nan_to_num(probabilities.max(-1))
  right = probabilities.argmax(-1) == np.asarray(labels)
  number = np.minimum((confidence * bins).astype(int), bins - 1)
  count = np.bincount(number, minlength=bins)
  mean = lambda values: np.bincount(number, values, bins) / np.maximum(count, 1)
  return {
    'share': count / len(confidence),
    'confidence': mean(confidence),
    'accuracy': mean(right),
  }


def evaluate(classify, state, images, labels) -> dict:
  """The report on the averaged weights, and the error of the raw ones.

  Both use the live running statistics, as published code bases do.
  """
  averaged, raw = classify(
    (state.ema_params, state.params), state.batch_stats, images
  )
  found = report(averaged, labels)
  return found | {'error_raw': report(raw, labels)['error']}
