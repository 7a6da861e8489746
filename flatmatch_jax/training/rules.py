"""What each field of a config may be: one row per field.

The arguments of methods and recipes have their bounds in their signatures.
"""

from typing import Any

from ml_collections import ConfigDict

from flatmatch_jax.system.arguments import DECAY, POSITIVE, Number, whole
from flatmatch_jax.types import UserError, shortened

_SEED = whole(0, 2**32 - 1)
_TAIL = POSITIVE._replace(
  hint=': the first class has so many times the images of the last; 1 is '
  'balanced'
)

FIELDS = {
  'steps': whole(1),
  'batch_size': whole(1),
  'unlabeled_batch_size': whole(1),
  'microbatches': whole(1),
  'mesh.fsdp': whole(1),
  'cpu_devices': whole(0, 64, '; 0 is one for each core'),
  'eval_batch_size': whole(1),
  'log_every': whole(1),
  'probe_every': whole(0, hint='; 0 never probes'),
  'profile_steps': whole(0, 100, '; 0 takes no trace'),
  'eval_every': whole(1),
  'checkpoint_every': whole(1),
  'warmup_steps': whole(0),
  'num_val': whole(0),
  'max_skipped': whole(0),
  'pad': whole(0, hint='; 0 does not shift'),
  'strong_operations': whole(1, 14),
  'seed': _SEED,
  'split_seed': _SEED,
  'learning_rate': Number(0, 1e3, above=True, hint='; the paper takes 0.03'),
  'weight_decay': Number(0, 1e3),
  'layer_decay': Number(0, 1, above=True),
  'ema_decay': DECAY,
  'bn_momentum': DECAY,
  'imbalance': _TAIL,
  'unlabeled_imbalance': _TAIL,
}

# Of fields that are lists.
ELEMENTS = {
  'mean': Number(0, 1, hint=', as pixels are'),
  'std': Number(0, 1, above=True, hint=': pixels, from 0 to 1, are divided'),
  'paper_labels': whole(1),
}

_TEXTS = """batch_norm compilation_cache data_dir dataset dtype labels_file
  method model optimizer pretrained schedule"""
# All others that are read.
TYPES: dict[str, Any] = {
  **dict.fromkeys(_TEXTS.split(), str),
  **dict.fromkeys(('flip', 'remat', 'unlabeled_includes_labeled'), bool),
  **dict.fromkeys(
    ('mesh', 'method_args', 'recipe_args', 'variant'), ConfigDict
  ),
  'labels': (int, str),
}


def check(config) -> None:
  """Raises UserError at the first field of a wrong type or out of bounds."""
  for name, kind in TYPES.items():
    if not isinstance(_field(config, name), kind):
      raise UserError(
        f'config.{name}={shortened(config[name])} has the wrong type; see '
        'flatmatch_jax/training/common.py for what it is.'
      )
  for name, rule in FIELDS.items():
    check_number(name, _field(config, name), rule)
  for name, rule in ELEMENTS.items():
    values = _field(config, name)
    if not isinstance(values, (list, tuple)):
      raise UserError(
        f'config.{name}={shortened(values)} must be a list; write it as '
        f'--config.{name}="(0.5,)".'
      )
    for value in values:
      check_number(name, value, rule)


def _field(config, name):
  value = config
  for part in name.split('.'):
    if part not in value:
      raise UserError(
        f'The config has no field {name!r}; take it over from '
        'flatmatch_jax/training/common.py.'
      )
    value = value[part]
  return value


def check_number(name: str, value, rule: Number) -> None:
  """Raises UserError if the field `name` is out of bounds."""
  if not rule.holds(value):
    raise UserError(
      f'config.{name}={shortened(value)} must be {rule}. Set --config.{name}.'
    )
