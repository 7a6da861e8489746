"""Datasets by name."""

from collections.abc import Callable
import functools
import os
from typing import NamedTuple

from flatmatch_jax.data import sources
from flatmatch_jax.data.sources import Dataset
from flatmatch_jax.types import UserError

__all__ = ['SOURCES', 'Dataset', 'SourceInfo', 'load']


class SourceInfo(NamedTuple):
  """How to load a dataset, and what a config is checked against before."""

  loader: Callable[[str | os.PathLike | None], Dataset]  # Takes the data_dir.
  num_classes: int


SOURCES = {
  'digits': SourceInfo(sources.digits, 10),
  'cifar10': SourceInfo(functools.partial(sources.from_tfds, 'cifar10'), 10),
  'cifar100': SourceInfo(functools.partial(sources.from_tfds, 'cifar100'), 100),
  'svhn': SourceInfo(functools.partial(sources.from_tfds, 'svhn_cropped'), 10),
  'stl10': SourceInfo(functools.partial(sources.from_tfds, 'stl10'), 10),
}


def load(name: str, data_dir: str | os.PathLike | None = None) -> Dataset:
  """Returns a dataset of `SOURCES`; see its loader for the order of rows."""
  if name not in SOURCES:
    raise UserError(
      f'Unknown dataset {name!r}; known are {", ".join(SOURCES)}.'
    )
  return SOURCES[name].loader(data_dir)._replace(name=name)
