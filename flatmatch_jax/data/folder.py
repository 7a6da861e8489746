"""The user's own images in a folder.

  labeled/CLASS/…    images of each class, at any depth
  unlabeled/…        images without labels, at any depth
  test/CLASS/…       optional

Links are followed, and hidden files passed over. Other files that are no
images, and images that cannot be read, are named and skipped; of each of the
three folders at most ten files or one in twenty, whichever is more.
"""

import os
import pathlib
from typing import NamedTuple

import numpy as np

from flatmatch_jax.data import cache, images
from flatmatch_jax.data.sources import Dataset
from flatmatch_jax.system import messages
from flatmatch_jax.types import UserError


class Part(NamedTuple):
  """The files of labeled/, unlabeled/ or test/."""

  folder: pathlib.Path
  paths: list[pathlib.Path]
  labels: list[int]  # Of each path; -1 where unknown.
  skipped: dict[pathlib.Path, str]  # Other files, and why.


def load(data_dir: str | os.PathLike | None, image_size: int) -> Dataset:
  """Reads the images, from the cache if no file has changed.

  Rows are the labeled images and then the unlabeled ones, each sorted by path;
  classes are the sorted names of the folders in labeled/.
  """
  root = _root(data_dir)
  shape = (image_size, image_size, 3)
  try:
    class_names, parts = _find(root)
    _check(class_names, parts)
    paths = [path for part in parts for path in part.paths]
    file = cache.file_for(root, paths, shape)
  except OSError as error:  # No permission, or a file is gone by now.
    raise UserError(
      f'{root} cannot be read: {error}; change its permissions, and leave its '
      'files alone while a run starts.'
    ) from error
  stored = cache.load(file, len(paths), shape)
  pixels, unreadable = stored or _decode(parts, shape)
  parts = _readable(parts, unreadable)
  _check_skipped(root, parts)
  _check(class_names, parts)
  if stored is None:
    cache.store(file, pixels, unreadable)
  messages.say(_describe(class_names, parts))
  labels = np.array([x for part in parts for x in part.labels], np.int32)
  train = len(parts[0].paths) + len(parts[1].paths)
  return Dataset(
    name='folder',
    train_images=pixels[:train],
    train_labels=labels[:train],
    test_images=pixels[train:],
    test_labels=labels[train:],
    class_names=class_names,
    train_paths=tuple(
      str(path.relative_to(root)) for part in parts[:2] for path in part.paths
    ),
  )


def _root(data_dir):
  if not data_dir:
    raise UserError(
      'config.data_dir is empty; name the folder that holds labeled/ and '
      'unlabeled/ with --config.data_dir=DIR.'
    )
  root = pathlib.Path(data_dir).expanduser().absolute()
  if not root.is_dir():
    raise UserError(
      f'{root} is not a folder; name the one that holds labeled/ and '
      'unlabeled/ with --config.data_dir=DIR.'
    )
  for name, content in (
    ('labeled', 'images of each class as labeled/CLASS/*.jpg'),
    ('unlabeled', 'images without labels'),
  ):
    if not (root / name).is_dir():
      inside = messages.some(sorted(path.name for path in root.iterdir()))
      raise UserError(
        f'{root} has no folder {name}/ (it holds: {inside}); put {content} '
        'there.'
      )
  return root


def _find(root):
  """Names of the classes, and the three parts: labeled, unlabeled, test."""
  labeled, unlabeled, test = (
    root / name for name in ('labeled', 'unlabeled', 'test')
  )
  above = [p for p in (root, labeled, unlabeled, test) if p.is_dir()]
  class_names, labeled_part = _find_classes(labeled, above)
  tested: tuple[str, ...] = ()
  test_part = Part(test, [], [], {})
  if test.is_dir():
    tested, test_part = _find_classes(test, above)
  for name in tested:
    if name not in class_names:
      raise UserError(
        f'Class {name!r} of {test} is not in {labeled}, which has: '
        f'{messages.some(class_names)}; rename or remove it, or label images '
        'of it.'
      )
  test_part = test_part._replace(
    labels=[class_names.index(tested[label]) for label in test_part.labels]
  )
  found = images.find(unlabeled, above)
  unknown = [-1] * len(found.images)
  unlabeled_part = Part(unlabeled, found.images, unknown, found.others)
  return class_names, [labeled_part, unlabeled_part, test_part]


