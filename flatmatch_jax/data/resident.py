"""Data that lives on the device: a batch is a function of (seed, step).

There is no input pipeline and no iterator state: indices, crops and
RandAugment are drawn inside the compiled step, so a run resumes exactly.
"""

from typing import NamedTuple

import jax
import numpy as np

from flatmatch_jax.data import augment
from flatmatch_jax.types import Batch


class Resident(NamedTuple):
  """The training set, and which of its images play which part."""

  images: jax.Array  # [N, H, W, C] uint8
  labels: jax.Array  # [N], -1 where unknown.
  labeled: jax.Array  # Indices of the images whose labels may be used.
  unlabeled: jax.Array  # Indices of the pool of unlabeled images.


def place(dataset, labeled, includes_labeled: bool, sharding) -> Resident:
  """Puts a dataset on the devices; `labeled` [n] are indices into it."""
  pool = np.arange(len(dataset.train_images))
  if not includes_labeled:
    pool = np.setdiff1d(pool, labeled)
  arrays = Resident(
    images=dataset.train_images,
    labels=dataset.train_labels.astype(np.int32),
    labeled=np.asarray(labeled, np.int32),
    unlabeled=pool.astype(np.int32),
  )
  return jax.device_put(arrays, sharding)


def make_sampler(
  batch_size: int,
  unlabeled_batch_size: int,
  views: tuple[str, ...],
  pad: int,
  flip: bool,
  mean,
  std,
  sharding=None,
):
  """Returns `sample(data, rng) -> Batch`, drawn with replacement.

  `views` are names such as 'weak', 'weak2', 'strong': each is an independent
  draw of the augmentation it is named after.
  """

  def view(name, rng, images):
    make = augment.strong if name.startswith('strong') else augment.weak
    return augment.normalize(make(rng, images, pad, flip), mean, std)

  def constrain(tree):
    if sharding is None:
      return tree
    return jax.lax.with_sharding_constraint(tree, sharding)

  def sample(data: Resident, rng) -> Batch:
    labeled_rng, unlabeled_rng, view_rng = jax.random.split(rng, 3)
    index_rng, weak_rng = jax.random.split(labeled_rng)
    index = jax.random.choice(index_rng, data.labeled, (batch_size,))
    images = constrain(data.images[index])
    labeled = {
      'weak': view('weak', weak_rng, images),
      'label': data.labels[index],
    }
    index = jax.random.choice(
      unlabeled_rng, data.unlabeled, (unlabeled_batch_size,)
    )
    images = constrain(data.images[index])
    unlabeled = {'index': index, 'truth': data.labels[index]}
    for number, name in enumerate(views):
      rng = jax.random.fold_in(view_rng, number)
      unlabeled[name] = view(name, rng, images)
    return constrain(Batch(labeled, unlabeled))

  return sample
