"""A batch of your own: what a training step takes, from arrays of images."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from flatmatch_jax.data import augment
from flatmatch_jax.data.pipeline import parted
from flatmatch_jax.types import Batch, UserError


def from_arrays(
  key: jax.Array,
  views: Sequence[str],
  labeled_images,
  labels,
  unlabeled_images,
  *,
  mean: Sequence[float],
  std: Sequence[float],
  pad: int = 4,
  flip: bool = True,
  strong_operations: int = 3,
  labeled_index=None,
  index=None,
  truth=None,
) -> Batch:
  """Augments the images of one step, each view by itself.

  It can be compiled with the step, `views` being fixed.

  Args:
    key: a new one for each step, such as `step_keys(state).data`.
    views: those of the method, `method.views`.
    labeled_images: uint8 [B, H, W, C], from 0 to 255.
    labels: their classes [B].
    unlabeled_images: uint8 [U, H, W, C].
    mean: of the pixels, as shares of 255; one for all channels, or one each.
    std: likewise.
    pad: pixels by which weak views are shifted at most.
    flip: whether half of the images are exchanged left and right.
    strong_operations: of RandAugment, for a strong view.
    labeled_index: [B], which of all labeled images each is, and
    index: [U], which of the `DatasetInfo.num_train` images each is, for methods
      that remember images (FlexMatch, SimMatch). By default the first ones.
    truth: classes [U], -1 where unknown, for metrics only.
  """
  for name, images in (
    ('labeled_images', labeled_images),
    ('unlabeled_images', unlabeled_images),
  ):
    if images.dtype != jnp.uint8 or images.ndim != 4:
      raise UserError(
        f'{name} are {images.dtype} of shape {list(images.shape)}; give uint8 '
        '[N, H, W, C] from 0 to 255.'
      )
  rows = lambda given, images: (
    np.arange(len(images)) if given is None else given
  )
  labeled_key, unlabeled_key = jax.random.split(key)
  view = augment.make_view(pad, flip, mean, std, operations=strong_operations)
  known, others = parted(tuple(views))
  labeled = augment.of_labeled(
    view, known, labeled_key, dict.fromkeys(known, jnp.asarray(labeled_images))
  )
  unlabeled = {
    name: view(
      name,
      jax.random.fold_in(unlabeled_key, number),
      jnp.asarray(unlabeled_images),
    )
    for number, name in enumerate(others)
  }
  labeled |= {'label': labels, 'index': rows(labeled_index, labeled_images)}
  unlabeled['index'] = rows(index, unlabeled_images)
  if truth is not None:
    unlabeled['truth'] = truth
  return jax.tree.map(jnp.asarray, Batch(labeled, unlabeled))
