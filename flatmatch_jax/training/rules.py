"""What each number of a config may be: one row a field, checked alike."""

from typing import Any, NamedTuple

import ml_collections

from flatmatch_jax.types import UserError

_MOST = 2**31 - 1  # Steps and indices are int32 on the devices.


class Number(NamedTuple):
  """An interval; `above` and `below` leave out its ends."""

  low: float
  high: float
  whole: bool = False
  above: bool = False
  below: bool = False
  hint: str = ''

  def holds(self, value: Any) -> bool:
    kinds = int if self.whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds):
      return False
    return (
      self.low <= value <= self.high  # Not so for NaN.
      and not (self.above and value == self.low)
      and not (self.below and value == self.high)
    )

  def __str__(self) -> str:
    kind = 'a whole number' if self.whole else 'a number'
    low = 'above' if self.above else 'at least'
    high = 'below' if self.below else 'at most'
    return f'{kind}, {low} {self.low} and {high} {self.high}{self.hint}'


def _whole(low: int, high: int = _MOST, hint: str = '') -> Number:
  return Number(low, high, whole=True, hint=hint)


_SHARE = Number(0, 1)
_DECAY = Number(0, 1, below=True)
# Far beyond any use, and still far from float32's infinity.
_WEIGHT = Number(0, 1e6)
_POSITIVE = Number(0, 1e6, above=True)
_SEED = _whole(0, 2**32 - 1)
_TAIL = _POSITIVE._replace(
  hint=': the first class has so many times the images of the last; 1 is '
  'balanced'
)

FIELDS = {
  'steps': _whole(1),
  'batch_size': _whole(1),
  'unlabeled_batch_size': _whole(1),
  'microbatches': _whole(1),
  'mesh.fsdp': _whole(1),
  'cpu_devices': _whole(0, 64, '; 0 is one for each core'),
  'eval_batch_size': _whole(1),
  'log_every': _whole(1),
  'probe_every': _whole(0, hint='; 0 never probes'),
  'profile_steps': _whole(0, 100, '; 0 takes no trace'),
  'eval_every': _whole(1),
  'checkpoint_every': _whole(1),
  'warmup_steps': _whole(0),
  'num_val': _whole(0),
  'max_skipped': _whole(0),
  'pad': _whole(0, hint='; 0 does not shift'),
  'strong_operations': _whole(1, 14),
  'seed': _SEED,
  'split_seed': _SEED,
  'learning_rate': Number(0, 1e3, above=True, hint='; the paper takes 0.03'),
  'weight_decay': Number(0, 1e3),
  'layer_decay': Number(0, 1, above=True),
  'ema_decay': _DECAY,
  'bn_momentum': _DECAY,
  'imbalance': _TAIL,
  'unlabeled_imbalance': _TAIL,
}

# Of fields that are lists.
ELEMENTS = {
  'mean': Number(0, 1, hint=', as pixels are'),
  'std': Number(0, 1, above=True, hint=': pixels, from 0 to 1, are divided'),
  'paper_labels': _whole(1),
}

# Of methods and recipes: an argument has one meaning wherever it stands.
ARGUMENTS = {
  'alpha': _POSITIVE,
  'decay': _DECAY,
  'decrease': Number(1, 1e6),
  'entropy_weight': _WEIGHT,
  'fairness_weight': _WEIGHT,
  'feedback_decay': _DECAY,
  'groups': _whole(1),
  'interval': _whole(1),
  'label_smoothing': _DECAY,
  'max_threshold': _SHARE,
  'min_threshold': _SHARE,
  'num_fixed': _whole(1),
  'num_sigmas': _WEIGHT,
  'plain_weight': _WEIGHT,
  'pretrain_steps': _whole(1),
  'radius': _WEIGHT,
  'ramp': _SHARE,
  'rho': Number(0, 1e3),
  'rotation_weight': _WEIGHT,
  'scale': _POSITIVE,
  'temperature': _POSITIVE,
  'threshold': _SHARE,
  'uda_warmup_steps': _whole(1),
  'uda_weight': _WEIGHT,
  'warmup_steps': _whole(0),
  'weight': _WEIGHT,
}


# All others that are read.
TYPES = {
  'batch_norm': str,
  'compilation_cache': str,
  'data_dir': str,
  'dataset': str,
  'dtype': str,
  'flip': bool,
  'labels': (int, str),
  'labels_file': str,
  'mesh': ml_collections.ConfigDict,
  'method': str,
  'method_args': ml_collections.ConfigDict,
  'model': str,
  'optimizer': str,
  'pretrained': str,
  'recipe_args': ml_collections.ConfigDict,
  'remat': bool,
  'schedule': str,
  'unlabeled_includes_labeled': bool,
  'variant': ml_collections.ConfigDict,
}


def check(config) -> None:
  """Raises UserError at the first field of a wrong type or out of bounds."""
  for name, kind in TYPES.items():
    if not isinstance(_field(config, name), kind):
      raise UserError(
        f'config.{name}={_short(config[name])} has the wrong type; see '
        'configs/common.py for what it is.'
      )
  for name, rule in FIELDS.items():
    _check_number(name, _field(config, name), rule)
  for name, rule in ELEMENTS.items():
    values = _field(config, name)
    if not isinstance(values, (list, tuple)):
      raise UserError(
        f'config.{name}={_short(values)} must be a list; write it as '
        f'--config.{name}="(0.5,)".'
      )
    for value in values:
      _check_number(name, value, rule)
  for part in ('method_args', 'recipe_args'):
    for name, value in config[part].items():
      if name in ARGUMENTS:
        _check_number(f'{part}.{name}', value, ARGUMENTS[name])


def _field(config, name):
  value = config
  for part in name.split('.'):
    if part not in value:
      raise UserError(
        f'The config has no field {name!r}; take it over from '
        'configs/common.py.'
      )
    value = value[part]
  return value


def _check_number(name, value, rule):
  if not rule.holds(value):
    raise UserError(
      f'config.{name}={_short(value)} must be {rule}. Set --config.{name}.'
    )


def _short(value):
  text = ' '.join(repr(value).split())
  return text if len(text) <= 60 else f'{text[:60]}...'
