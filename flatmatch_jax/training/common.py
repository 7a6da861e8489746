"""Fields that all configs share, with the paper's numbers as defaults."""

import re

import ml_collections

from flatmatch_jax import methods
from flatmatch_jax.step import recipes
from flatmatch_jax.system import startup
from flatmatch_jax.training import run_length
from flatmatch_jax.types import UserError, did_you_mean

# These methods see as many unlabeled images as labeled ones; the others seven
# times as many.
_EQUAL_BATCHES = (
  'pi_model',
  'pseudo_label',
  'vat',
  'mean_teacher',
  'mixmatch',
  'remixmatch',
)

VARIANT = {'method': 'flatmatch', 'labels': 40, 'seed': 0, 'split_seed': 0}


def parse(arg: str, **defaults) -> dict:
  """The part after the colon: 'method=fixmatch,labels=250' as a dict.

  `defaults` change those of VARIANT; their types decide how values are read.
  """
  chosen = VARIANT | defaults
  for item in filter(None, (arg or '').split(',')):
    key, equals, value = item.partition('=')
    if key not in chosen or not equals:
      raise UserError(
        f'Cannot read {item!r} in the config argument {arg!r}. Known keys: '
        f'{", ".join(chosen)}; write them as key=value, joined by commas.'
        + did_you_mean(key, set(chosen) - {key})
      )
    chosen[key] = _read(key, value, chosen[key])
  return chosen


def _read(key, value, default):
  # Of labels the default may be 'all', and yet others are numbers.
  is_text = isinstance(default, str) and key != 'labels'
  if is_text or (key == 'labels' and value == 'all'):
    return value
  # int() would also take 1_0, and digits of other scripts.
  if not re.fullmatch(r'-?[0-9]{1,30}', value):
    raise UserError(
      f'{key}={value} in the config argument is not a whole number.'
    )
  return int(value)


def base(
  arg: str, dataset: str, paper_labels: tuple[int, ...], **defaults
) -> ml_collections.ConfigDict:
  """The paper's settings for CIFAR-10; datasets change what differs.

  Decays and numbers of steps are the papers' in a long run, and follow `steps`
  in a short one until you set them: see flatmatch_jax/training/run_length.py.
  """
  variant = parse(arg, **defaults)
  method, recipe = recipes.parse(variant['method'])
  config = ml_collections.ConfigDict(
    {
      'dataset': dataset,
      'data_dir': '',  # Empty: the usual TFDS folder.
      # Chosen after the colon; others may depend on them.
      'variant': {key: variant[key] for key in ('method', 'labels')},
      **variant,
      'paper_labels': paper_labels,
      'labels_file': '',  # Indices of the labeled images, instead of a draw.
      'unlabeled_includes_labeled': True,
      # How many times as many images the first class has as the last.
      'imbalance': 1.0,  # Of the labeled images.
      'unlabeled_imbalance': 1.0,  # Of the unlabeled pool.
      'num_val': 0,  # Training images held out to choose a checkpoint by.
      # Arguments of the method and of the recipe, by their own names.
      'method_args': methods.defaults(method),
      'recipe_args': recipes.defaults(recipe),
      'model': 'wrn_28_2',
      'pretrained': '',  # File of weights to start a ViT or ResNet from.
      'dtype': 'float32',  # Or bfloat16, float16; parameters stay float32.
      'remat': False,  # Saves memory, costs one more forward pass.
      # A state that is split: by how many devices, for networks too large for
      # each to hold it all. Their number must be a multiple.
      'mesh': {'fsdp': 1},
      # Without accelerators: into how many devices the cores are divided; 0 is
      # one each, as far as batches can be divided.
      'cpu_devices': 0,
      'microbatches': 1,  # Parts that a batch goes through the network in.
      'bn_momentum': 0.999,
      'batch_norm': 'split',
      'batch_size': 64,
      'unlabeled_batch_size': 64 if method in _EQUAL_BATCHES else 7 * 64,
      'steps': 2**20,
      'optimizer': 'sgd',  # Or adamw, or muon.
      'learning_rate': 0.03,
      'schedule': 'cosine',  # cos(7π/16·t); or linear, to 5%.
      'warmup_steps': 0,
      # Of the learning rate from block to block of a ViT, stage to stage of a
      # ResNet.
      'layer_decay': 1.0,
      'weight_decay': 5e-4,
      'ema_decay': 0.999,
      # Steps in a row that may be left out because they are not finite.
      'max_skipped': 20,
      # Weak augmentation: reflect by `pad`, crop, and flip.
      'pad': 4,
      'flip': True,
      'strong_operations': 3,  # Of RandAugment, for a strong view.
      'log_every': 100,
      # Steps between measurements of sharpness, gradients and their angle;
      # each costs two or three steps. 0 is never.
      'probe_every': 1024,
      'eval_every': 5120,
      'checkpoint_every': 5120,
      'eval_batch_size': 256,
      # Steps to trace at each start, the third and on; 0 is none.
      'profile_steps': 0,
      # Folder of compiled programs, which is trusted. 'auto' is
      # ~/.cache/flatmatch_jax; '' keeps none.
      'compilation_cache': 'auto',
    }
  )
  follows = ('ema_decay', 'bn_momentum', 'eval_every', 'checkpoint_every')
  usual = {name: config[name] for name in follows}
  run_length.follow(config, config, **usual)
  for args in (config.method_args, config.recipe_args):
    run_length.follow(config, args, **args)
  return config


