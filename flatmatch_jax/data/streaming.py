"""Data that does not fit on the device: decoded on the host, step by step.

As with resident data a batch is a function of (seed, step): row r of step t
draws its image and its crops from a generator whose counter is (t, r). A run
therefore starts at any step without replaying, and any process can make any
rows. The host reads, decodes and crops; flips, RandAugment and Cutout follow
on the device, inside the compiled step.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
import os
from typing import NamedTuple

import jax
import numpy as np

from flatmatch_jax.data import augment, crops, records, sources
from flatmatch_jax.data.frames import Frames
from flatmatch_jax.data.pipeline import Data, Pipeline, parted
from flatmatch_jax.data.prefetch import Prefetch
from flatmatch_jax.system import sharding as sharding_lib
from flatmatch_jax.types import Batch, UserError

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


def make_sampler(
  views: tuple[str, ...], flip: bool, mean, std, sharding=None, operations=3
):
  """Returns `sample(raw, rng) -> Batch`: the device's part of augmentation.

  `raw` is what `batches` gives, on the device. The views are those of
  `resident.make_sampler`, but cropped already.
  """
  labeled_views, unlabeled_views = parted(views)
  view = augment.make_view(0, flip, mean, std, sharding, operations)

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
) -> Generator[Batch, None, None]:
  """Yields the batches of steps `start` to `stop` - 1: uint8, in numpy.

  Drawn with replacement. `rows` tells which of so many rows are wanted here, by
  default all; `views` are those of `make_sampler`.
  """
  import tensorflow as tf

  parts = _parts(data, batch_size, unlabeled_batch_size, views)
  streams = {
    part.name: _stream(data.images, part, seed, start, stop, rows(part.size))
    for part in parts
  }
  iterator = tf.data.Dataset.zip(streams).prefetch(1).as_numpy_iterator()
  for step in range(start, stop):
    try:
      raw = next(iterator)
    except tf.errors.OpError as error:
      for part in parts:
        data.images.find_fault(
          part.pool[_draw(part, seed, step, row)[0]] for row in rows(part.size)
        )
      raise UserError(
        f'The images of step {step} cannot be read: '
        f'{sources.one_line(error)}. A retry succeeded; restart the run.'
      ) from error
    yield Batch(**raw)


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


def _draw(part: _Part, seed: int, step: int, row: int):
  """Place in the pool and uniform numbers [views, tries, draws] of a row.

  Raw numbers of Philox, which numpy keeps for ever, unlike what its Generator
  makes of them (NEP 19).
  """
  philox = np.random.Philox(
    key=np.array([seed, part.number], np.uint64),
    counter=np.array([0, row, step, 0], np.uint64),
  )
  shape = (len(part.views), crops.TRIES, crops.DRAWS)
  raw = philox.random_raw(1 + int(np.prod(shape)))
  choice = int(raw[0]) * len(part.pool) >> 64
  uniform = (raw[1:] >> np.uint64(11)) * 2.0**-53
  return choice, uniform.reshape(shape)


def _stream(images: Frames, part: _Part, seed, start, stop, rows):
  """The tf.data of one stream, in batches of these `rows` of its size."""
  import tensorflow as tf

  def fetch(number):
    step, row = divmod(int(number), len(rows))
    choice, uniform = _draw(part, seed, step, int(rows[row]))
    index = part.pool[choice]
    data = images.records.read(index) if part.views else b''
    # As an object: numpy's own type of bytes loses zeros at the end.
    encoded = np.array(data, object)
    if part.name != 'unlabeled':
      index = choice
    return encoded, uniform, np.int32(index), np.int32(part.labels[choice])

  @tf.autograph.experimental.do_not_convert  # Converting takes long.
  def row(number):
    types = (tf.string, tf.float64, tf.int32, tf.int32)
    data, uniform, index, label = tf.numpy_function(fetch, [number], types)
    for scalar in (data, index, label):
      scalar.set_shape(())
    uniform.set_shape((len(part.views), crops.TRIES, crops.DRAWS))
    is_known = part.name != 'unlabeled'
    named = {'index': index, 'label' if is_known else 'truth': label}
    if not part.views:
      return named
    boxes = lambda *size: [
      crops.random_box(name, uniform[i], *size)
      for i, name in enumerate(part.views)
    ]
    cut = crops.decode(data, boxes, images.size)
    return named | dict(zip(part.views, cut, strict=True))

  count = len(rows)
  numbers = tf.data.Dataset.range(start * count, stop * count)
  mapped = numbers.map(
    row, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True
  )
  return mapped.batch(count, drop_remainder=True)


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
    config.strong_operations,
  ),
  hold=lambda images, everywhere: images,
  identity=lambda images: images.records.crc32,
  shared=False,
  pads=False,
)
