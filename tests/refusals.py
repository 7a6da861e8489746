"""Wrong arguments of main.py, in this process."""

import sys

from absl import flags
from ml_collections import config_flags
from runs import ROOT

from flatmatch_jax.system import cli
from flatmatch_jax.training import loop, setup


def file(dataset='digits', arg=''):
  return f'--config={ROOT}/configs/{dataset}.py' + (arg and f':{arg}')


def start(monkeypatch, *args):
  """main.py in this process, up to where something would be written."""
  values = flags.FlagValues()
  config_flags.DEFINE_config_file('config', None, '', flag_values=values)
  flags.DEFINE_string('workdir', None, '', flag_values=values)
  monkeypatch.setattr(flags, 'FLAGS', values)
  monkeypatch.setattr(sys, 'argv', ['main.py', *args])

  def work(*args):
    raise AssertionError('work has begun')

  monkeypatch.setattr(setup, 'write_description', work)
  with cli.errors_as_lines():
    cli.set_default_config(ROOT / 'configs' / 'digits.py')
    cli.parse_flags(sys.argv)
    loop.train_and_evaluate(values.config, values.workdir)


def check_line(stderr, named):
  assert stderr.startswith('error: ')
  assert stderr.count('\n') == 1
  assert stderr.endswith('\n')
  assert 'Traceback' not in stderr
  for words in named:
    assert words in stderr
