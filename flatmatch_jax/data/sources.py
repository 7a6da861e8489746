"""Datasets as uint8 arrays in memory, in an order that never changes.

A labeled index of a split means the same image on every machine, so each
source says in which order its rows come. TensorFlow, TensorFlow Datasets and
scikit-learn are imported only when a source that needs them is loaded.
"""

import contextlib
import os
import re
import sys
import tempfile
import types
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from flatmatch_jax.data import images
from flatmatch_jax.system.messages import errors_only, quiet_tensorflow
from flatmatch_jax.types import UserError


class Dataset(NamedTuple):
  """Train and test images with their labels, as numpy arrays."""

  name: str
  train_images: Any  # [N, H, W, C] uint8
  train_labels: np.ndarray  # [N] int32, -1 where unknown.
  test_images: Any  # [M, H, W, C] uint8
  test_labels: np.ndarray  # [M] int32
  class_names: tuple[str, ...]
  # Of the training images, relative to the data_dir, where they are files.
  train_paths: tuple[str, ...] = ()


class TfdsSplits(NamedTuple):
  """The splits of a TFDS dataset that make up ours, concatenated in order."""

  train: tuple[str, ...] = ('train',)
  test: tuple[str, ...] = ('test',)


# Their ids, where they have some, number the rows; see `any_tfds` for others.
TFDS_SPLITS = {
  'cifar10': TfdsSplits(),
  'cifar100': TfdsSplits(),
  'svhn_cropped': TfdsSplits(train=('train', 'extra')),
  'stl10': TfdsSplits(train=('train', 'unlabelled')),  # Labels 5,000 + none.
}

_BATCH = 256
_RETRIES = 2  # TFDS would retry for 3.5 minutes where there is no network.


def digits(data_dir: str | os.PathLike | None = None) -> Dataset:
  """The 1,797 digits of 8 x 8 pixels that scikit-learn carries.

  Pixels 0..16 are scaled to 0..255. The test set is the first 360 entries of
  `np.random.RandomState(0).permutation(1797)`, a stream that numpy keeps
  frozen; the other 1,437 train. Both are in the order of the file.
  """
  del data_dir  # Nothing is stored.
  from sklearn import datasets

  bunch = datasets.load_digits()
  images = np.round(bunch.images * 255 / 16).astype(np.uint8)[..., None]
  labels = bunch.target.astype(np.int32)
  is_test = np.zeros(len(labels), bool)
  is_test[np.random.RandomState(0).permutation(len(labels))[:360]] = True
  return Dataset(
    name='digits',
    train_images=images[~is_test],
    train_labels=labels[~is_test],
    test_images=images[is_test],
    test_labels=labels[is_test],
    class_names=tuple(str(name) for name in bunch.target_names),
  )


def from_tfds(name: str, data_dir: str | os.PathLike | None = None) -> Dataset:
  """Reads a dataset of `TFDS_SPLITS`; downloads it if it is not there.

  Examples with an id such as 'train_00042' (CIFAR, SVHN) go to the row of that
  number, as in the official files. Others (STL-10) keep the order of the TFDS
  files, which TFDS shuffles by a fixed hash when it prepares them. Without a
  `data_dir` they lie in the usual folder of TFDS.
  """
  splits = TFDS_SPLITS[name]

  def read(builder):
    return _read(builder, splits.train), _read(builder, splits.test)

  return _load(name, data_dir, read)


def any_tfds(
  data_dir: str | os.PathLike | None, tfds_name: str, image_size: int
) -> Dataset:
  """Reads any TFDS dataset that has 'image' and 'label'.

  Its split 'train' trains; 'test' tests, or 'validation' where there is no
  'test' or its labels are hidden. Rows keep the order of the TFDS files.
  Images that are all of one size stay as they are; others are brought to
  `image_size` as files are, see images.py.
  """
  if tfds_name in TFDS_SPLITS:
    return from_tfds(tfds_name, data_dir)

  def read(builder):
    train = _read(builder, ('train',), image_size)
    for split in ('test', 'validation'):
      if split in builder.info.splits:
        test = _read(builder, (split,), image_size)
        if len(test[1]) and test[1].min() >= 0:
          return train, test
    return train, (train[0][:0], train[1][:0])

  return _load(tfds_name, data_dir, read)


