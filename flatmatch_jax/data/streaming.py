"""Data that does not fit on the device: decoded on the host, step by step.

As with resident data a batch is a function of (seed, step): row r of step t
draws its image and its crops from a generator whose counter is (t, r). A run
therefore starts at any step without replaying, and any process can make any
rows. The host reads, decodes, crops, and augments strong views; flips follow on
the device, inside the compiled step.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
import math
import os
from typing import Any, NamedTuple

import jax
import numpy as np

from flatmatch_jax.data import (
  ahead,
  augment,
  crops,
  on_host,
  records,
  sources,
)
from flatmatch_jax.data.frames import Frames
from flatmatch_jax.data.pipeline import Data, Pipeline, parted
from flatmatch_jax.data.prefetch import Prefetch
from flatmatch_jax.system import sharding as sharding_lib
from flatmatch_jax.types import Batch

Rows = Callable[[int], Sequence[int] | np.ndarray]
_CACHE = '~/.cache/flatmatch_jax'


def from_tfds(
  name: str,
  data_dir: str | os.PathLike | None,
  image_size: int,
  classes: Mapping[str, str] | None = None,
) -> sources.Dataset:
  """Opens a prepared TFDS dataset; its images are `Frames`, not arrays.

  Only the images of some `classes`, in their order, if these are given: see
  `Records.select`. The index goes to the user's cache if the folder of the data
  is not writable.
  """
  with sources.prepared(name, data_dir) as builder:
    train, test = (
      records.open_split(builder, split, _CACHE)
      for split in ('train', 'validation')
    )
  if classes:
    train, test = train.select(classes), test.select(classes)
  return sources.Dataset(
    name=name,
    train_images=Frames(train, image_size),
    train_labels=train.labels,
    test_images=Frames(test, image_size),
    test_labels=test.labels,
    class_names=train.class_names,
  )


def place(dataset, split, everywhere=None) -> Data:
  """The streams of a dataset, with the indices of its `split`."""
  del everywhere  # The host has them.
  return Data(
    images=dataset.train_images,
    labels=dataset.train_labels,
    labeled=split.labeled,
    unlabeled=split.unlabeled,
  )


def make_sampler(views: tuple[str, ...], flip: bool, mean, std, sharding=None):
  """Returns `sample(raw, rng) -> Batch`: the device's part of augmentation.

  `raw` is what `batches` gives, on the device. The views are those of
  `resident.make_sampler`; the device flips and normalizes them.
  """
  labeled_views, unlabeled_views = parted(views)
  flipped = augment.make_view(0, flip, mean, std)

  def view(name, key, images):
    del name  # The host has made it what its name says.
    return flipped('weak', key, images)

  def labeled_batch(rng, raw, names=('weak',)):
    return raw | augment.of_labeled(view, names, rng, raw)

  def sample(raw: Batch, rng) -> Batch:
    if sharding is not None:
      raw = jax.lax.with_sharding_constraint(raw, sharding)
    labeled_rng, view_rng, fixed_rng = jax.random.split(rng, 3)
    unlabeled = dict(raw.unlabeled)
    for number, name in enumerate(unlabeled_views):
      key = jax.random.fold_in(view_rng, number)
      unlabeled[name] = view(name, key, unlabeled[name])
    return Batch(
      labeled=labeled_batch(labeled_rng, raw.labeled, labeled_views),
      unlabeled=unlabeled,
      fixed=labeled_batch(fixed_rng, raw.fixed) if raw.fixed else None,
    )

  return sample


class _Part(NamedTuple):
  """One of the streams of which a batch is made."""

  number: int  # Its random numbers are its own.
  name: str  # The field of Batch.
  pool: np.ndarray  # Indices of images.
  labels: np.ndarray  # Of the pool.
  size: int  # Rows of the global batch.
  views: tuple[str, ...] = ('weak',)


def batches(
  data: Data,
  seed: int,
  start: int,
  stop: int,
  batch_size: int,
  unlabeled_batch_size: int,
  views: tuple[str, ...],
  rows: Rows = range,
  operations: int = 3,
) -> Generator[Batch, None, None]:
  """Yields the batches of steps `start` to `stop` - 1: uint8, in numpy.

  Drawn with replacement. `rows` tells which of so many rows are wanted here, by
  default all; `views` are those of `make_sampler`, and a strong one applies
  `operations` of RandAugment.
  """
  parts = _parts(data, batch_size, unlabeled_batch_size, views)

  def begin(step, submit):
    made: dict[str, Any] = {}
    calls = []
    for part in parts:
      drawn = [
        _draw(part, operations, seed, step, int(row)) for row in rows(part.size)
      ]
      made[part.name] = out = _room(part, drawn, data.images.size)
      if not part.views:
        continue
      choice = [draws.choice for draws in drawn]
      started = data.images.start(part.pool[choice])
      calls += [
        submit(_fill, out, at, part, operations, *pair)
        for at, pair in enumerate(zip(drawn, started, strict=True))
      ]
    return Batch(**made), calls

  yield from ahead.in_turns(begin, range(start, stop))


def feed(config, views, data: Data, start: int, over_batch) -> Prefetch:
  """The batches from step `start` on, as they reach the devices."""
  source = batches(
    data,
    config.seed,
    start,
    config.steps,
    config.batch_size,
    config.unlabeled_batch_size,
    views,
    rows=lambda size: sharding_lib.local_rows(over_batch, size),
    operations=config.strong_operations,
  )
  return Prefetch(source, over_batch)


def _parts(data: Data, batch_size, unlabeled_batch_size, views):
  labeled, pool = data.labeled, data.unlabeled
  truth, rows = data.labels, unlabeled_batch_size
  labeled_views, unlabeled_views = parted(views)
  parts = [
    _Part(0, 'labeled', labeled, truth[labeled], batch_size, labeled_views),
    _Part(1, 'unlabeled', pool, truth[pool], rows, unlabeled_views),
  ]
  if data.fixed is not None and data.fixed_labels is not None:
    parts.append(_Part(2, 'fixed', data.fixed, data.fixed_labels, batch_size))
  return parts


class _Draws(NamedTuple):
  """What a row draws."""

  choice: int  # Its place in the pool.
  uniform: np.ndarray  # [views, tries, draws], for boxes.
  raw: np.ndarray  # [views, on_host.numbers(operations)], for strong views.


def _draw(part: _Part, operations: int, seed: int, step: int, row: int):
  """What a row draws from its own generator.

  Raw numbers of Philox, which numpy keeps for ever, unlike what its Generator
  makes of them (NEP 19).
  """
  philox = np.random.Philox(
    key=np.array([seed, part.number], np.uint64),
    counter=np.array([0, row, step, 0], np.uint64),
  )
  shape = (len(part.views), crops.TRIES, crops.DRAWS)
  of_boxes = 1 + math.prod(shape)
  of_views = len(part.views), on_host.numbers(operations)
  raw = philox.random_raw(of_boxes + math.prod(of_views))
  uniform = (raw[1:of_boxes] >> np.uint64(11)) * 2.0**-53
  return _Draws(
    int(raw[0]) * len(part.pool) >> 64,
    uniform.reshape(shape),
    raw[of_boxes:].reshape(of_views),
  )


def _room(part: _Part, drawn: list[_Draws], size: int):
  """A stream's arrays: numbers, and images that are yet to be made."""
  choice = np.array([draws.choice for draws in drawn], np.int32)
  index, label = choice, 'label'
  if part.name == 'unlabeled':
    index, label = part.pool[choice].astype(np.int32), 'truth'
  images = lambda: np.empty((len(drawn), size, size, 3), np.uint8)
  return {name: images() for name in part.views} | {
    'index': index,
    label: part.labels[choice].astype(np.int32),
  }


def _fill(out, at: int, part: _Part, operations, draws: _Draws, decode):
  """Makes the views of row `at`."""
  image = decode()
  for name, of_box, of_view in zip(
    part.views, draws.uniform, draws.raw, strict=True
  ):
    box = crops.random_box(name, of_box, *image.shape[:2])
    view = crops.cut(image, box, out[name].shape[1])
    if count := augment.operations_of(name, operations):
      numbers = of_view[: on_host.numbers(count)]
      view = on_host.strong(view, on_host.draw(numbers))
    out[name][at] = view


PIPELINE = Pipeline(
  place=place,
  add_fixed=Data.with_fixed,
  feed=feed,
  make_sampler=lambda config, views, sharding: make_sampler(
    views,
    config.flip,
    config.mean,
    config.std,
    sharding,
  ),
  hold=lambda images, everywhere: images,
  identity=lambda images: images.records.crc32,
  shared=False,
  pads=False,
)
