"""The user's own images, in any layout of layouts.py.

Files that are no images, and images that cannot be read, are named and skipped;
of the labeled, the unlabeled and the test images each at most ten files or one
in twenty, whichever is more.
"""

import os

import numpy as np

from flatmatch_jax.data import cache, layouts
from flatmatch_jax.data.sources import Dataset
from flatmatch_jax.system import messages
from flatmatch_jax.types import UserError


def load(data_dir: str | os.PathLike | None, image_size: int) -> Dataset:
  """Reads the images, from the cache if their files have not changed.

  Rows are the labeled images and then the unlabeled ones, each sorted by path;
  classes are sorted by name.
  """
  try:
    found = layouts.find(data_dir)
    _check(found)
    paths = [path for part in found.parts for path in part.paths]
    shape = (image_size, image_size, 3)
    pixels, unreadable = cache.read(found.root, paths, shape, found.table)
  except OSError as error:  # No permission, or a file is gone by now.
    raise UserError(
      f'{data_dir} cannot be read: {error}; change its permissions, and leave '
      'its files alone while a run starts.'
    ) from error
  if unreadable:
    good = [row for row in range(len(pixels)) if row not in unreadable]
    for to, row in enumerate(good):  # In place: one copy is enough.
      pixels[to] = pixels[row]
    pixels = pixels[: len(good)]
  found = found._replace(parts=_readable(found.parts, unreadable))
  _check_skipped(found)
  _check(found)
  messages.say(_describe(found))
  labels = np.array([x for part in found.parts for x in part.labels], np.int32)
  train = len(found.parts[0].paths) + len(found.parts[1].paths)
  return Dataset(
    name='folder',
    train_images=pixels[:train],
    train_labels=labels[:train],
    test_images=pixels[train:],
    test_labels=labels[train:],
    class_names=found.class_names,
    train_paths=tuple(
      os.path.relpath(path, found.root)
      for part in found.parts[:2]
      for path in part.paths
    ),
  )


def _check(found):
  """Raises UserError where too few images are left to train or test on."""
  labeled, _, test = found.parts
  names = found.class_names
  if len(names) < 2:
    only = f' ({names[0]!r})' if names else ''
    raise UserError(
      f'{labeled.place or found.root} has {messages.count(len(names), "class")}'
      f'{only}; a classifier needs at least two, such as labeled/CLASS/*.jpg.'
    )
  if absent := _absent(names, labeled):
    have = 'has' if len(absent) == 1 else 'have'
    raise UserError(
      f'{len(absent)} of {len(names)} classes {have} no readable image in '
      f'{labeled.place}: {messages.some(absent)}; add one to each, or leave '
      'such classes out.'
    )
  if test.place and not test.paths:
    raise UserError(
      f'{test.place} holds no readable image to test on; put some there, or '
      'remove it and hold out labeled images with --config.num_val=N.'
    )


def _readable(parts, unreadable):
  """The parts without the files in `unreadable`, whose rows count through."""
  kept, row = [], 0
  for part in parts:
    left = layouts.Part(part.place, [], [], dict(part.skipped))
    for path, label in zip(part.paths, part.labels, strict=True):
      if row in unreadable:
        left.skipped[path] = unreadable[row]
      else:
        left.paths.append(path)
        left.labels.append(label)
      row += 1
    kept.append(left)
  return tuple(kept)


def _check_skipped(found):
  """Names skipped files; raises UserError where they are too many."""
  for part in found.parts:
    names = [
      f'{os.path.relpath(path, found.root)!r} ({why})'
      for path, why in part.skipped.items()
    ]
    files = messages.count(len(part.paths) + len(names), 'file')
    if len(names) > max(10, (len(part.paths) + len(names)) / 20):
      raise UserError(
        f'{len(names)} of the {files} in {part.place} are not readable '
        'images, and at most 10 or one in twenty are skipped: '
        f'{messages.some(names)}. Repair them, or move them elsewhere.'
      )
    if names:
      messages.say(
        f'Skipped {len(names)} of the {files} in {part.place}: '
        f'{messages.some(names)}.'
      )


def _describe(found):
  """One line: what the layout is, and how many images there are of what."""
  labeled, unlabeled, test = found.parts
  names, counts = found.class_names, _counts(found.class_names, labeled)
  each = f'{len(counts)} classes of {min(counts)} to {max(counts)} images'
  if len(counts) <= messages.SHOWN:
    pairs = zip(names, counts, strict=True)
    each = ', '.join(f'{name} {count:,}' for name, count in pairs)
  unbalanced = ' (unbalanced)' if min(counts) < max(counts) else ''
  untested = _absent(names, test) if test.paths else []
  none_of = f', none of {messages.some(untested)}' if untested else ''
  return (
    f'Read {found.name}: labeled: {each}{unbalanced}; '
    f'{len(unlabeled.paths):,} unlabeled; {len(test.paths):,} test{none_of}.'
  )


def _counts(class_names, part):
  labels = np.asarray(part.labels, np.int64)
  return np.bincount(labels, minlength=len(class_names)).tolist()


def _absent(class_names, part):
  counts = zip(class_names, _counts(class_names, part), strict=True)
  return [name for name, count in counts if not count]