def _find_classes(folder, above):
  """Names of the folders in `folder`, and their images, labeled 0, 1, …"""
  part = Part(folder, [], [], {})
  class_names: list[str] = []
  for path in sorted(folder.iterdir()):
    if images.is_hidden(path):
      continue
    if not path.is_dir():
      if path.suffix.lower() in images.EXTENSIONS:
        raise UserError(
          f'{path} lies directly in {folder.name}/, so its class is unknown; '
          f'move it into a folder {folder.name}/CLASS/.'
        )
      part.skipped[path] = 'not a folder of a class'
      continue
    found = images.find(path, above)
    part.paths.extend(found.images)
    part.labels.extend([len(class_names)] * len(found.images))
    part.skipped.update(found.others)
    class_names.append(path.name)
  return tuple(class_names), part


def _check(class_names, parts):
  """Raises UserError where too few images are left to train or test on."""
  labeled, unlabeled, test = parts
  if len(class_names) < 2:
    raise UserError(
      f'{labeled.folder} has {len(class_names)} class folders '
      f'({messages.some(class_names)}); a classifier needs at least two, as '
      'labeled/CLASS/*.jpg.'
    )
  if absent := _absent(class_names, labeled):
    raise UserError(
      f'{len(absent)} of {len(class_names)} classes have no readable image in '
      f'{labeled.folder}: {messages.some(absent)}; add one to each, or remove '
      'its folder.'
    )
  if not unlabeled.paths:
    raise UserError(
      f'{unlabeled.folder} holds no readable image; put images without labels '
      f'there ({" ".join(images.EXTENSIONS)}).'
    )
  if test.folder.is_dir() and not test.paths:
    raise UserError(
      f'{test.folder} holds no readable image; put some there as '
      'test/CLASS/*.jpg, or remove the folder and hold out labeled images '
      'with --config.num_val=N.'
    )


def _decode(parts, shape):
  """The images of all parts without gaps, and why rows are left out."""
  pixels = images.empty(sum(len(part.paths) for part in parts), shape)
  unreadable: dict[int, str] = {}
  start = 0
  for part in parts:
    rows = pixels[start : start + len(part.paths)]
    complaints = images.read_into(rows, part.paths, part.folder.name)
    unreadable |= {start + row: why for row, why in complaints.items()}
    start += len(rows)
  good = [row for row in range(len(pixels)) if row not in unreadable]
  if unreadable:
    for to, row in enumerate(good):  # In place: one copy is enough.
      pixels[to] = pixels[row]
  return pixels[: len(good)], unreadable


def _readable(parts, unreadable):
  """The parts without the files in `unreadable`, whose rows count through."""
  kept, row = [], 0
  for part in parts:
    left = Part(part.folder, [], [], dict(part.skipped))
    for path, label in zip(part.paths, part.labels, strict=True):
      if row in unreadable:
        left.skipped[path] = unreadable[row]
      else:
        left.paths.append(path)
        left.labels.append(label)
      row += 1
    kept.append(left)
  return kept


def _check_skipped(root, parts):
  """Names skipped files; raises UserError where they are too many."""
  for part in parts:
    names = [
      f'{str(path.relative_to(root))!r} ({why})'
      for path, why in part.skipped.items()
    ]
    files = len(part.paths) + len(names)
    if len(names) > max(10, files / 20):
      raise UserError(
        f'{len(names)} of the {files} files in {part.folder} are not readable '
        'images, and at most 10 or one in twenty are skipped: '
        f'{messages.some(names)}. Repair them, or move them elsewhere.'
      )
    if names:
      messages.say(
        f'Skipped {len(names)} of the {files} files in {part.folder}: '
        f'{messages.some(names)}.'
      )


def _describe(class_names, parts):
  """One line: how many images there are of what."""
  labeled, unlabeled, test = parts
  counts = _counts(class_names, labeled)
  each = f'{len(counts)} classes of {min(counts)} to {max(counts)} images'
  if len(counts) <= messages.SHOWN:
    pairs = zip(class_names, counts, strict=True)
    each = ', '.join(f'{name} {count:,}' for name, count in pairs)
  unbalanced = ' (unbalanced)' if min(counts) < max(counts) else ''
  untested = _absent(class_names, test) if test.paths else []
  none_of = f', none of {messages.some(untested)}' if untested else ''
  return (
    f'labeled: {each}{unbalanced}; {len(unlabeled.paths):,} unlabeled; '
    f'{len(test.paths):,} test{none_of}.'
  )


def _counts(class_names, part):
  labels = np.asarray(part.labels, np.int64)
  return np.bincount(labels, minlength=len(class_names)).tolist()


def _absent(class_names, part):
  counts = zip(class_names, _counts(class_names, part), strict=True)
  return [name for name, count in counts if not count]
