"""How a dataset becomes batches: the functions that its two kinds share.

`resident.PIPELINE` keeps all images on the devices, `streaming.PIPELINE`
decodes those of a step on the host. `data.pipeline_of` chooses; nothing else
asks which of them it has.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from flatmatch_jax.types import Batch

Views = tuple[str, ...]


def parted(views: Views) -> tuple[Views, Views]:
  """The views of the labeled images, and those of the unlabeled ones.

  Names of the former start with 'labeled_', here no more; 'weak' comes first.
  """
  prefix = 'labeled_'
  labeled = [name.removeprefix(prefix) for name in views if prefix in name]
  others = [name for name in views if prefix not in name]
  return ('weak', *labeled), tuple(others)


class Data(NamedTuple):
  """The training set, and which of its images play which part."""

  images: Any  # On the devices, or `Frames` to be decoded.
  labels: Any  # [N], -1 where unknown.
  labeled: Any  # Indices of the images whose labels may be used.
  unlabeled: Any  # Indices of the pool of unlabeled images.
  # Indices and labels of D^l ∪ D^fix, from which FlatMatch with fixed labels
  # takes its perturbation.
  fixed: Any = None
  fixed_labels: Any = None

  def with_fixed(self, index, label) -> 'Data':
    """Adds fixed labels [F] of unlabeled images to those of D^l."""
    labeled = np.asarray(self.labeled)
    truth = np.asarray(self.labels)[labeled]
    return self._replace(
      fixed=np.concatenate([labeled, np.asarray(index, labeled.dtype)]),
      fixed_labels=np.concatenate([truth, np.asarray(label, np.int32)]),
    )


class Feed(Protocol):
  """Gives what the compiled step takes, step after step."""

  @property
  def waited(self) -> float:
    """Seconds for which the taker has waited."""

  def __next__(self) -> Any: ...

  def close(self) -> None: ...


class Pipeline(NamedTuple):
  """What training needs of a dataset, as functions."""

  # (dataset, split, sharding of arrays that all devices hold)
  place: Callable[[Any, Any, Any], Data]
  # (data, index [F], label [F]): adds the labels of unlabeled images.
  add_fixed: Callable[[Data, Any, Any], Data]
  # (config, views, data, steps taken, sharding of a batch)
  feed: Callable[[Any, Views, Data, int, Any], Feed]
  # (config, views, sharding of a batch or None) -> sample(given by a feed, key)
  make_sampler: Callable[[Any, Views, Any], Callable[[Any, jax.Array], Batch]]
  # (images, sharding as for `place`): images to evaluate on again and again.
  hold: Callable[[Any, Any], Any]
  # Bytes that differ if the images do.
  identity: Callable[[Any], np.ndarray]
  shared: bool  # Whether runs that train side by side can share the images.
  pads: bool  # Whether weak views shift padded images; others are crops.
