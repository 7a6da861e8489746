"""Where runs are hurt: an undisturbed one, and others to be like it."""

import os
import pathlib
import shutil
import signal
import subprocess
import threading
import zlib

import numpy as np
import runs

from flatmatch_jax.run.workdir import Workdir
from flatmatch_jax.training import load


class NotTriedError(Exception):
  """Says why a fault cannot be made here."""


class Lab:
  """An undisturbed run, and what it takes to disturb others like it."""

  def __init__(self, folder, finished, seed, **command):
    """`command` are arguments of `runs.command`."""
    self.folder, self.finished, self.seed = folder, finished, seed
    self._command = command
    self._lock = threading.Lock()
    self.state = load.load_run(Workdir(finished)).state
    self.steps = int(self.state.step)

  def random(self, name):
    return np.random.default_rng([self.seed, zlib.crc32(name.encode())])

  def command(self, workdir):
    return runs.command(workdir, **self._command)

  def other(self, name, *args, **command):
    """A lab of other runs, of which it makes the undisturbed one."""
    args = (*self._command.get('args', ()), *args)
    command = self._command | command | {'args': args}
    return start(self.folder, self.folder / name, self.seed, **command)

  def stop(self, workdir, place, count):
    """A process of the run that has stopped at a place of tests/hurt.py."""
    return runs.start_and_stop(self.folder, self.command(workdir), place, count)

  def hurt(self, workdir, place, count):
    """The whole process, hurt from inside; its exit code and stderr."""
    return runs.go_on(self.stop(workdir, place, count))

  def run(self, workdir):
    done = runs.run(self.folder, self.command(workdir))
    return done.returncode, done.stderr

  def half(self, name):
    """A copy of a run that was killed after three checkpoints or so."""
    with self._lock:
      whole = self.finished.with_name(f'{self.finished.name}-half')
      if not whole.exists():
        runs.go_on(self.stop(whole, 'step', 11), signal.SIGKILL)
    return pathlib.Path(shutil.copytree(whole, self.folder / name))

  def finish(self, workdir):
    """Goes on to the end, and compares every bit; what was said."""
    code, stderr = self.run(workdir)
    assert code == 0, stderr
    runs.assert_same_run(workdir, self.finished, self.state, self.steps)
    return stderr


def start(folder, finished, seed, **command):
  """A lab in `folder`, and its undisturbed run."""
  done = runs.run(folder, runs.command(finished, **command))
  assert done.returncode == 0, done.stderr
  return Lab(folder, finished, seed, **command)


def assert_refused(found, *words):
  """A line, and nothing was begun."""
  code, stderr = found
  assert code == 2, stderr
  assert stderr.startswith('error: '), stderr
  assert stderr.count('\n') == 1, stderr
  assert all(word in stderr for word in words), stderr


def can_mount():
  """Whether this process is in a namespace of mounts of its own."""
  return bool(os.environ.get('FAULTS_MAY_MOUNT'))


def mount(*args):
  subprocess.run(['mount', *map(str, args)], check=True)


def unmount(folder):
  """Lazily: somebody may still look at it."""
  subprocess.run(['umount', '--lazy', str(folder)], check=True)
