"""How long a start takes is told, and compiled programs can be kept."""

import re
import time

import jax
from jax.experimental.compilation_cache import compilation_cache
import jax.numpy as jnp
import pytest

from flatmatch_jax import startup


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
