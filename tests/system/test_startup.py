"""A start: cores as devices, programs that are kept, seconds that are told."""

import os
import re
import sys
import time

import jax
from jax.experimental.compilation_cache import compilation_cache
import jax.numpy as jnp
import pytest
from runs import ROOT, finished_run, python

from configs import cifar10
import flatmatch_jax
from flatmatch_jax.system import startup


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


@pytest.fixture
def home(tmp_path, monkeypatch, kept_settings):
  """A user without settings of their own."""
  monkeypatch.setenv('HOME', str(tmp_path))
  monkeypatch.delenv('XDG_CACHE_HOME', raising=False)
  jax.config.update('jax_compilation_cache_dir', None)
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 1.0)
  return tmp_path


def test_private_folder_is_the_default(home, capfd):
  assert cifar10.get_config().compilation_cache == 'auto'
  startup.use_compilation_cache('auto')
  folder = home / '.cache' / 'flatmatch_jax'
  assert jax.config.jax_compilation_cache_dir == str(folder)
  assert folder.stat().st_mode & 0o777 == 0o700
  assert jax.config.jax_persistent_cache_min_compile_time_secs < 1
  assert capfd.readouterr().err == ''


@pytest.mark.parametrize(
  ('xdg', 'folder'),
  [('own', 'own/flatmatch_jax'), ('../own', '.cache/flatmatch_jax')],
)
def test_xdg_cache_home_counts_if_absolute(home, monkeypatch, xdg, folder):
  xdg = xdg if xdg.startswith('.') else str(home / xdg)
  monkeypatch.setenv('XDG_CACHE_HOME', xdg)
  startup.use_compilation_cache('auto')
  assert jax.config.jax_compilation_cache_dir == str(home / folder)


@pytest.mark.parametrize('given', ['', '/elsewhere'])
def test_users_own_setting_of_jax_stays(home, given):
  jax.config.update('jax_compilation_cache_dir', given)
  startup.use_compilation_cache('auto')
  assert jax.config.jax_compilation_cache_dir == given
  assert jax.config.jax_persistent_cache_min_compile_time_secs == 1.0
  assert not list(home.iterdir())


def test_users_own_least_seconds_stay(home):
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 5.0)
  startup.use_compilation_cache('auto')
  assert jax.config.jax_persistent_cache_min_compile_time_secs == 5.0


def assert_no_cache(capfd, reason):
  startup.use_compilation_cache('auto')
  assert jax.config.jax_compilation_cache_dir is None
  (line,) = capfd.readouterr().err.splitlines()
  assert 'Compiled programs are not kept in' in line
  assert reason in line


@pytest.mark.parametrize('mode', [0o770, 0o702])
def test_folder_that_others_can_write_to_is_refused(home, capfd, mode):
  folder = home / '.cache' / 'flatmatch_jax'
  folder.mkdir(parents=True)
  folder.chmod(mode)
  assert_no_cache(capfd, 'others can write to it')


def test_folder_of_another_user_is_refused(home, monkeypatch, capfd):
  monkeypatch.setattr(os, 'geteuid', lambda: os.getuid() + 1)
  assert_no_cache(capfd, 'another user')


def test_symbolic_link_is_refused(home, tmp_path, capfd):
  (tmp_path / 'elsewhere').mkdir()
  (home / '.cache').mkdir()
  (home / '.cache' / 'flatmatch_jax').symlink_to(tmp_path / 'elsewhere')
  assert_no_cache(capfd, 'symbolic link')


@pytest.mark.parametrize(('mode', 'refused'), [(0o777, True), (0o1777, False)])
def test_folder_that_others_can_replace_is_refused(home, capfd, mode, refused):
  folder = home / '.cache'
  folder.mkdir()
  folder.chmod(mode)
  if refused:
    assert_no_cache(capfd, 'others can replace it')
  else:
    startup.use_compilation_cache('auto')
    assert not capfd.readouterr().err


def test_run_without_a_place_for_programs_continues(home, capfd):
  (home / '.cache').write_text('')
  assert_no_cache(capfd, 'Not a directory')


def test_programs_used_least_recently_are_deleted(tmp_path):
  for age, name in enumerate(('new-cache', 'old-cache', 'older-cache', 'note')):
    (tmp_path / name).write_bytes(bytes(10))
    os.utime(tmp_path / name, (1000 - age, 1000 - age))
  startup._trim(tmp_path, most_bytes=25)
  left = {path.name for path in tmp_path.iterdir()}
  assert left == {'new-cache', 'old-cache', 'note'}