def _load(name, data_dir, read) -> Dataset:
  """A dataset of which `read(builder)` gives (images, labels) twice."""
  with prepared(name, data_dir) as builder:
    (train_images, train_labels), (test_images, test_labels) = read(builder)
  return Dataset(
    name=name,
    train_images=train_images,
    train_labels=train_labels,
    test_images=test_images,
    test_labels=test_labels,
    class_names=tuple(builder.info.features['label'].names),
  )


@contextlib.contextmanager
def prepared(name: str, data_dir: str | os.PathLike | None):
  """A builder of TFDS whose data are there; what fails is a UserError."""
  tfds = import_tfds()
  folder = os.path.expanduser(data_dir or tfds.core.constants.DATA_DIR)
  try:
    with errors_only('absl'):
      builder = tfds.builder(
        name, data_dir=folder if data_dir else None, try_gcs=False
      )
      _check_features(builder, name)
      if not builder.is_prepared():
        _prepare(builder, name, folder)
      yield builder
  except (UserError, MemoryError):
    raise
  except Exception as error:  # Each damaged file has its own type of error.
    if not _is_known(name):
      raise UserError(
        f'Dataset {name!r} is neither in {folder} nor known to TFDS: '
        f'{one_line(error)}. Choose one of tfds.list_builders().'
      ) from error
    raise UserError(
      f'Dataset {name!r} in {folder} cannot be read: {one_line(error)}. '
      f'Delete {os.path.join(folder, name.partition(":")[0])} and prepare it '
      f'again: {_command(name, folder)}'
    ) from error


def import_tfds() -> types.ModuleType:
  """Returns tensorflow_datasets, quiet and without GPUs."""
  quiet_tensorflow()
  import tensorflow as tf
  import tensorflow_datasets as tfds

  # Else TensorFlow would take the memory that JAX needs. RuntimeError: it is
  # in use already, and its user decides.
  with contextlib.suppress(RuntimeError):
    tf.config.set_visible_devices([], 'GPU')
  return tfds


def _is_known(name: str) -> bool:
  """Whether TFDS itself has such a dataset, config and version."""
  import tensorflow_datasets as tfds

  try:
    with tempfile.TemporaryDirectory() as nothing:
      tfds.builder(name, data_dir=nothing, try_gcs=False)
  except Exception:  # As many types as ways to be wrong.
    return False
  return True


def _check_features(builder, name: str) -> None:
  """Raises UserError, before any download, where there is nothing to learn."""
  features = builder.info.features or {}
  if missing := sorted({'image', 'label'} - set(features)):
    raise UserError(
      f'Dataset {name!r} has no feature {missing[0]!r} (it has: '
      f'{", ".join(features) or "none"}); choose one of TFDS with image and '
      'label.'
    )
  image, label = features['image'], features['label']
  grey_or_rgb = len(image.shape) == 3 and image.shape[-1] in (1, 3)
  if image.np_dtype != np.uint8 or not grey_or_rgb:
    raise UserError(
      f'Images of {name!r} are {image}; choose a dataset of grey or RGB images '
      'of 8 bits.'
    )
  if getattr(label, 'num_classes', None) is None:
    raise UserError(
      f'Labels of {name!r} are {label}; choose a dataset with one of several '
      'classes for each image.'
    )


def _prepare(builder, name: str, folder: str) -> None:
  """Downloads and writes a dataset; raises UserError where that fails."""
  import tensorflow_datasets as tfds
  from tensorflow_datasets.core.download import downloader

  tfds.display_progress_bar(sys.stderr.isatty())
  retries, downloader.MAX_RETRIES = downloader.MAX_RETRIES, _RETRIES
  try:
    with contextlib.redirect_stdout(sys.stderr):
      builder.download_and_prepare()
    if not builder.is_prepared():  # TFDS takes any folder for a dataset.
      raise FileNotFoundError(
        f'{builder.data_dir} has no dataset_info.json; delete it'
      )
  except Exception as error:
    raise UserError(
      f'Dataset {name!r} is not prepared in {folder}, and preparing it failed: '
      f'{one_line(error)}. Give a data_dir that holds {name}, or prepare it '
      f'with network access and copy the folder: {_command(name, folder)}'
    ) from error
  finally:
    downloader.MAX_RETRIES = retries


