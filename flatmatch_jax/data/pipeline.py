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


class BatchSpec(NamedTuple):
  """What batches are made of, for all steps of a run."""

  seed: int
  steps: int
  batch_size: int
  unlabeled_batch_size: int
  views: tuple[str, ...]  # Of unlabeled images: 'weak', 'weak2', 'strong'.
  pad: int
  flip: bool
  mean: tuple[float, ...]
  std: tuple[float, ...]
  operations: int  # Of RandAugment in a strong view.


class Feed(Protocol):
  """Gives what the compiled step takes, step after step."""

  @property
  def waited(self) -> float:
    """Seconds for which the taker has waited."""

  def __next__(self) -> Any: ...

  def close(self) -> None: ...


class Data(Protocol):
  """A training set, and which of its images play which part."""

  @property
  def images(self) -> Any:
    """All of them [N, H, W, C], for `evaluation.batches`."""

  @property
  def fixed(self) -> Any:
    """Indices of images with given or fixed labels; None before they are."""


class Pipeline(NamedTuple):
  """What training needs of a dataset, as functions."""

  # (dataset, split, sharding of arrays that all devices hold)
  place: Callable[[Any, Any, Any], Data]
  # (data, index [F], label [F]): adds the labels of unlabeled images.
  add_fixed: Callable[[Any, Any, Any], Data]
  # (data, spec, steps taken, sharding of a batch)
  feed: Callable[[Any, BatchSpec, int, Any], Feed]
  # (spec, sharding of a batch or None) -> sample(what a feed gives, key)
  make_sampler: Callable[[BatchSpec, Any], Callable[[Any, jax.Array], Batch]]
  # (images, sharding as for `place`): images to evaluate on again and again.
  hold: Callable[[Any, Any], Any]
  # Bytes that differ if the images do.
  identity: Callable[[Any], np.ndarray]
  shared: bool  # Whether runs that train side by side can share the images.
  pads: bool  # Whether weak views shift padded images; others are crops.