def set_known(args, **values) -> None:
  """Sets those `values` that the arguments of a method or recipe have.

  An argument that is zero is not used, and stays so.
  """
  args.update({key: value for key, value in values.items() if args.get(key)})


def set_fairness(config, small: tuple[int, ...]) -> None:
  """FreeMatch's fairness weight is 0.01 instead of 0.05 at `small` labels."""
  if 'fairness_weight' in config.method_args and config.labels in small:
    config.method_args.fairness_weight = 0.01


def set_fast(config) -> None:
  """A small network and a short schedule, for an hour of a CPU core.

  Chosen on CIFAR-10 by images held out of its training set: docs/results.md.
  """
  config.model = 'fast_64_128_256'
  config.optimizer, config.learning_rate = 'muon', 0.02
  config.schedule = 'linear'
  ratio = config.unlabeled_batch_size // config.batch_size
  config.batch_size = 16
  config.unlabeled_batch_size = 16 * min(ratio, 4)
  config.steps = 8_000
  config.strong_operations = 2
  every = {'eval_every': 1_000, 'checkpoint_every': 1_000}
  run_length.follow(config, config, warmup_steps=500, **every)
  if 'decay' in config.method_args:  # Thresholds must not lag behind.
    run_length.follow(config, config.method_args, decay=0.99)
  if 'fairness_weight' in config.method_args:  # Labeled images alone at first.
    run_length.follow(config, config.method_args, warmup_steps=500)


def set_pretrained(config, model: str) -> None:
  """A large network that starts from weights of a file, for few labels.

  Layers near the image, which know edges and textures already, learn more
  slowly: the stem of a ResNet at a 32nd of the rate. Nothing of it is tuned;
  rate and decay are those of USB for its pretrained ViTs.
  """
  if config.fast != 'auto':
    raise UserError(
      f'fast={config.fast} chooses a network, and model={model} another; leave '
      'one of them out.'
    )
  if not model.startswith(('resnet', 'vit')):
    raise UserError(
      f'model={model} in the config argument must be one with pretrained '
      'weights, such as resnet_18 or vit_tiny_16; choose another network by '
      f'--config.model={model}.'
    )
  set_fast(config)
  config.model = config.variant.model = model
  config.optimizer, config.learning_rate = 'adamw', 5e-4
  config.layer_decay = 0.5
  config.steps = 2_000
  config.eval_every = config.checkpoint_every = 250
  config.probe_every = 0  # Compiling them takes longer than the step.


def set_own(config, image_size: int, model: str = 'auto') -> None:
  """Settings for the user's own images of about `image_size` pixels.

  A `model` is one to start from pretrained weights. With `fast`, a network and
  a schedule for minutes of a CPU. Otherwise a thirty-second of the paper's
  steps, of which nothing is tuned; from 48 pixels on the network halves its
  input at once, as the paper's for STL-10 does.
  """
  if model != 'auto':
    set_pretrained(config, model)
  elif _is_fast(config):
    set_fast(config)
  else:
    config.model = 'wrn_28_2' if image_size < 48 else 'wrn_37_2'
    config.steps = 2**15
    config.eval_every = config.checkpoint_every = 1024
    if 'pretrain_steps' in config.recipe_args:
      run_length.follow(config, config.recipe_args, pretrain_steps=2**12)
  config.pad = image_size // 8
  # The mean of ImageNet's three: for grey images as well.
  config.mean, config.std = (0.449,), (0.226,)
  if 'image_size' in config:  # Network and shift go with it.
    config.variant.image_size = image_size


def _is_fast(config) -> bool:
  """What `fast` says; 'auto' is true where there is no accelerator."""
  known = {'true': True, 'false': False, 'auto': not startup.has_accelerator()}
  if config.fast not in known:
    raise UserError(
      f'fast={config.fast} in the config argument must be {", ".join(known)}.'
    )
  fast = known[config.fast]
  config.fast = config.variant.fast = str(fast).lower()
  return fast
