"""What a run starts from: its images, its weights, its files."""

import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flatmatch_jax import data as data_lib
from flatmatch_jax import methods
from flatmatch_jax.data import augment, splits
from flatmatch_jax.models import pretrained
from flatmatch_jax.run import reference, results, watch
from flatmatch_jax.run.checkpoint import Checkpoints
from flatmatch_jax.run.settings import as_dict
from flatmatch_jax.run.workdir import Workdir, versions
from flatmatch_jax.step import recipes
from flatmatch_jax.system import distributed, messages, sharding
from flatmatch_jax.types import DatasetInfo, TrainState, UserError


def choose_split(config, dataset) -> splits.Split:
  """Which images are labeled, unlabeled, and held out."""
  return splits.make(
    dataset.train_labels,
    len(dataset.class_names),
    config.labels,
    config.split_seed,
    config.labels_file,
    config.imbalance,
    config.unlabeled_imbalance,
    config.num_val,
    config.unlabeled_includes_labeled,
    dataset.class_names,
  )


def info_of(dataset, split) -> DatasetInfo:
  classes = len(dataset.class_names)
  labels = dataset.train_labels
  counts = np.bincount(labels[split.labeled], minlength=classes)
  return DatasetInfo(
    classes, len(labels), len(split.unlabeled), tuple(counts.tolist())
  )


def evaluation_sets(dataset, split, everywhere) -> dict[str, tuple]:
  """Images and labels to evaluate on, by the prefix of their metrics."""
  index = split.validation
  sets = {
    '': (dataset.test_images, dataset.test_labels),
    'val_': (dataset.train_images[index], dataset.train_labels[index]),
  }
  hold = data_lib.pipeline_of(dataset).hold
  return {
    prefix: (hold(images, everywhere), labels)
    for prefix, (images, labels) in sets.items()
    if len(labels)
  }


def probe_images(config, sets):
  """A batch of images no step has trained on, and their labels, or None."""
  if not (config.probe_every and sets):
    return None
  images, labels = sets['val_' if 'val_' in sets else '']
  size = min(config.unlabeled_batch_size, len(labels))
  size -= size % config.microbatches
  index = splits.spread(labels, size)
  pixels = augment.normalize(images[index][:], config.mean, config.std)
  return pixels, labels[index]


def read_weights(path: str, shapes: TrainState):
  """Parameters and statistics of a file; those it has not stay shapes."""
  params, batch_stats, report = pretrained.load(
    os.path.expanduser(path), shapes.params, shapes.batch_stats
  )
  messages.say(f'{path}: {report.describe()}')
  return params, batch_stats


def start_from(weights, state):
  """The state with weights from a file, in the average too."""
  params, batch_stats = jax.tree.map(
    lambda new, drawn: (
      drawn
      if isinstance(new, jax.ShapeDtypeStruct)
      else sharding.place(new, drawn.sharding)
    ),
    weights,
    (state.params, state.batch_stats),
  )
  return state.replace(
    params=params,
    ema_params=jax.tree.map(jnp.copy, params),
    batch_stats=batch_stats,
  )


def write_description(files: Workdir, config, dataset, split) -> None:
  """What the run is, for people, for evaluate and for predict."""
  classes = len(dataset.class_names)
  description = {
    'split.json': splits.to_json(
      split,
      dataset.train_labels,
      classes,
      config.split_seed,
      config.labels_file,
    ),
    'dataset.json': {
      'class_names': list(dataset.class_names),
      'image_shape': list(dataset.train_images.shape[1:]),
      'num_train': len(dataset.train_labels),
      'num_unlabeled': len(split.unlabeled),
      'num_test': len(dataset.test_labels),
      'test_share': getattr(dataset.test_images, 'share', 1.0),
      'fingerprint': data_lib.fingerprint(dataset),
    },
  }
  for name, content in description.items():
    if files.has_steps() and files.read(name) != content:
      raise UserError(
        f'{files.path} holds a run on other data: {name} there differs from '
        'what config.data_dir and config.labels_file give now. Use another '
        '--workdir, or the same data to resume.'
      )
  files.write('config.json', as_dict(config))
  for name, content in description.items():
    files.write(name, content)
  if not files.has_steps():
    files.write('versions.json', versions())
  elif changed := files.read('versions.json').items() - versions().items():
    messages.say(
      'The run began with other versions, so it may not resume bit for bit: '
      f'{", ".join(" ".join(item) for item in sorted(changed))}.'
    )


