"""Where the seconds before the first step go."""

import os
import time

import jax
from jax.experimental.compilation_cache import compilation_cache

from flatmatch_jax import logging
from flatmatch_jax.types import UserError


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