def _read(
  builder, splits: tuple[str, ...], image_size: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
  """Returns images and labels of the concatenated `splits`."""
  if missing := [s for s in splits if s not in builder.info.splits]:
    raise ValueError(f'it has no split {missing[0]!r}')
  shape = builder.info.features['image'].shape
  if None in shape:
    if image_size is None:
      raise ValueError(f'images of shape {shape} are not all of one size')
    shape = (image_size, image_size, shape[-1])
  sizes = [builder.info.splits[split].num_examples for split in splits]
  pixels = images.empty(sum(sizes), shape)
  labels = np.full(sum(sizes), -1, np.int32)
  start = 0
  for split, size in zip(splits, sizes, strict=True):
    stop = start + size
    _fill(builder, split, pixels[start:stop], labels[start:stop])
    start = stop
  return pixels, labels


def _fill(builder, split: str, pixels: np.ndarray, labels: np.ndarray) -> None:
  """Writes one split into `pixels` [N, H, W, C] and `labels` [N], in place."""
  import tensorflow_datasets as tfds

  features = builder.info.features
  # Elsewhere an id may be anything.
  numbered = builder.name in TFDS_SPLITS and 'id' in features
  wanted = ('image', 'label', 'id') if numbered else ('image', 'label')
  one_size = None not in features['image'].shape
  dataset = builder.as_dataset(
    split=split,
    batch_size=_BATCH if one_size else None,
    shuffle_files=False,
    decoders=tfds.decode.PartialDecoding(dict.fromkeys(wanted, True)),
    read_config=tfds.ReadConfig(
      interleave_cycle_length=1,  # File after file.
      try_autocache=False,  # It would hold a second copy.
    ),
  )
  filled = np.zeros(len(labels), bool)
  start = 0
  for batch in tfds.as_numpy(dataset):
    if not one_size:
      batch = _as_batch(batch, pixels.shape[1:])
    rows = np.arange(start, start + len(batch['label']))
    start += len(rows)
    if numbered:
      rows = _numbers(batch['id'], split, len(labels))
    pixels[rows] = batch['image']
    labels[rows] = batch['label']
    filled[rows] = True
  if not filled.all():
    raise ValueError(
      f'row {np.argmin(filled)} of the {len(filled)} of split {split!r} is '
      'absent'
    )


def _as_batch(example, shape):
  """One example of any size as a batch of one of `shape`."""
  image = example['image']
  image = Image.fromarray(image[..., 0] if shape[-1] == 1 else image)
  return {
    'image': images.fit(image, shape)[None],
    'label': np.asarray(example['label'])[None],
  }


def _numbers(ids, split: str, size: int) -> np.ndarray:
  """Returns 42 for an id such as b'train_00042'."""
  matches = [re.fullmatch(rb'\w*_(\d{1,18})', name) for name in ids]
  rows = np.array([int(match[1]) if match else size for match in matches])
  if rows.max() >= size:
    raise ValueError(
      f'id {ids[rows.argmax()]!r} of split {split!r} does not end in a number '
      f'below {size}'
    )
  return rows


def one_line(error: BaseException) -> str:
  """Type and message of an error, without line breaks, and cut off."""
  # Without TensorFlow's marks.
  text = re.sub(r'\{\{.*?\}\}|\[Op:\w*\] name:', '', str(error))
  text = ' '.join(f'{type(error).__name__}: {text}'.split()).rstrip('.')
  return text if len(text) <= 300 else f'{text[:300]}...'


def _command(name: str, folder: str) -> str:
  """What to run; `tfds build` would need apache_beam as well."""
  return (
    "python -c 'import tensorflow_datasets as tfds; "
    f'tfds.builder("{name}", data_dir="{folder}").download_and_prepare()\''
  )
