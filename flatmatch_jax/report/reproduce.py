"""The command that starts a run again, from what its config.json holds."""

import shlex

from flatmatch_jax.run.settings import as_dict, flatten
from flatmatch_jax.training import load
from flatmatch_jax.types import UserError

# Chosen after the colon; the others of `variant` are added to them.
_CHOSEN = ('method', 'labels', 'seed', 'split_seed')


def command(config: dict, workdir: str) -> str:
  """`python main.py` with what differs from the dataset's own config file.

  UserError where the repository's configs are not there to compare with, or
  have no such fields any more.
  """
  chosen = {key: config[key] for key in _CHOSEN} | dict(config['variant'])
  if config['dataset'] == 'tfds':
    chosen['name'] = config['tfds_name']
  argument = ','.join(f'{key}={value}' for key, value in chosen.items())
  file = f'{config["dataset"]}.py'
  loaded = load.load_config(file, argument)
  usual = flatten(as_dict(loaded))
  loaded.steps = config['steps']  # Decays and the like follow it.
  usual = flatten(as_dict(loaded)) | {'steps': usual['steps']}
  here = flatten(config)
  if unknown := here.keys() - usual.keys():
    raise UserError(
      f'configs/{file} has no {", ".join(sorted(unknown))}, which the run had.'
    )
  changed = [
    f'--config.{key}={value}'
    for key, value in here.items()
    if value != usual[key]
  ]
  words = ['python', 'main.py', '--config', f'configs/{file}:{argument}']
  return shlex.join([*words, *changed, '--workdir', workdir])
