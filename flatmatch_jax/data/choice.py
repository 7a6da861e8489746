"""Which images to label first: pure functions of pixels and probabilities."""

from collections.abc import Sequence
import hashlib
import heapq
import os

import numpy as np
from PIL import Image

from flatmatch_jax.data import images as images_lib

SIDE = 32  # Pixels of the thumbnails that are compared.
MOST = 4096  # Images that are compared; their distances take 4 bytes a pair.
UNSURE = 120  # Images that a model's choice is made from.

_CELL, _BINS, _FEATURES = 8, 8, 64


def shuffled(paths: Sequence[str]) -> list[int]:
  """Rows of `paths` in random order, which depends on nothing but the paths.

  The order of two paths does not depend on which others there are.
  """
  digest = lambda row: hashlib.blake2b(os.fsencode(paths[row])).digest()
  return sorted(range(len(paths)), key=digest)


def thumbnails(pixels: np.ndarray) -> np.ndarray:
  """Images uint8 [N, H, W, C] as they are compared, small and in colour."""
  shape = (SIDE, SIDE, 3)
  found = np.empty((len(pixels), *shape), np.uint8)
  for row, image in enumerate(pixels):
    found[row] = images_lib.fit(Image.fromarray(image.squeeze()), shape)
  return found


def order(
  new: np.ndarray,
  labeled: np.ndarray,
  probabilities: np.ndarray | None = None,
) -> list[int]:
  """Rows of the thumbnails `new`, in the order in which to label them.

  `labeled` are thumbnails of images with labels. With a model's probabilities
  [N, K] of the new ones those come first that it is unsure of.
  """
  if probabilities is None:
    return _spread(new, labeled)
  # The best image to label may be one that the model is sure of, surrounded by
  # others that it is not; only the latter are considered.
  rows = np.argsort(-doubt(probabilities), kind='stable')
  unsure = rows[:UNSURE]
  best = _spread(new[unsure], labeled, doubt(probabilities[unsure]))
  return [*unsure[best].tolist(), *rows[UNSURE:].tolist()]


def _spread(new, labeled, weights=None):
  features = embed(np.concatenate([new, labeled]))
  return spread(features[: len(new)], features[len(new) :], weights)


def embed(thumbnails: np.ndarray) -> np.ndarray:
  """Features of unit length [N, D] of uint8 images [N, SIDE, SIDE, 3].

  Histograms of the directions of edges in each cell of an image (HOG, Dalal and
  Triggs, 2005), and their principal components: what is drawn where, whatever
  its colour and brightness.
  """
  grey = thumbnails.mean(-1, dtype=np.float32) / 255
  down, right = np.gradient(grey, axis=(1, 2))
  turn = np.arctan2(down, right) / (2 * np.pi)
  number = np.floor(turn % 1 * _BINS).astype(np.int8) % _BINS
  strength, cells = np.hypot(down, right), SIDE // _CELL
  blocks = (len(grey), cells, _CELL, cells, _CELL)
  edges = [
    np.where(number == n, strength, 0).reshape(blocks).sum((2, 4))
    for n in range(_BINS)
  ]
  histograms = np.stack(edges, -1)  # [N, cells, cells, _BINS]
  histograms /= np.linalg.norm(histograms, axis=-1, keepdims=True) + 0.5
  flat = histograms.reshape(len(grey), -1)
  flat -= flat.mean(0)
  _, axes = np.linalg.eigh(flat.T @ flat)  # In ascending order.
  features = flat @ axes[:, -_FEATURES:]
  return features / (np.linalg.norm(features, axis=1, keepdims=True) + 1e-6)


def spread(
  features: np.ndarray,
  labeled: np.ndarray | None = None,
  weights: np.ndarray | None = None,
) -> list[int]:
  """All rows of `features` [N, D], in the order in which to label them.

  Each is the one that brings the images nearest to a labeled one: greedy
  k-medoids, so every beginning of the list covers the images well. Outliers,
  which the rule "farthest from all others" prefers, come late. `labeled` [M, D]
  are the features of images that have labels already, and `weights` [N] say
  how much each image counts.
  """
  distances = _distances(features, features)
  nearest = np.full(len(features), 4, np.float32)  # None is farther.
  if labeled is not None and len(labeled):
    nearest = _distances(labeled, features).min(0)
  if weights is None:
    weights = np.ones(len(features))
  weights = weights.astype(np.float32)
  gain = lambda row: float(np.maximum(nearest - distances[row], 0) @ weights)
  # Gains only shrink, so an old one that is too small need not be renewed.
  heap = [(-gain(row), row) for row in range(len(features))]
  heapq.heapify(heap)
  order: list[int] = []
  while heap:
    _, row = heapq.heappop(heap)
    now = -gain(row)
    if heap and now > heap[0][0]:
      heapq.heappush(heap, (now, row))
      continue
    order.append(row)
    nearest = np.minimum(nearest, distances[row])
  return order


def doubt(probabilities: np.ndarray) -> np.ndarray:
  """Weights [N] from a model's probabilities [N, K]: 1 less the margin.

  A guess that is shared by many images counts less for each of them, so that
  all classes come up alike, as far as the model can tell.
  """
  second, first = np.partition(probabilities, (-2, -1), axis=-1)[:, -2:].T
  guess = probabilities.argmax(-1)
  count = np.bincount(guess, minlength=probabilities.shape[-1])
  return (1 - (first - second)) / np.sqrt(count[guess])


def _distances(rows, columns):
  """Squared distances [R, C] of rows of unit length."""
  return np.maximum(2 - 2 * (rows @ columns.T), 0).astype(np.float32)
