"""A trained model in use: `flatmatch_jax.load(PATH)`."""

from collections.abc import Callable, Sequence
import os
import pathlib
from typing import Any, NamedTuple

import jax
import numpy as np

from flatmatch_jax.data import images as images_lib
from flatmatch_jax.run.workdir import Workdir
from flatmatch_jax.system import messages, sharding
from flatmatch_jax.training import classify, exported, program
from flatmatch_jax.training import load as load_lib
from flatmatch_jax.types import UserError

BATCH = 256  # Files that are in memory at a time.

_PATH = (str, os.PathLike)
Paths = Sequence[str | os.PathLike]


class Classifier(NamedTuple):
  """A trained model and what it takes to use it."""

  class_names: tuple[str, ...]
  image_shape: tuple[int, int, int]  # H, W, C
  # Of an image that just covers the shape, the share of its sides seen.
  test_share: float
  # uint8 [N, H, W, C] -> [N, K], of any N.
  run: Callable[[np.ndarray], np.ndarray]
  about: dict[str, Any]  # Where it comes from: names and numbers, for JSON.

  @property
  def image_size(self) -> tuple[int, int]:
    """Height and width."""
    return self.image_shape[:2]

  def probabilities(
    self, images: np.ndarray | str | os.PathLike | Paths
  ) -> np.ndarray:
    """Probabilities [N, K] of images, in the order of `class_names`.

    Args:
      images: uint8 [N, H, W, C], or [N, H, W] if they are grey; or the path of
        an image file, or several. Files may have any size: they are read as in
        training. UserError names files that cannot be read; `read` tells them
        from the others.
    """
    if isinstance(images, _PATH):
      images = [images]
    if isinstance(images, Sequence) and all(
      isinstance(image, _PATH) for image in images
    ):
      return self._of_files(images)
    return self.run(self._checked(np.asarray(images)))

  def read(self, paths: Paths) -> tuple[np.ndarray, dict[int, str]]:
    """Image files as [N, H, W, C] uint8, and why rows could not be read."""
    height, width, channels = self.image_shape
    whole = round(height / self.test_share), round(width / self.test_share)
    top, left = (whole[0] - height) // 2, (whole[1] - width) // 2
    pixels = np.zeros((len(paths), *whole, channels), np.uint8)
    unreadable = images_lib.read_into(pixels, list(map(pathlib.Path, paths)))
    return pixels[:, top : top + height, left : left + width], unreadable

  def _of_files(self, paths):
    found = [np.empty((0, len(self.class_names)), np.float32)]
    for start in range(0, len(paths), BATCH):
      batch = paths[start : start + BATCH]
      pixels, unreadable = self.read(batch)
      if unreadable:
        named = [f'{batch[row]} ({why})' for row, why in unreadable.items()]
        raise UserError(
          f'Not readable as images: {messages.some(named)}; leave them out.'
        )
      found.append(self.run(pixels))
    return np.concatenate(found)

  def _checked(self, images):
    height, width, channels = self.image_shape
    given = images
    if channels == 1 and images.ndim == 3:
      images = images[..., None]
    if images.dtype != np.uint8 or images.shape[1:] != self.image_shape:
      grey = f' or [N, {height}, {width}]' if channels == 1 else ''
      raise UserError(
        f'images are {given.dtype} of shape {list(given.shape)}; the model '
        f'takes uint8 [N, {height}, {width}, {channels}]{grey}, from 0 to 255. '
        'Scale and convert them, or give paths of files of any size.'
      )
    return images


def load(path: str | os.PathLike, checkpoint: str = 'latest') -> Classifier:
  """The model of a run, ready to classify.

  Args:
    path: the folder of the run, `--workdir` of its training; a file that
      `python -m flatmatch_jax.export` wrote; or 'cifar10', which comes with
      the package.
    checkpoint: 'latest' or 'best', of a run.
  """
  if file := exported.find(os.fspath(path)):
    description, model = exported.read(file)
    about = {'file': str(file)} | {
      key: description['run'].get(key) for key in ('step', 'method', 'model')
    }
    if isinstance(model, load_lib.Trained):
      return of_trained(model, about)
    return _make(description, model, about)
  files = Workdir(os.fspath(path))
  trained = load_lib.load_trained(files, checkpoint)
  about = {
    'workdir': str(files.path),
    'step': trained.step,
    'steps': trained.config.steps,
    'method': trained.config.method,
    'model': trained.config.model,
  }
  return of_trained(trained, about)


def of_trained(trained: load_lib.Trained, about: dict) -> Classifier:
  return _make(trained.dataset, make_run(trained), about)


def _make(dataset, run, about):
  return Classifier(
    class_names=tuple(dataset['class_names']),
    image_shape=tuple(dataset['image_shape']),
    test_share=dataset['test_share'],
    run=run,
    about=about,
  )


def make_run(trained: load_lib.Trained) -> exported.Run:
  """Compiles for few images or for many, at the first call with them."""
  config = trained.config
  mesh = program.make_mesh(config)
  weights = {'params': None, 'batch_stats': {}} | jax.tree.map(
    lambda x: sharding.place(x, sharding.replicated(mesh)), trained.variables
  )
  few, many = (
    classify.make_classifier(trained.model, config.mean, config.std, size, mesh)
    for size in (exported.FEW, config.eval_batch_size)
  )

  def run(images):
    classifier = few if len(images) <= exported.FEW else many
    if not len(images):
      return np.zeros((0, len(trained.dataset['class_names'])), np.float32)
    return classifier([weights['params']], weights['batch_stats'], images)[0]

  return run
