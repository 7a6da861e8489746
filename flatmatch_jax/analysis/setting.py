"""A run read back with the images to look at it by."""

from collections.abc import Callable, Iterator
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import Partial
import numpy as np
from PIL import Image

from flatmatch_jax.data import augment, pipeline_of, splits
from flatmatch_jax.methods import losses
from flatmatch_jax.run.workdir import Workdir
from flatmatch_jax.system import sharding
from flatmatch_jax.training import program, setup
from flatmatch_jax.training.load import Run, load_data, load_run
from flatmatch_jax.types import Batch, UserError


class Setting(NamedTuple):
  """A checkpoint, and losses as functions of its parameters θ.

  θ are the weights that training moves, not their average. The unlabeled loss
  is the cross-entropy to what θ guesses for the images as they are, all of them
  counted: no truth is needed, and all methods are measured alike.
  """

  files: Workdir
  run: Run
  dataset: Any
  split: Any
  losses: dict[str, Partial]  # 'labeled', 'unlabeled', and 'held_out' if any.
  rotated: dict[str, Partial]  # The first two with the images rotated.
  batches: Callable[[int], Iterator[Batch]]  # So many, as in training.


def load(
  workdir: str,
  checkpoint: str = 'latest',
  data_dir: str | None = None,
  images: int = 256,
  degrees: float = 90.0,
) -> Setting:
  """Reads a run and makes its losses on `images` images each.

  `degrees` is how far images are rotated at random to either side: the "slight
  augmentation" of the paper's landscapes.
  """
  files = Workdir(workdir)
  run = load_run(files, checkpoint)
  if images % run.config.microbatches:
    raise UserError(
      f'--images={images} must be divisible by the '
      f'config.microbatches={run.config.microbatches} of {files.path}.'
    )
  dataset = load_data(run, data_dir)
  split = setup.choose_split(run.config, dataset)
  rng = np.random.default_rng(0)
  pixels, labels = {}, {}
  for name, pool in (
    ('labeled', split.labeled),
    ('unlabeled', split.unlabeled),
  ):
    # Too few are repeated: losses of equal batches are comparable.
    index = np.sort(np.resize(rng.permutation(pool), images))
    pixels[name] = dataset.train_images[index][: len(index)]
    labels[name] = dataset.train_labels[index]
  state = run.state
  (guesses,) = run.classify(
    [state.params], state.batch_stats, pixels['unlabeled']
  )
  labels['unlabeled'] = guesses.argmax(-1)
  rotated = {name: rotate(rng, pixels[name], degrees) for name in pixels}
  unseen, truth = _held_out(dataset, split)
  size = min(images, len(truth))
  size -= size % run.config.microbatches
  if size:
    index = splits.spread(truth, size)
    pixels['held_out'], labels['held_out'] = unseen[index][:], truth[index]
  make = lambda name, values: Partial(
    _loss,
    Partial(run.program.forward),
    state.batch_stats,
    augment.normalize(jnp.asarray(values), run.config.mean, run.config.std),
    jnp.asarray(labels[name]),
  )
  return Setting(
    files,
    run,
    dataset,
    split,
    {name: make(name, values) for name, values in pixels.items()},
    {name: make(name, values) for name, values in rotated.items()},
    _make_batches(run, dataset, split),
  )


def _make_batches(run, dataset, split):
  """Returns `batches(count)`: those of the first steps of training."""
  config, views = run.config, run.program.views
  mesh = sharding.make_mesh()
  over_batch, everywhere = sharding.over_batch(mesh), sharding.replicated(mesh)
  pipeline = pipeline_of(dataset)
  sample = jax.jit(program.make_sample(config, views, over_batch, pipeline))
  at = lambda step: dataclasses.replace(run.state, step=jnp.int32(step))

  def batches(count):
    data = pipeline.place(dataset, split, everywhere)
    feed = pipeline.feed(config, views, data, 0, over_batch)
    try:
      for step in range(count):
        yield sharding.settle(sample(next(feed), at(step)))
    finally:
      feed.close()

  return batches


def _held_out(dataset, split):
  """Images no step has trained on: for validation or else for testing."""
  if len(index := split.validation):
    return dataset.train_images[index], dataset.train_labels[index]
  return dataset.test_images, dataset.test_labels


def _loss(forward, batch_stats, images, labels, params):
  """Mean cross-entropy, normalized by the statistics of these images.

  As in training, and unlike running statistics it does not change with the
  scale of the filters, as filter normalization assumes.
  """
  outputs, _ = forward(params, batch_stats, {'images': images})
  return losses.cross_entropy(outputs['images'].logits, labels)


def rotate(
  rng: np.random.Generator, images: np.ndarray, degrees: float
) -> np.ndarray:
  """Rotates uint8 images [N, H, W, C] by angles up to `degrees`, as Pillow."""
  rotated = np.empty_like(images)
  angles = rng.uniform(-degrees, degrees, len(images))
  for number, (image, angle) in enumerate(zip(images, angles, strict=True)):
    pixels = image.squeeze(-1) if image.shape[-1] == 1 else image
    turned = Image.fromarray(pixels).rotate(angle)
    rotated[number] = np.asarray(turned).reshape(image.shape)
  return rotated