def tell_data(config, dataset, split) -> None:
  """What the run is about to see."""
  counts = info_of(dataset, split).class_counts
  few, many = min(counts), max(counts)
  per_class = f'{few}' if few == many else f'{few} to {many}'
  held_out = f'{config.num_val:,} for validation, ' if config.num_val else ''
  labeled = messages.count(len(split.labeled), 'labeled image')
  tested = (
    f'{len(dataset.test_labels):,}' if dataset.test_labels.size else 'none'
  )
  method, _ = recipes.parse(config.method)
  uses = bool(methods.asks(method, **config.method_args).views)
  unlabeled = f'{len(split.unlabeled):,} unlabeled'
  if not uses:
    unlabeled += ' (not used)'
  text = (
    f'{config.method} on {config.dataset}: {labeled} ({per_class} per class), '
    f'{unlabeled}, {held_out}{tested} for testing.'
  )
  if uses:
    includes = config.unlabeled_includes_labeled
    text += (
      f' The labeled images {"stay in" if includes else "are taken out of"} '
      'the unlabeled pool.'
    )
  if config.method_args.get('fairness_weight'):
    text += ' The unlabeled loss contains a fairness term and may be negative.'
  messages.say(text)
  pairs = zip(dataset.class_names, counts, strict=True)
  if single := [repr(name) for name, count in pairs if count == 1]:
    messages.say(
      f'Warning: only one labeled image of {messages.some(single)}; a class is '
      'hardly learned from one. Label more images of it.'
    )
  others = len(np.setdiff1d(split.unlabeled, split.labeled))
  if uses and not others:
    messages.say(
      'All images are labeled, so none are left to learn from without labels. '
      'labels=N after the colon of the config takes N labels and counts the '
      'other images as unlabeled.'
    )
  elif uses and others < len(split.labeled):
    messages.say(
      f'Only {messages.count(others, "image")} without a label, fewer than '
      f'with one: {config.method} may gain little over method=supervised.'
    )
  if not results.selection(len(dataset.test_labels), config.num_val):
    messages.say(
      'No errors will be measured: there are no test images, and '
      'config.num_val=0 holds none out.'
    )


def has_truth(labels, split) -> bool:
  """Whether labels are known of the pool, beside those that train the run."""
  others = labels[np.setdiff1d(split.unlabeled, split.labeled)]
  return not len(others) or others.max() >= 0


class Run(NamedTuple):
  """What the loop keeps of a run."""

  config: Any
  files: Workdir
  name: str  # In messages; '' for a run by itself.
  num_labeled: int
  held_out: dict[str, tuple]  # Images and labels, by prefix of their metrics.
  unseen: Any  # Some of them, for probes.
  selection: str  # The metric by which the best checkpoint is chosen.
  expected: dict[int, reference.Band]  # Errors of earlier runs, by step.
  checkpoints: Checkpoints
  notes: dict[str, Any]  # Of the checkpoint that the run resumes from.
  watcher: watch.Watch
  has_truth: bool  # Else nothing is known of its pseudo-labels.


def open_run(
  config, files: Workdir, dataset, split, held_out, state, weights, name=''
) -> tuple[Run, TrainState]:
  """A run and its state as they stand: new, or at the latest checkpoint.

  `state` is that of a new run; `weights` are those of `config.pretrained`, or
  None if they are not read yet.
  """
  checkpoints = Checkpoints(files.checkpoints)
  notes: dict = {'seconds': 0.0, 'class_names': list(dataset.class_names)}
  if (found := checkpoints.restore(state)) is not None:
    state, notes = found
  elif config.pretrained:
    shapes = jax.eval_shape(lambda: state)
    weights = weights or read_weights(config.pretrained, shapes)
    state = start_from(weights, state)
  expected = {}
  if distributed.is_first():
    images = files.read('dataset.json')['fingerprint']
    expected = reference.find(as_dict(config), images)
  labels, classes = dataset.train_labels, len(dataset.class_names)
  shares = watch.class_shares(labels, split, classes)
  run = Run(
    config,
    files,
    name,
    len(split.labeled),
    held_out,
    probe_images(config, held_out),
    results.selection('' in held_out, config.num_val),
    expected,
    checkpoints,
    notes,
    watch.Watch(config, shares, name, notes.get('watch')),
    has_truth(labels, split),
  )
  return run, state
