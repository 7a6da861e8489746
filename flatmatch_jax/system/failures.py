"""An error of one process ends all processes of a run, with its message."""

import atexit
import contextlib
import os
import re
import sys
import threading
import time
import traceback

import jax

from flatmatch_jax.system import cli, distributed, messages

_FAILED = 'flatmatch_jax/failed'  # Of which process, with which exit code, why.
_LINGER = 10  # Seconds for which the dying wait until all have heard of it.
_HEAD_START = 2  # Seconds by which the others end before process 0.


@contextlib.contextmanager
def ending_together():
  """Ends all processes when one fails in the block; all say why.

  At once, and from the inside of what the block is part of: to clean up may
  take the others, who wait for this process.
  """
  try:
    yield
  except SystemExit:  # Agreed upon.
    raise
  except BaseException as error:
    if not distributed.several():
      raise
    code, text = _describe(error)
    print(text, file=sys.stderr, flush=True)
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # Another was first.
      distributed.client().key_value_set(
        _FAILED, f'{jax.process_index()} {code} {text.removeprefix("error: ")}'
      )
    time.sleep(2 * _LINGER)  # `_watch` ends this process too.
    os._exit(code)


def _describe(error) -> tuple[int, str]:
  """The exit code, and a line for people."""
  if found := cli.describe(error):
    return found
  line = messages.printable(' '.join(str(error).split()))
  if re.search('gloo|nccl|coordination service', line, re.IGNORECASE):
    return 1, (
      f'error: lost another process ({line[:200]}). The same command, started '
      'for all processes, resumes from the last checkpoint.'
    )
  traceback.print_exception(error)
  return 1, f'error: {type(error).__name__}: {line}'


def watch() -> None:
  """From now on this process ends when another one has failed."""
  if not distributed.several():
    return
  ended = threading.Event()
  thread = threading.Thread(target=_watch, args=[ended], daemon=True)
  thread.start()

  def stop():
    ended.set()
    thread.join()

  atexit.register(stop)  # Python must not end while it is inside of JAX.


def _watch(ended):
  told = None
  while told is None:
    if ended.wait(1.0):
      return
    # Not there, or not to be reached: then JAX says so.
    with contextlib.suppress(jax.errors.JaxRuntimeError):
      told = distributed.client().key_value_try_get(_FAILED)
  process, code, text = told.split(' ', 2)
  if int(process) != jax.process_index():
    print(f'error: process {process} failed: {text}', file=sys.stderr)
  # Process 0 keeps the store in which the others read it.
  with contextlib.suppress(jax.errors.JaxRuntimeError):
    distributed.client().wait_at_barrier('flatmatch_jax/heard', 1000 * _LINGER)
  sys.stdout.flush()
  sys.stderr.flush()
  if distributed.is_first():
    time.sleep(_HEAD_START)  # Without the store JAX aborts the others.
  os._exit(int(code))
