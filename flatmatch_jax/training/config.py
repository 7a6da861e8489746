"""Checks a config before any work, with errors that say what to change."""

import pathlib
import re

import jax
from ml_collections import ConfigDict

from flatmatch_jax import data, methods, models
from flatmatch_jax.data import splits
from flatmatch_jax.step import recipes
from flatmatch_jax.step.forward import LAYOUTS
from flatmatch_jax.step.optimizer import OPTIMIZERS, SCHEDULES
from flatmatch_jax.system import sharding
from flatmatch_jax.training import rules
from flatmatch_jax.types import UserError, check_known

_TFDS_NAME = r'\w+(/[\w.+-]+)?(:[0-9*]+\.[0-9*]+\.[0-9*]+)?'
_LAYERED = ('vit', 'resnet')  # Networks with pretrained weights.
_CHOICES = {
  'dataset': data.SOURCES,
  'batch_norm': LAYOUTS,
  'optimizer': OPTIMIZERS,
  'schedule': SCHEDULES,
}


def check(config) -> None:
  """Raises UserError at the first field that cannot work, or not here."""
  check_fields(config)
  _check_weights(config)
  _check_batches(config)


def check_fields(config) -> None:
  """The same without what depends on this machine: for a run read back."""
  rules.check(config)
  for name, known in _CHOICES.items():
    check_known(f'config.{name}', config[name], known)
  _check_variant(config)
  _check_source(config)
  method, recipe = recipes.parse(config.method)
  for room, name in ((methods, method), (recipes, recipe)):
    field = 'method_args' if room is methods else 'recipe_args'
    _check_arguments(config, field, room.defaults(name), room.bounds(name))
  made = methods.asks(method, **config.method_args)
  if reason := recipes.objection(method, recipe, bool(made.views)):
    raise UserError(f'{config.method!r} has no meaning: {reason}.')
  _check_labels(config)
  _check_optimizer(config)
  _check_model(config)


def _check_variant(config):
  """Numbers that go with a method or a label count are chosen with it."""
  for name, chosen in config.variant.items():
    if config.get(name) != chosen:
      raise UserError(
        f'config.{name} was set to {config.get(name)!r} after the numbers that '
        f'depend on it were chosen for {chosen!r}. Choose it with the file: '
        f'--config FILE.py:{name}={config.get(name)}.'
      )


def _check_arguments(config, field, known, bounds):
  for name, value in sorted(config[field].items()):
    check_known(f'config.{field} for {config.method}:', name, known)
    if name in bounds:
      rules.check_number(f'{field}.{name}', value, bounds[name])


def _check_optimizer(config):
  if config.optimizer == 'adamw' and config.learning_rate > 0.01:
    raise UserError(
      f'config.learning_rate={config.learning_rate} is too high for AdamW (at '
      'most 0.01); set --config.learning_rate, such as 0.001.'
    )
  if config.optimizer == 'muon' and not config.model.startswith('fast'):
    raise UserError(
      f'config.optimizer=muon is not for {config.model}: it needs BatchNorm '
      'after every convolution. Choose fast_32_64_128 or another fast network, '
      'or --config.optimizer=sgd.'
    )
  if config.warmup_steps >= config.steps:
    raise UserError(
      f'config.warmup_steps={config.warmup_steps} must be below '
      f'config.steps={config.steps}; set either.'
    )
  layered = config.model.startswith(_LAYERED)
  if config.layer_decay != 1 and not (layered and config.optimizer == 'adamw'):
    raise UserError(
      f'config.layer_decay={config.layer_decay} is for a ViT or a ResNet under '
      f'adamw, not for {config.model} under {config.optimizer}; set it to 1.'
    )


def _check_weights(config):
  if not config.pretrained:
    if config.layer_decay != 1 and config.model.startswith('resnet'):
      raise UserError(
        f'config.layer_decay={config.layer_decay} slows layers that have '
        'learned already, and no weights are given; name a file of them with '
        '--config.pretrained, or set it to 1.'
      )
    return
  if not config.model.startswith(_LAYERED):
    raise UserError(
      f'config.pretrained={config.pretrained!r} is for a ViT or a ResNet, not '
      f'for {config.model}; leave it empty.'
    )
  if recipes.parse(config.method).method == 'mpl':
    raise UserError(
      f'config.pretrained={config.pretrained!r} would start the student of mpl '
      'but not its teacher; choose another method.'
    )
  if not pathlib.Path(config.pretrained).expanduser().is_file():
    raise UserError(
      f'config.pretrained={config.pretrained!r} is not a file; name a file of '
      'weights, .npz or .safetensors.'
    )


