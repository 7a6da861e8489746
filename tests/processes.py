"""Starts a program as several processes that find each other, for tests."""

import contextlib
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parent.parent


class Ended(NamedTuple):
  """How a process ended."""

  returncode: int
  output: str  # Of both channels.


def free_port() -> int:
  with socket.socket() as probe:
    probe.bind(('localhost', 0))
    return probe.getsockname()[1]


class Group:
  """Processes of one run, by number; `popen` are the running ones."""

  def __init__(self, popen, outputs):
    self.popen: list[subprocess.Popen] = popen
    self._outputs = outputs

  def output(self, number: int) -> str:
    """What a process has said until now, on both of its channels."""
    return pathlib.Path(self._outputs[number].name).read_text()

  def wait_for(self, number: int, text: str, seconds: float = 300) -> None:
    """Returns when a process has said `text`."""
    until = time.monotonic() + seconds
    while text not in self.output(number):
      if self.popen[number].poll() is not None or time.monotonic() > until:
        raise AssertionError(f'No {text!r} in:\n{self.output(number)}')
      time.sleep(0.05)

  def wait(self, seconds: float = 300) -> list[Ended]:
    """Returns how all ended; whoever has not by then fails the test."""
    until = time.monotonic() + seconds
    codes = [p.wait(max(0.0, until - time.monotonic())) for p in self.popen]
    return [Ended(code, self.output(n)) for n, code in enumerate(codes)]


@contextlib.contextmanager
def started(count: int, args, env, devices: int = 1, cwd=None):
  """`python ARGS` as `count` processes of `devices` each; none stays behind.

  Yields a `Group`. With one process nothing is told of others. `args` and `env`
  may be functions of the process's number.
  """
  of = lambda given, number: given(number) if callable(given) else given
  coordinator = f'localhost:{free_port()}'
  popen: list[subprocess.Popen] = []
  with contextlib.ExitStack() as stack:
    outputs = [
      stack.enter_context(tempfile.NamedTemporaryFile()) for _ in range(count)
    ]
    try:
      for number, output in enumerate(outputs):
        told = (
          f'--coordinator={coordinator}',
          f'--num_processes={count}',
          f'--process_id={number}',
        )
        popen.append(
          subprocess.Popen(
            [sys.executable, *of(args, number), *(told if count > 1 else ())],
            env=dict(of(env, number)) | {'JAX_NUM_CPU_DEVICES': str(devices)},
            cwd=cwd,
            stdout=output,
            stderr=subprocess.STDOUT,
          )
        )
      yield Group(popen, outputs)
    finally:
      for process in popen:
        process.kill()
        process.wait()


def run(count: int, args, env, devices: int = 1, cwd=None) -> list[Ended]:
  """The same from start to end."""
  with started(count, args, env, devices, cwd) as group:
    return group.wait()


def environment(folder: pathlib.Path) -> dict[str, str]:
  """Programs compiled once for all runs; no TensorFlow, which loads slowly."""
  absent = folder / 'absent' / 'tensorflow'
  absent.mkdir(parents=True, exist_ok=True)
  (absent / '__init__.py').write_text("raise ImportError('no tensorflow')\n")
  return os.environ | {
    'JAX_PLATFORMS': 'cpu',
    'PYTHONPATH': os.pathsep.join([str(absent.parent), str(ROOT)]),
  }
