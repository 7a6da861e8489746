"""Before the first step: cores, compiled programs, and where seconds go."""

import contextlib
import glob
import importlib.metadata
import importlib.util
import os
import stat
import time

import jax
from jax.experimental.compilation_cache import compilation_cache

from flatmatch_jax.system import messages
from flatmatch_jax.types import UserError

# Device files of NVIDIA (the last one under Windows), of TPUs, and of AMD.
_ACCELERATORS = (
  '/dev/nvidia[0-9]*',
  '/dev/accel*',
  '/dev/vfio/[0-9]*',
  '/dev/kfd',
  '/dev/dxg',
)
_MOST = 64  # As in rules.py.
_BY_ITSELF = 8  # Each has a copy of the state.
# Of jaxlib, whose XLA knows the option below; others refuse what they do not.
_KNOWS_PATIENCE = (0, 10)
_PATIENCE = '--xla_cpu_collective_call_terminate_timeout_seconds'
# Programs that compile for less are not kept: JAX's default, and ours, as a
# start has many small ones.
_LEAST = 'jax_persistent_cache_min_compile_time_secs'
_JAX_SECONDS, _SECONDS = 1.0, 0.1
_MOST_BYTES = 2**31  # Of compiled programs in the user's folder.


def use_cores(config) -> None:
  """Makes devices of a CPU's cores; to be called before JAX looks for any.

  XLA divides one operation after another over the cores of a device, which wait
  for each other every time. As devices of their own they take their shares of a
  batch through all of a step: docs/speed.md has what that gains. It says
  nothing to accelerators, nor where JAX_NUM_CPU_DEVICES is set.
  """
  wanted = config.cpu_devices
  unset = jax.config.values['jax_num_cpu_devices'] < 1
  if not unset or wanted == 1 or jax.__version_info__[:2] < _KNOWS_PATIENCE:
    return
  number = wanted or devices_for(config, cores())
  if not 2 <= number <= _MOST:  # What is beyond is refused later.
    return
  # XLA ends a process of which a device waits for others for 40 s: one that is
  # stopped for so long by Ctrl-Z, too. In seconds:
  flags = os.environ.get('XLA_FLAGS', '')
  if _PATIENCE not in flags:
    os.environ['XLA_FLAGS'] = f'{flags} {_PATIENCE}=1800'.strip()
  jax.config.update('jax_num_cpu_devices', number)


def devices_for(config, cores: int) -> int:
  """As many as there are cores and as batches can be divided by."""
  if config.recipe_args.get('groups', 1) != 1 or config.microbatches != 1:
    return 1  # They take turns in a loop, in which XLA keeps sums in no order.
  sizes = config.batch_size, config.unlabeled_batch_size
  return max(
    number
    for number in range(1, min(cores, _BY_ITSELF) + 1)
    if not any(size % number for size in sizes)
  )


def cores():
  """Those that this process may use, where the system tells."""
  if hasattr(os, 'sched_getaffinity'):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


def has_accelerator() -> bool:
  """Whether this machine shows a GPU or TPU, without starting JAX.

  Once JAX has started, the number of its CPU devices cannot be changed. A
  device counts only if JAX has a plugin to use it.
  """
  platforms = os.environ.get('JAX_PLATFORMS', '')
  if platforms:
    return platforms.split(',')[0] != 'cpu'
  plugins = importlib.metadata.entry_points(group='jax_plugins')
  usable = plugins or importlib.util.find_spec('libtpu')
  return bool(usable) and any(glob.glob(file) for file in _ACCELERATORS)


class Phases:
  """Seconds of each phase of a start, printed after the first step."""

  def __init__(self, import_seconds: float | None = None):
    self._phases: dict[str, float] = {}
    if import_seconds is not None:
      self._phases['import'] = import_seconds
    self._began = self._last = time.perf_counter()

  def seconds(self) -> float:
    """Since the start, without the import."""
    return time.perf_counter() - self._began

  def done(self, phase: str) -> None:
    """The time since the phase before belongs to `phase`."""
    now = time.perf_counter()
    self._phases[phase] = self._phases.get(phase, 0.0) + now - self._last
    self._last = now

  def tell(self) -> None:
    """Prints them, unless it took less than a second: a sweep starts often."""
    parts = ', '.join(f'{k} {v:.1f}' for k, v in self._phases.items())
    if (total := sum(self._phases.values())) >= 1:
      messages.say(f'The first step was done after {total:.1f} s: {parts}.')


def use_compilation_cache(folder: str) -> None:
  """Keeps compiled programs in `folder`, and loads those that it has.

  'auto' is a private folder of the user, unless JAX has one already; '' leaves
  JAX as it is. Whoever can write to the folder decides what runs here, so
  'auto' refuses a folder that others can write to or replace, and the run
  continues without a cache. A folder of another name that cannot be written to
  raises UserError, because JAX would only warn, once per program. The key of a
  program contains a fingerprint of its devices.
  """
  if folder == 'auto':
    if jax.config.values['jax_compilation_cache_dir'] is not None:
      return
    folder = _private_folder()
  elif '://' not in folder:
    folder = os.path.expanduser(folder)
    if folder and (reason := _make_folder(folder)):
      raise UserError(
        f'config.compilation_cache={folder} must be a folder that can be made '
        f'and written ({reason}); name another, or leave it empty.'
      )
  if not folder:
    return
  jax.config.update('jax_compilation_cache_dir', folder)
  if jax.config.values[_LEAST] == _JAX_SECONDS:
    jax.config.update(_LEAST, _SECONDS)
  compilation_cache.reset_cache()  # Otherwise one that is open stays in use.


def _private_folder() -> str:
  """Returns the user's folder of programs; '', with a line, if it is unsafe."""
  base = os.environ.get('XDG_CACHE_HOME', '')
  base = base if os.path.isabs(base) else os.path.expanduser('~/.cache')
  path = os.path.join(base, 'flatmatch_jax')
  reason = 'there is no home folder'
  if os.path.isabs(path) and not (reason := _make_folder(path)):
    reason = _why_unsafe(path)
  if reason:
    messages.say(f'Compiled programs are not kept in {path}: {reason}.')
    return ''
  with contextlib.suppress(OSError):  # Other runs may delete as well.
    _trim(path, _MOST_BYTES)
  return path


def _why_unsafe(path) -> str:
  """Why others could change what is in a folder, or ''."""
  status, above = os.lstat(path), os.stat(os.path.dirname(path))
  if stat.S_ISLNK(status.st_mode):
    return 'it is a symbolic link'
  if status.st_uid != os.geteuid():
    return 'it belongs to another user'
  if status.st_mode & 0o022:
    return 'others can write to it; delete it and what they may have put there'
  if above.st_mode & 0o022 and not above.st_mode & stat.S_ISVTX:
    return 'others can replace it, because they can write to the folder above'
  return ''


def _make_folder(path) -> str:
  """Makes a folder for this user alone; returns what prevents it, or ''."""
  try:
    os.makedirs(path, mode=0o700, exist_ok=True)
  except OSError as error:
    return str(error.strerror)
  return '' if os.access(path, os.W_OK | os.X_OK) else 'Permission denied'


def _trim(folder, most_bytes):
  """Deletes the programs that were used least recently.

  JAX would do so itself only if the package filelock were installed.
  """
  used = lambda x: max(x.stat().st_atime, x.stat().st_mtime)
  total = 0
  for entry in sorted(os.scandir(folder), key=used, reverse=True):
    total += entry.stat().st_size
    if total > most_bytes and entry.name.endswith('-cache'):
      os.unlink(entry.path)
