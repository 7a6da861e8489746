"""main.py with a network that is quick to compile; for tests of processes.

  tiny_main.py [STEP SIGNAL NUMBER] FLAGS_OF_MAIN

It stands in for --config.model=wrn_10_1. Process NUMBER sends itself a SIGNAL
after STEP steps, when a checkpoint is there; from then on steps take a second,
so that the run cannot end before the signal is answered.
"""

import os
import pathlib
import runpy
import signal
import sys
import time

import conftest
import jax

from flatmatch_jax import models
from flatmatch_jax.run import progress
from flatmatch_jax.system import distributed


def create(name, num_classes, *args, **kwargs):
  """For `models.create`: what the config checks and the program ask for."""
  del name
  heads = kwargs.get('heads', args[0] if args else ())
  return conftest.TinyNet(num_classes, heads)


def signal_after(step, name, number):
  inner, taken = progress.Progress.step, 0

  def hooked(self):
    nonlocal taken
    inner(self)
    taken += 1
    if taken == step and jax.process_index() == number:
      folder = self._writers[0][0].checkpoints
      while distributed.several() and not any(
        path.name.isdigit() for path in folder.glob('*')
      ):
        time.sleep(0.1)
      os.kill(os.getpid(), getattr(signal, name))
    if taken >= step and distributed.several():
      time.sleep(1)

  progress.Progress.step = hooked


if __name__ == '__main__':
  models.create = create
  if sys.argv[1].isdigit():
    signal_after(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
    del sys.argv[1:4]
  sys.argv[0] = str(pathlib.Path(__file__).parent.parent / 'main.py')
  runpy.run_path(sys.argv[0], run_name='__main__')
