"""How the configs of runs differ."""

import copy
import json

import ml_collections

# Fields that may change between two starts of one run: they say where and how
# often, not what is computed.
FREE = (
  'data_dir',
  'checkpoint_every',
  'compilation_cache',
  'max_skipped',
  'mesh.fsdp',
  'cpu_devices',
  'profile_steps',
)
# In what runs of one setting may differ: seeds, and what only looks at them.
ALIKE = ('seed', 'split_seed', 'log_every', 'probe_every', *FREE)

_OF_METHODS = ('method_args.', 'recipe_args.')


def as_dict(config) -> dict:
  """A config as JSON sees it: plain dicts, lists and numbers."""
  return json.loads(config.to_json_best_effort())


def flatten(tree, prefix='') -> dict:
  if not isinstance(tree, dict):
    return {prefix[:-1]: tree}
  flat: dict = {}
  for key, value in tree.items():
    flat |= flatten(value, f'{prefix}{key}.')
  return flat


def fields(config: dict) -> dict:
  """What a config sets, by dotted names, but for seeds and the like."""
  return {
    key: value
    for key, value in flatten(config).items()
    # A variant's choices are fields of their own too.
    if key not in ALIKE and not key.startswith('variant.')
  }


def differences(configs: list[dict]) -> list[str]:
  """In what each config differs from others of its method, as text.

  Runs whose texts are equal, '' if there is nothing, are of one setting.
  """
  settings = [fields(config) for config in configs]
  names = [
    name
    for name in dict.fromkeys(name for one in settings for name in one)
    if len({repr(one.get(name)) for one in settings}) > 1
  ]
  return [
    ', '.join(f'{name}={one.get(name, "absent")}' for name in names)
    for one in settings
  ]


def changes(there: dict, config) -> list[str]:
  """How `config` differs from that of a run, as texts.

  What follows from another field is left out: from `steps`, a method's
  arguments from the method, and choices after the colon, which are fields too.
  """
  there, here = flatten(there), flatten(as_dict(config))
  expected = _at(config, there.get('steps'), here) | {'steps': here['steps']}
  found = [
    key
    for key in sorted(there | here)
    if there.get(key) not in (here.get(key), expected.get(key))
    and key not in FREE
  ]
  if 'method' in found:
    one_sided = there.keys() ^ here.keys()
    found = [
      key
      for key in found
      if key not in one_sided or not key.startswith(_OF_METHODS)
    ]
  chosen = [key for key in found if not key.startswith('variant.')]
  return [
    f'{key} ({there.get(key, "absent")} there, {here.get(key, "absent")} now)'
    for key in chosen or found
  ]


def _at(config, steps, here: dict) -> dict:
  """What `here`, its fields, are at another number of steps, by references."""
  frozen = isinstance(config, ml_collections.FrozenConfigDict)
  if frozen or type(steps) is not int:  # Or somebody edited the file.
    return here
  other = copy.deepcopy(config)
  other.steps = steps
  return flatten(as_dict(other))
