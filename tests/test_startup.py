"""A start: cores as devices, programs that are kept, seconds that are told."""

import os
import pathlib
import re
import subprocess
import sys
import time

import jax
from jax.experimental.compilation_cache import compilation_cache
import jax.numpy as jnp
import pytest

from configs import cifar10
from flatmatch_jax import startup

ROOT = pathlib.Path(__file__).parent.parent


def test_phases_add_up_to_the_whole(capfd, monkeypatch):
  clock = iter([10.0, 12.0, 13.5, 14.0])
  monkeypatch.setattr(time, 'perf_counter', lambda: next(clock))
  phases = startup.Phases(import_seconds=3.0)
  for name in ('data', 'compile', 'data'):
    phases.done(name)
  phases.tell()
  line = capfd.readouterr().err
  assert 'after 7.0 s: import 3.0, data 2.5, compile 1.5.' in line


@pytest.fixture
def kept_settings():
  names = (
    'jax_compilation_cache_dir',
    'jax_persistent_cache_min_compile_time_secs',
  )
  before = {name: getattr(jax.config, name) for name in names}
  jax.config.update(names[1], 0)
  yield
  for name, value in before.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()


def test_compiled_programs_are_kept_where_the_config_says(
  tmp_path, monkeypatch, kept_settings
):
  monkeypatch.setenv('HOME', str(tmp_path))
  startup.use_compilation_cache('~/kept')
  jax.jit(lambda x: 3 * x + len(str(tmp_path)))(jnp.ones(7))
  assert list((tmp_path / 'kept').iterdir())


def test_no_folder_leaves_the_settings_of_jax(kept_settings):
  before = jax.config.jax_compilation_cache_dir
  startup.use_compilation_cache('')
  assert jax.config.jax_compilation_cache_dir == before


def test_log_tells_where_the_start_went(tmp_path_factory):
  from runs import finished_run

  _, log = finished_run(tmp_path_factory)
  (line,) = re.findall(r'The first step was done after .*', log)
  for phase in ('import', 'data', 'state', 'log', 'compile', 'first step'):
    assert re.search(rf'{phase} \d+\.\d', line)


@pytest.mark.parametrize(
  ('sizes', 'parts', 'cores', 'devices'),
  [
    ((64, 448), (1, 1), 2, 2),
    ((64, 448), (1, 1), 6, 4),
    ((64, 448), (1, 1), 96, 8),  # Each has a copy of the state.
    ((64, 448), (2, 1), 8, 1),  # Loops.
    ((64, 448), (1, 2), 8, 1),
    ((7, 448), (1, 1), 4, 1),
    ((9, 27), (1, 1), 4, 3),
    ((0, 448), (1, 1), 4, 4),  # Refused later, with a line.
  ],
)
def test_cores_that_a_batch_can_be_divided_by(sizes, parts, cores, devices):
  config = cifar10.get_config()
  config.batch_size, config.unlabeled_batch_size = sizes
  config.microbatches = parts[0]
  config.recipe_args.groups = parts[1]
  assert startup.devices_for(config, cores) == devices


USE = """
import os, sys
from configs import cifar10, digits
from flatmatch_jax import startup
startup._cores = lambda: 4
config = (cifar10 if sys.argv[1] == 'cifar10' else digits).get_config()
startup.use_cores(config)
import jax
print(jax.device_count(), 'timeout' in os.environ.get('XLA_FLAGS', ''))
"""


@pytest.mark.parametrize(
  ('dataset', 'given', 'found'),
  [
    ('cifar10', None, '4 True'),
    ('cifar10', '2', '2 False'),
    ('digits', None, '1 False'),
  ],
)
def test_cores_are_devices_unless_jax_is_told(dataset, given, found):
  names = ('JAX_NUM_CPU_DEVICES', 'XLA_FLAGS')
  environment = {k: v for k, v in os.environ.items() if k not in names}
  environment['PYTHONPATH'] = str(ROOT)
  if given:
    environment['JAX_NUM_CPU_DEVICES'] = given
  done = subprocess.run(
    [sys.executable, '-c', USE, dataset],
    env=environment,
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.stdout.strip() == found, done.stderr