def _check_model(config):
  groups = config.recipe_args.get('groups', 1)
  if groups > 1 and config.model.startswith('vit'):
    raise UserError(
      f'config.recipe_args.groups={groups} is not for {config.model}: groups '
      'would skip other blocks than the batch did; set it to 1.'
    )
  model = models.create(config.model, num_classes=2, dtype=config.dtype)
  size, patch = config.get('image_size', 0), getattr(model, 'patch', 1)
  # Datasets of TFDS may have a size of their own.
  if size % patch and config.dataset != 'tfds':
    raise UserError(
      f'config.model={config.model} cuts images into patches of {patch} '
      f'pixels, which do not divide config.image_size={size}; choose another '
      'patch or size.'
    )


def _check_source(config):
  """What the user's own data need beside a name."""
  if config.dataset in ('folder', 'npz') and not config.data_dir:
    raise UserError(
      f'config.data_dir is empty; name your {config.dataset} with '
      '--config.data_dir=PATH.'
    )
  fields = data.SOURCES[config.dataset].fields
  for name in fields:
    kind = {'image_size': int, 'tfds_name': str}.get(name, ConfigDict)
    if not isinstance(config.get(name), kind):
      raise UserError(
        f'config.{name}={config.get(name)!r} is not what the dataset '
        f'{config.dataset} needs; start from its file in configs/.'
      )
  if 'tfds_name' in fields and not config.tfds_name:
    raise UserError(
      'No dataset of TFDS is named; choose one with the file: --config '
      'FILE.py:name=mnist.'
    )
  if 'tfds_name' in fields and not re.fullmatch(_TFDS_NAME, config.tfds_name):
    raise UserError(
      f'config.tfds_name={config.tfds_name!r} is not written as name, '
      "name/config or name:1.2.3; TFDS's namespaces, which run code of others, "
      'are not read.'
    )
  if 'image_size' in fields and not 8 <= config.image_size <= 1024:
    raise UserError(
      f'image_size={config.image_size} must lie from 8 to 1024 pixels; choose '
      'it with the file: --config FILE.py:image_size=64.'
    )


def _check_labels(config):
  classes = data.SOURCES[config.dataset].num_classes
  labels = config.labels
  long_tailed = config.imbalance != 1
  given = config.labels_file or (labels == 'all' and 'labels=all')
  if given and long_tailed:
    raise UserError(
      f'config.imbalance={config.imbalance} shapes a draw of labels, but '
      f'{given} gives them; set it to 1, or a number of labels.'
    )
  if given:
    return
  if long_tailed and isinstance(labels, int) and labels >= (classes or 2):
    return
  if isinstance(labels, int) and labels > 0 and labels % (classes or 1) == 0:
    return  # Where classes are not known yet, the draw of labels looks again.
  number = f'{classes} classes' if classes else 'number of classes'
  near = ''
  if classes and isinstance(labels, int):
    near = f'such as {splits.nearest(labels, classes)}, '
  paper = ', '.join(map(str, config.paper_labels))
  raise UserError(
    f'labels={labels} must be a positive multiple of the {number} of '
    f'{config.dataset}, {near}or all.' + (paper and f' The paper uses {paper}.')
  )


def check_loops(config) -> None:
  """Of a run that is one program on all devices; those of a sweep are not."""
  groups = config.recipe_args.get('groups', 1)
  cores = config.cpu_devices > 1 and jax.default_backend() == 'cpu'
  loops = groups > 1 or config.microbatches > 1
  if cores and loops and jax.device_count() > 1:
    raise UserError(
      f'config.cpu_devices={config.cpu_devices} does not go with microbatches='
      f'{config.microbatches} and recipe_args.groups={groups}: in their loops '
      'the devices of a CPU could wait for each other for ever. Leave it at 0.'
    )


def _check_batches(config):
  """Each group of a batch is cut into microbatches, and each over devices."""
  devices = sharding.make_mesh(config.mesh.fsdp).size
  groups = config.recipe_args.get('groups', 1)
  parts = devices * groups * config.microbatches
  rule = f'the {devices} devices'
  if parts > devices:
    rule = (
      f'{parts}: {rule} times config.microbatches={config.microbatches} times '
      f'{groups} of config.recipe_args.groups'
    )
  for name in ('batch_size', 'unlabeled_batch_size'):
    size = config[name]
    if size % parts:
      below = size // parts * parts
      sizes = [str(s) for s in (below, below + parts) if s]
      raise UserError(
        f'config.{name}={size} must be divisible by {rule}; the nearest sizes '
        f'are {" and ".join(sizes)}.'
      )
