"""The order of the images to label; without a model found in the meantime."""

import pathlib
from typing import NamedTuple

from jax.errors import JaxRuntimeError
import numpy as np

from flatmatch_jax.data import choice, images
from flatmatch_jax.label.store import Store
from flatmatch_jax.system import messages
from flatmatch_jax.training.classifier import BATCH, Classifier
from flatmatch_jax.types import UserError

# Images that are compared: a few, for a good start within seconds, then more.
SIZES = (256, choice.MOST)


class Guess(NamedTuple):
  label: int | None  # None if there is no guess.
  confidence: float


class Ranking:
  """Orders the images of a store.

  With a model they come in the order of the report of its run: each looks at
  the same images in the same size (`report/advice.py`).

  Attributes:
    guesses: of a model, by image.
    busy: what it is doing, '' once it is done.
  """

  def __init__(self, store: Store, model: Classifier | None = None):
    self._store, self._model = store, model
    self.guesses: dict[int, Guess] = {}
    self.busy = 'Choosing images …'

  def run(self) -> None:
    numbers = sorted(self._store.pending)
    order = self._shuffle([self._store.path(number) for number in numbers])
    drawn = [numbers[row] for row in order]
    self._store.reorder(drawn)
    try:
      for size in SIZES[-1:] if self._model else SIZES:
        self._rank(drawn[:size])
        if size >= len(drawn):
          break
    except (UserError, OSError, MemoryError, JaxRuntimeError) as error:
      reason = str(error).splitlines()[0] if str(error) else 'no memory'
      messages.say(f'Images come in random order: {reason}')
    finally:
      self.busy = ''

  def _rank(self, numbers):
    """Puts the best of some images first."""
    numbers = [number for number in numbers if number in self._store.pending]
    paths = [self._store.path(number) for number in numbers]
    new, probs, unreadable = self._look(paths, self._model)
    for row, reason in unreadable.items():
      self._store.set_unreadable(numbers[row], reason)
    numbers = [n for row, n in enumerate(numbers) if row not in unreadable]
    if not numbers:
      return
    if probs is not None:
      guesses = zip(probs.argmax(-1).tolist(), probs.max(-1), strict=True)
      self.guesses |= {
        number: Guess(label, float(confidence))
        for number, (label, confidence) in zip(numbers, guesses, strict=True)
      }
    labeled = self._store.labeled_paths()
    chosen = self._shuffle(labeled)[: choice.MOST]
    known, _, _ = self._look([labeled[row] for row in chosen])
    order = choice.order(new, known, probs)
    self._store.reorder([numbers[row] for row in order])

  def _shuffle(self, paths):
    root = self._store.root
    return choice.shuffled([str(path.relative_to(root)) for path in paths])

  def _look(self, paths, model=None):
    """Thumbnails of the files that can be read, a model's probabilities of
    them, and why the other files cannot be read, by row."""
    read = self._model.read if self._model else _read
    small = [np.empty((0, choice.SIDE, choice.SIDE, 3), np.uint8)]
    probs: list[np.ndarray] = []
    unreadable: dict[int, str] = {}
    for start in range(0, len(paths), BATCH):
      pixels, bad = read(paths[start : start + BATCH])
      pixels = np.delete(pixels, list(bad), 0)
      small.append(choice.thumbnails(pixels))
      if model:
        probs.append(model.run(pixels))
      unreadable |= {start + row: reason for row, reason in bad.items()}
    found = np.concatenate(probs) if probs else None
    return np.concatenate(small), found, unreadable


def _read(paths: list[pathlib.Path]) -> tuple[np.ndarray, dict[int, str]]:
  pixels = np.empty((len(paths), choice.SIDE, choice.SIDE, 3), np.uint8)
  return pixels, images.read_into(pixels, paths)
