"""Before the first step: cores, compiled programs, and where seconds go."""

import os
import time

import jax
from jax.experimental.compilation_cache import compilation_cache

from flatmatch_jax import logging
from flatmatch_jax.types import UserError

_MOST = 64  # As in rules.py.
_BY_ITSELF = 8  # Each has a copy of the state.
# Of jaxlib, whose XLA knows the option below; others refuse what they do not.
_KNOWS_PATIENCE = (0, 10)
_PATIENCE = '--xla_cpu_collective_call_terminate_timeout_seconds'


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
  number = wanted or devices_for(config, _cores())
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


def _cores():
  """Those that this process may use, where the system tells."""
  if hasattr(os, 'sched_getaffinity'):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


class Phases:
  """Seconds of each phase of a start, told when the first step is done."""

  def __init__(self, import_seconds: float):
    self._seconds = {'import': import_seconds}
    self._last = time.perf_counter()

  def done(self, phase: str) -> None:
    """The time since the phase before belongs to `phase`."""
    now = time.perf_counter()
    self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._last
    self._last = now

  def tell(self) -> None:
    parts = ', '.join(f'{k} {v:.1f}' for k, v in self._seconds.items())
    total = sum(self._seconds.values())
    logging.say(f'The first step was done after {total:.1f} s: {parts}.')


def use_compilation_cache(folder: str) -> None:
  """Keeps compiled programs in `folder`, and takes from it what fits.

  Whoever can write there decides what runs here. Raises UserError where that
  cannot be this process: JAX would only warn, at every program.
  """
  if folder:
    path = folder
    if '://' not in folder:
      path = os.path.expanduser(folder)
      _check_folder(path)
    jax.config.update('jax_compilation_cache_dir', path)
    compilation_cache.reset_cache()  # Else one that is open stays in use.


def _check_folder(path):
  try:
    os.makedirs(path, exist_ok=True)
    reason = '' if os.access(path, os.W_OK) else 'Permission denied'
  except OSError as error:
    reason = str(error.strerror)
  if reason:
    raise UserError(
      f'config.compilation_cache={path} must be a folder that can be made and '
      f'written ({reason}); name another, or leave it empty.'
    )
