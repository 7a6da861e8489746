"""Runs main.py and hurts it from inside, where signals alone cannot aim.

python tests/hurt.py PLACE COUNT main.py ARGUMENTS…

The process stops itself, as Ctrl-Z would, when it comes to PLACE the COUNTth
time, so that a test can send its signal without a race:
  compile   before the step is compiled
  step      after a step
  evaluate  before an evaluation
  write     before Orbax makes, writes, renames or deletes a file
Or it goes on, and what is hurt is
  clock     time.time and time.time_ns, COUNT seconds off after three steps
  disk      which takes only COUNT bytes of a file
"""

import os
import resource
import runpy
import signal
import sys
import time

from orbax.checkpoint._src.path import async_path
import tqdm.std

from flatmatch_jax.run import progress
from flatmatch_jax.training import engine, loop

PLACES = {
  'compile': [(engine, 'compile_step')],
  'step': [(progress.Progress, 'step')],
  'evaluate': [(loop, 'evaluate')],
  'write': [
    (async_path, name)
    for name in ('mkdir', 'write_text', 'write_bytes', 'rename', 'rmtree')
  ],
}


def stop_at(place, count):
  left = count

  def counted(function):
    def call(*args, **kwargs):
      nonlocal left
      # A step has to be taken before it counts.
      result = function(*args, **kwargs) if place == 'step' else None
      left -= 1
      if not left:
        os.kill(os.getpid(), signal.SIGSTOP)
      return result if place == 'step' else function(*args, **kwargs)

    return call

  for owner, name in PLACES[place]:
    setattr(owner, name, counted(getattr(owner, name)))


def jump(seconds, steps=3):
  step, clock, clock_ns = progress.Progress.step, time.time, time.time_ns
  left = steps
  off = lambda: 0 if left > 0 else seconds

  def counted(self):
    nonlocal left
    step(self)
    left -= 1

  progress.Progress.step = counted
  time.time = tqdm.std.time = lambda: clock() + off()
  time.time_ns = lambda: clock_ns() + off() * 10**9


if __name__ == '__main__':
  place, count = sys.argv[1], int(sys.argv[2])
  if place == 'disk':
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, count))
  elif place == 'clock':
    jump(count)
  else:
    stop_at(place, count)
  sys.argv = sys.argv[3:]
  runpy.run_path(sys.argv[0], run_name='__main__')
