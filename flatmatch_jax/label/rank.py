"""The order of the images, worked out while the first ones are labeled."""

from collections.abc import Callable
import pathlib
from typing import NamedTuple

import numpy as np

from flatmatch_jax.data import choice, images
from flatmatch_jax.label.store import Store
from flatmatch_jax.types import UserError

# Images that are compared: a few, for a good start within seconds, then more.
# Their distances take 4 bytes a pair.
SIZES = (256, 4096)

# Probabilities [N, K] of image files, each of which can be read.
Classify = Callable[[list[pathlib.Path]], np.ndarray]


class Guess(NamedTuple):
  label: int | None  # None if there is no guess.
  confidence: float


class Ranking:
  """Orders the images of a store.

  Attributes:
    guesses: of a model, by image.
    busy: what it is doing, '' once it is done.
  """

  def __init__(self, store: Store, classify: Classify | None = None):
    self._store, self._classify = store, classify
    self.guesses: dict[int, Guess] = {}
    self.busy = 'Choosing images …'

  def run(self, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    drawn = rng.permutation(sorted(self._store.pending)).tolist()
    self._store.reorder(drawn)
    try:
      for size in SIZES:
        self._rank(drawn[:size], rng)
        if size >= len(drawn):
          break
    except (UserError, OSError, MemoryError):
      pass  # Then they come in random order.
    finally:
      self.busy = ''

  def _rank(self, numbers, rng):
    """Puts the best of some images first."""
    numbers = [number for number in numbers if number in self._store.pending]
    pixels, unreadable = _read([self._store.path(n) for n in numbers])
    for row, reason in unreadable.items():
      self._store.set_unreadable(numbers[row], reason)
    numbers = [n for row, n in enumerate(numbers) if row not in unreadable]
    if not numbers:
      return
    labeled = self._store.labeled_paths()
    chosen = rng.permutation(len(labeled))[: SIZES[-1]]
    known, _ = _read([labeled[row] for row in chosen])
    probs = None
    if self._classify:
      probs = self._classify([self._store.path(n) for n in numbers])
      guesses = zip(probs.argmax(-1).tolist(), probs.max(-1), strict=True)
      self.guesses |= {
        number: Guess(label, float(confidence))
        for number, (label, confidence) in zip(numbers, guesses, strict=True)
      }
    order = choice.order(pixels, known, probs)
    self._store.reorder([numbers[row] for row in order])


def _read(paths):
  """Thumbnails of the files that can be read, and why the others cannot."""
  pixels = np.empty((len(paths), choice.SIDE, choice.SIDE, 3), np.uint8)
  unreadable = images.read_into(pixels, paths)
  good = [row for row in range(len(paths)) if row not in unreadable]
  return pixels[good], unreadable
