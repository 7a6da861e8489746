"""Data that lives on the device: a batch is a function of (seed, step).

There is no input pipeline and no iterator state: indices, crops and
RandAugment are drawn inside the compiled step, so a run resumes exactly.
"""

import flax.struct
import jax
import numpy as np

from flatmatch_jax.data import augment
from flatmatch_jax.data.pipeline import Data, Pipeline, parted
from flatmatch_jax.system import sharding as sharding_lib
from flatmatch_jax.types import Batch


@flax.struct.dataclass
class Images:
  """Images [N, H, W, C] that lie in memory as rows of bytes.

  As one array, TPUs would keep them with N innermost, and copy them all, at
  every step, to take some.
  """

  rows: jax.Array  # [N, H * W * C] uint8
  size: tuple[int, int, int] = flax.struct.field(pytree_node=False)

  def __len__(self):
    return self.rows.shape[0]

  def __getitem__(self, index):
    rows = self.rows[index]
    return rows.reshape(*rows.shape[:-1], *self.size)

  @property
  def shape(self):
    return len(self), *self.size

  @property
  def sharding(self):
    return self.rows.sharding


def place(dataset, split, everywhere) -> Data:
  """Puts a dataset on the devices, with the indices of its `split`."""
  integers = lambda x: sharding_lib.place(np.asarray(x, np.int32), everywhere)
  images = dataset.train_images
  rows = images.reshape(len(images), -1)  # Of a whole array no copy.
  return Data(
    images=Images(sharding_lib.place(rows, everywhere), images.shape[1:]),
    labels=integers(dataset.train_labels),
    labeled=integers(split.labeled),
    unlabeled=integers(split.unlabeled),
  )


class Feed:
  """Gives the compiled step the same at each step: all of the data."""

  waited = 0.0

  def __init__(self, data: Data):
    self._data = data

  def __next__(self) -> Data:
    return self._data

  def close(self) -> None:
    pass


def add_fixed(data: Data, index, label) -> Data:
  """Adds fixed labels, on the devices."""
  data = data.with_fixed(index, label)
  place = lambda x: sharding_lib.place(x, data.images.sharding)
  return data._replace(
    fixed=place(data.fixed), fixed_labels=place(data.fixed_labels)
  )


def make_sampler(
  batch_size: int,
  unlabeled_batch_size: int,
  views: tuple[str, ...],
  pad: int,
  flip: bool,
  mean,
  std,
  sharding=None,
  operations: int = 3,
):
  """Returns `sample(data, rng) -> Batch`, drawn with replacement.

  `views` are names such as 'weak', 'weak2', 'strong': each is an independent
  draw of the augmentation it is named after; a strong one applies
  `operations` of RandAugment. Those of labeled images start with 'labeled_'.
  """
  labeled_views, unlabeled_views = parted(views)
  view = augment.make_view(pad, flip, mean, std, sharding, operations)

  def constrain(tree):
    if sharding is None:
      return tree
    return jax.lax.with_sharding_constraint(tree, sharding)

  def labeled_batch(rng, data, indices, labels=None, names=('weak',)):
    """Of `indices`, with their `labels` or, without, those of the data."""
    index_rng, weak_rng = jax.random.split(rng)
    choice = jax.random.randint(index_rng, (batch_size,), 0, len(indices))
    index = indices[choice]
    label = data.labels[index] if labels is None else labels[choice]
    images = constrain(data.images[index])
    made = augment.of_labeled(
      view, names, weak_rng, dict.fromkeys(names, images)
    )
    return made | {'label': label, 'index': choice}

  def sample(data: Data, rng) -> Batch:
    labeled_rng, unlabeled_rng, view_rng, fixed_rng = jax.random.split(rng, 4)
    labeled = labeled_batch(
      labeled_rng, data, data.labeled, names=labeled_views
    )
    fixed = None
    if data.fixed is not None:
      fixed = labeled_batch(fixed_rng, data, data.fixed, data.fixed_labels)
    index = jax.random.choice(
      unlabeled_rng, data.unlabeled, (unlabeled_batch_size,)
    )
    unlabeled = {'index': index, 'truth': data.labels[index]}
    images = constrain(data.images[index])
    for number, name in enumerate(unlabeled_views):
      rng = jax.random.fold_in(view_rng, number)
      unlabeled[name] = view(name, rng, images)
    return constrain(Batch(labeled, unlabeled, fixed))

  return sample


PIPELINE = Pipeline(
  place=place,
  add_fixed=add_fixed,
  feed=lambda config, views, data, start, over_batch: Feed(data),
  make_sampler=lambda config, views, sharding: make_sampler(
    config.batch_size,
    config.unlabeled_batch_size,
    views,
    config.pad,
    config.flip,
    config.mean,
    config.std,
    sharding,
    config.strong_operations,
  ),
  hold=sharding_lib.place,
  identity=lambda images: images,
  shared=True,
  pads=True,
)
