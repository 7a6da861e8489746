"""The user's own images in one .npz file of named arrays.

  labeled_images [n, H, W] or [n, H, W, C] uint8, labeled_labels [n] integers,
  unlabeled_images, and optionally test_images, test_labels, class_names [K].

Grey or RGB, all of one size; labels count from 0. Nothing is unpickled.
"""

import os
import pathlib
import zipfile

import numpy as np

from flatmatch_jax.data.sources import Dataset
from flatmatch_jax.system import array_files, memory
from flatmatch_jax.types import UserError

_NEEDED = ('labeled_images', 'labeled_labels', 'unlabeled_images')
_OPTIONAL = ('test_images', 'test_labels', 'class_names')


def load(data_dir: str | os.PathLike | None) -> Dataset:
  """Reads the file `data_dir`; rows are the labeled, then the unlabeled."""
  path = pathlib.Path(data_dir or '').expanduser()
  if not path.is_file():
    raise UserError(
      f'There is no file {str(data_dir or "")!r}; name one with '
      f'--config.data_dir=FILE.npz that holds {", ".join(_NEEDED)}.'
    )
  try:
    _check_sizes(path)
    with np.load(path, allow_pickle=False) as file:
      return from_arrays(dict(file))
  except array_files.BROKEN as e:
    raise UserError(
      f'{path} cannot be used: {str(e).rstrip(".")}. Write it anew, or '
      'put back a copy; docs/own_images.md says what it must hold.'
    ) from e


def _check_sizes(path):
  """Raises before anything is unpacked: a small file may hold a huge array."""
  with zipfile.ZipFile(path) as file:
    members = {
      info.filename.removesuffix('.npy'): info for info in file.infolist()
    }
    unknown = sorted(set(members) - {*_NEEDED, *_OPTIONAL})
    missing = [name for name in _NEEDED if name not in members]
    test = {'test_images', 'test_labels'}
    if test & set(members):
      missing += sorted(test - set(members))
    if missing:
      raise ValueError(
        f'it has no array {missing[0]!r} (it holds: '
        f'{", ".join(members) or "nothing"}); save one under that name'
      )
    if unknown:
      raise ValueError(
        f'{unknown[0]!r} is none of {", ".join((*_NEEDED, *_OPTIONAL))}; '
        'leave it out'
      )
    total = sum(info.file_size for info in members.values())
    if total > (there := memory.host_bytes()):
      raise ValueError(
        f'its arrays take {memory.gib(total)}, more than the '
        f'{memory.gib(there)} of memory; save fewer or smaller images'
      )
    array_files.check_npz(file)


def from_arrays(arrays: dict[str, np.ndarray]) -> Dataset:
  """The dataset of arrays by their names; ValueError says what is wrong."""
  if ('test_images' in arrays) != ('test_labels' in arrays):
    raise ValueError('test_images and test_labels go together; give both')
  labels = {
    name: _labels(arrays, f'{name}_labels', f'{name}_images')
    for name in ('labeled', 'test')
    if f'{name}_labels' in arrays
  }
  class_names = _class_names(arrays, labels['labeled'])
  for name, values in labels.items():
    if values.min() < 0 or values.max() >= len(class_names):
      raise ValueError(
        f'{name}_labels run from {values.min()} to {values.max()}, but there '
        f'are {len(class_names)} classes; count labels from 0'
      )
  counts = np.bincount(labels['labeled'], minlength=len(class_names))
  if not counts[0] and 'class_names' not in arrays:
    raise ValueError(
      f'labeled_labels run from {labels["labeled"].min()} to '
      f'{labels["labeled"].max()}; count labels from 0'
    )
  if not counts.all():
    raise ValueError(
      f'class {counts.argmin()} ({class_names[counts.argmin()]}) has no '
      'labeled example; add one to each class'
    )
  labeled = _images(arrays, 'labeled_images')
  unlabeled = _images(arrays, 'unlabeled_images')
  has_test = 'test_images' in arrays
  test = _images(arrays, 'test_images') if has_test else labeled[:0]
  for name, other in (('unlabeled', unlabeled), ('test', test)):
    if other.shape[1:] != labeled.shape[1:]:
      raise ValueError(
        f'{name}_images are of shape {other.shape[1:]} and labeled_images of '
        f'{labeled.shape[1:]}; bring all to one size'
      )
  unknown = np.full(len(unlabeled), -1)
  return Dataset(
    name='npz',
    train_images=np.concatenate([labeled, unlabeled]),
    train_labels=np.concatenate([labels['labeled'], unknown]).astype(np.int32),
    test_images=test,
    test_labels=labels.get('test', np.array([])).astype(np.int32),
    class_names=class_names,
  )


def _images(arrays, name):
  """An array of images as [N, H, W, C]."""
  images = arrays[name]
  if images.dtype != np.uint8:
    numbers = images.size and images.dtype.kind in 'biuf'
    extent = f' from {images.min():g} to {images.max():g}' if numbers else ''
    raise ValueError(
      f'{name} are {images.dtype}{extent}, not uint8; scale them to 0..255 and '
      'convert, such as np.uint8(np.round(255 * images)) from 0..1'
    )
  if images.ndim == 3:
    images = images[..., None]
  if images.ndim != 4 or images.shape[-1] not in (1, 3) or not images.size:
    raise ValueError(
      f'{name} of shape {arrays[name].shape} are not [N, H, W] grey or '
      '[N, H, W, 3] RGB images, at least one'
    )
  return images


def _labels(arrays, name, images):
  labels = arrays[name]
  if labels.ndim != 1 or labels.dtype.kind not in 'iu' or not len(labels):
    raise ValueError(
      f'{name} are {labels.dtype} of shape {labels.shape}; one integer for '
      'each image is needed. Of texts, class_names, labels = np.unique(texts, '
      'return_inverse=True) makes them'
    )
  if arrays[images].shape[:1] != labels.shape:
    raise ValueError(
      f'there are {len(labels)} {name} for {images} of shape '
      f'{arrays[images].shape}; give one for each'
    )
  return labels


def _class_names(arrays, labels):
  """As given, or the labels themselves as text."""
  number = int(labels.max()) + 1
  if number > len(labels) and 'class_names' not in arrays:
    raise ValueError(
      f'labeled_labels run up to {number - 1}, but only {len(labels)} images '
      'are labeled; count classes from 0, with at least one example of each'
    )
  names = arrays.get('class_names', np.arange(number).astype(str))
  if names.ndim != 1 or names.dtype.kind != 'U':
    raise ValueError(
      f'class_names are {names.dtype} of shape {names.shape}; save a list of '
      'texts'
    )
  different = len(set(names.tolist()))
  if len(names) < 2 or different < len(names):
    raise ValueError(
      f'{different} different names of {len(names)} classes; at least two are '
      'needed, each with its own name'
    )
  return tuple(names.tolist())
