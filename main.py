"""Trains a classifier from few labels. Kept short: see flatmatch_jax/train.py.

python main.py --config configs/cifar10.py --workdir runs/
"""

import pathlib

from absl import app, flags
from ml_collections import config_flags

from flatmatch_jax import cli, train

_DIGITS = pathlib.Path(__file__).parent / 'configs' / 'digits.py'

_CONFIG = config_flags.DEFINE_config_file(
  'config', None, 'File of the config, with :key=value,… behind it.'
)
_WORKDIR = flags.DEFINE_string(
  'workdir', None, 'Folder of the run; by default named by what runs, in runs/.'
)


def main(argv):
  del argv
  config = _CONFIG.value
  name = f'{config.dataset}-{config.method}-{config.labels}-{config.seed}'
  train.train_and_evaluate(config, _WORKDIR.value or f'runs/{name}')


if __name__ == '__main__':
  with cli.errors_as_lines():
    cli.set_default_config(_DIGITS)
    app.run(main, flags_parser=cli.parse_flags)