def test_log_tells_where_the_start_went(tmp_path_factory):
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
from flatmatch_jax.system import startup
startup.cores = lambda: 4
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
  ],
)
def test_cores_are_devices_unless_jax_is_told(dataset, given, found):
  names = ('JAX_NUM_CPU_DEVICES', 'XLA_FLAGS')
  environment = {k: v for k, v in os.environ.items() if k not in names}
  if given:
    environment['JAX_NUM_CPU_DEVICES'] = given
  done = python('-c', USE, dataset, env=environment)
  assert done.stdout.strip() == found, done.stderr


_IMPORT_ALL = """
import importlib, os, pkgutil, sys
environment = dict(os.environ)
import absl.logging, flatmatch_jax
before = absl.logging.get_verbosity(), sys.unraisablehook
assert environment == dict(os.environ)
names = [m.name for m in pkgutil.walk_packages(
    flatmatch_jax.__path__, 'flatmatch_jax.')]
assert 'flatmatch_jax.training.loop' in names, names
for name in names:
  importlib.import_module(name)
slow = {'tensorflow', 'tensorflow_datasets', 'sklearn', 'clu', 'tensorboard',
        'matplotlib'}
print(len(names), sorted(slow & set(sys.modules)))
print(before == (absl.logging.get_verbosity(), sys.unraisablehook))
"""


def test_importing_loads_no_tensorflow_and_silences_nothing():
  done = python('-c', _IMPORT_ALL, cwd=ROOT)
  assert done.returncode == 0, done.stderr
  loaded, unchanged = done.stdout.splitlines()
  number, loaded = loaded.split(maxsplit=1)
  assert int(number) > 20
  assert loaded == '[]'
  assert unchanged == 'True'


_LEVEL = 'import os; print(os.environ["TF_CPP_MIN_LOG_LEVEL"])'


@pytest.mark.parametrize('given', [None, '0'])
def test_commands_keep_the_alarms_of_xla_from_the_user(given, tmp_path):
  """Its C++ reads the level when jax is imported; 3 is fatal errors only."""
  environment = dict(os.environ)
  environment.pop('TF_CPP_MIN_LOG_LEVEL', None)  # Tests have imported jax.
  environment |= {'TF_CPP_MIN_LOG_LEVEL': given} if given else {}
  (tmp_path / 'main.py').write_text(
    (ROOT / 'main.py').read_text().partition('from absl')[0] + _LEVEL
  )
  done = python(tmp_path / 'main.py', env=environment)
  assert done.stdout.strip() == (given or '3'), done.stderr


@pytest.mark.parametrize('args', [['main.py'], ['-m', 'flatmatch_jax.report']])
def test_missing_packages_are_one_line(args):
  """-S: without site-packages, as outside the environment."""
  done = python('-S', *args, cwd=ROOT)
  assert done.returncode == 1
  assert done.stderr.startswith(
    f"error: {sys.executable} has no package 'absl'"
  )
  assert '. .venv/bin/activate' in done.stderr
  assert done.stderr.count('\n') == 1


@pytest.mark.parametrize(
  ('argv', 'original', 'pages', 'present', 'restarts'),
  [
    (['main.py', 'a b'], ['main.py', 'a b'], '[madvise] never', None, True),
    (['-m', 'a'], ['-m', 'flatmatch_jax.x', 'a'], '[madvise]', None, True),
    (['main.py'], ['main.py'], '[always] madvise', None, False),
    (['main.py'], ['main.py'], '[madvise] never', 'GLIBC_TUNABLES', False),
    (['main.py'], ['main.py'], '[madvise]', '_FLATMATCH_JAX_STARTED', False),
    # Notebooks, debuggers, packages that import ours, standard input.
    (['main.py'], ['-m', 'kernel', '-f', 'x'], '[madvise]', None, False),
    (['main.py'], ['-m', 'pdb', 'main.py'], '[madvise]', None, False),
    (['-m', 'a'], ['-m', 'other.flatmatch_jax', 'a'], '[madvise]', None, False),
    (['-'], ['-'], '[madvise]', None, False),
    (['main.py'], ['main.py'], None, None, False),
  ],
)
def test_a_command_starts_anew_for_large_pages(
  argv, original, pages, present, restarts, monkeypatch, tmp_path
):
  started = []
  if pages is not None:
    (tmp_path / 'enabled').write_text(pages)
  monkeypatch.setattr(flatmatch_jax, '_LARGE_PAGES', tmp_path / 'enabled')
  monkeypatch.setattr(sys, 'argv', argv)
  monkeypatch.setattr(sys, 'orig_argv', ['python', *original])
  monkeypatch.setattr(os, 'execv', lambda *args: started.append(args))
  found = {present: 'mine'} if present else {}
  monkeypatch.setattr(os, 'environ', found)
  flatmatch_jax.begin_command()
  expected = (sys.executable, [sys.executable, *original])
  assert started == ([expected] if restarts else [])
  if restarts:
    assert found['GLIBC_TUNABLES'] == 'glibc.malloc.hugetlb=1'
