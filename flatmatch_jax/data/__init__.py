"""Datasets by name."""

from collections.abc import Callable
import functools
from typing import NamedTuple
import zlib

import numpy as np

from flatmatch_jax.data import arrays, folder, resident, sources, streaming
from flatmatch_jax.data.frames import Frames
from flatmatch_jax.data.pipeline import Pipeline
from flatmatch_jax.data.sources import Dataset
from flatmatch_jax.types import UserError, check_known

__all__ = [
  'SOURCES',
  'Dataset',
  'SourceInfo',
  'fingerprint',
  'from_config',
  'load',
  'pipeline_of',
]


class SourceInfo(NamedTuple):
  """How to load a dataset, and what a config is checked against before."""

  loader: Callable[..., Dataset]  # Takes the data_dir and its `fields`.
  num_classes: int | None  # None: known only when it is loaded.
  fields: tuple[str, ...] = ()  # Of the config, by the names of arguments.


SOURCES = {
  'digits': SourceInfo(sources.digits, 10),
  'cifar10': SourceInfo(functools.partial(sources.from_tfds, 'cifar10'), 10),
  'cifar100': SourceInfo(functools.partial(sources.from_tfds, 'cifar100'), 100),
  'svhn': SourceInfo(functools.partial(sources.from_tfds, 'svhn_cropped'), 10),
  'stl10': SourceInfo(functools.partial(sources.from_tfds, 'stl10'), 10),
  # Decoded step by step.
  'imagenet': SourceInfo(
    functools.partial(streaming.from_tfds, 'imagenet2012'),
    1000,
    ('image_size',),
  ),
  'imagenet30': SourceInfo(
    functools.partial(streaming.from_tfds, 'imagenet2012'),
    30,
    ('image_size', 'classes'),
  ),
  # The user's own.
  'folder': SourceInfo(folder.load, None, ('image_size',)),
  'npz': SourceInfo(arrays.load, None),
  'tfds': SourceInfo(sources.any_tfds, None, ('tfds_name', 'image_size')),
}


def load(name: str, data_dir: str | None = None, **options) -> Dataset:
  """Returns a dataset of `SOURCES`; see its loader for the order of rows."""
  check_known('dataset', name, SOURCES)
  return SOURCES[name].loader(data_dir, **options)._replace(name=name)


def pipeline_of(dataset: Dataset) -> Pipeline:
  """How the dataset becomes batches; the one place that looks at its kind."""
  streams = isinstance(dataset.train_images, Frames)
  return streaming.PIPELINE if streams else resident.PIPELINE


def fingerprint(dataset: Dataset) -> str:
  """A checksum of all labels and pixels; of streams, of the encoded images."""
  identity = pipeline_of(dataset).identity
  checksum = 0
  for part in (
    dataset.train_labels,
    dataset.test_labels,
    identity(dataset.train_images),
    identity(dataset.test_images),
  ):
    checksum = zlib.crc32(np.ascontiguousarray(part).data, checksum)
  return f'{checksum:08x}'


def from_config(config) -> Dataset:
  """The dataset of a config, which fits its `mean` and `std`."""
  fields = SOURCES[config.dataset].fields
  dataset = load(
    config.dataset, config.data_dir, **{name: config[name] for name in fields}
  )
  *sides, channels = dataset.train_images.shape[1:]
  if pipeline_of(dataset).pads and config.pad >= min(sides):
    raise UserError(
      f'config.pad={config.pad} must be below the {min(sides)} pixels of the '
      'smaller side of the images; set --config.pad.'
    )
  for name in ('mean', 'std'):
    if len(config[name]) not in (1, channels):
      raise UserError(
        f'config.{name} has {len(config[name])} numbers, but the images have '
        f'{channels} channels; set one for all, or one for each.'
      )
  return dataset
