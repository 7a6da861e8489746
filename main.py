"""Trains a classifier from few labels; flatmatch_jax/training/loop.py does it.

python main.py --config configs/cifar10.py --workdir runs/
"""

import pathlib

import flatmatch_jax

if __name__ == '__main__':
  flatmatch_jax.begin_command()

from absl import app, flags
from ml_collections import config_flags

from flatmatch_jax.system import cli, distributed, failures, startup
from flatmatch_jax.training import loop

_DIGITS = pathlib.Path(__file__).parent / 'configs' / 'digits.py'

_CONFIG = config_flags.DEFINE_config_file(
  'config', None, 'File of the config, with :key=value,… behind it.'
)
_WORKDIR = flags.DEFINE_string(
  'workdir', None, 'Folder of the run; by default named by what runs, in runs/.'
)
_COORDINATOR = flags.DEFINE_string(
  'coordinator', None, 'HOST:PORT of process 0, if several are started by hand.'
)
_NUM_PROCESSES = flags.DEFINE_integer(
  'num_processes', None, 'How many are started; 1: this one alone.'
)
_PROCESS_ID = flags.DEFINE_integer(
  'process_id', None, 'Which of them this is, from 0.'
)
_CONNECT_SECONDS = flags.DEFINE_integer(
  'connect_seconds', 300, 'How long they wait for each other at the start.'
)


def main(argv):
  del argv
  distributed.connect(
    _COORDINATOR.value,
    _NUM_PROCESSES.value,
    _PROCESS_ID.value,
    _CONNECT_SECONDS.value,
  )
  config = _CONFIG.value
  if not distributed.several():
    startup.use_cores(config)
  name = f'{config.dataset}-{config.method}-{config.labels}-{config.seed}'
  failures.watch()
  with failures.ending_together():
    loop.train_and_evaluate(config, _WORKDIR.value or f'runs/{name}')
    distributed.wait_for_all('end')


if __name__ == '__main__':
  with cli.errors_as_lines():
    cli.set_default_config(_DIGITS)
    app.run(main, flags_parser=cli.parse_flags)
