"""SIGTERM and Ctrl-C as a request that the loop answers when it is ready."""

import contextlib
import ctypes
import functools
import os
import signal
import threading

from jax.experimental import multihost_utils

from flatmatch_jax.system import distributed

_ANSWER = (
  b'\nStopping after this step is saved (a compilation in progress finishes '
  b'first). Press Ctrl-C again to stop at once.\n'
)
_END = 0  # No signal has this number.

_set_handler = ctypes.pythonapi.PyOS_setsig
_set_handler.argtypes = [ctypes.c_int, ctypes.c_void_p]
_set_handler.restype = ctypes.c_void_p


class StopRequest:
  """Holds the signal that asked to stop, or None."""

  signal: int | None = None
  _steps = 0

  def at_this_step(self) -> int | None:
    """The signal, if the run is to stop after this step; ask once a step.

    Of several processes all get it at the same step, soon after one did: JAX
    agrees on it in the background, so that a step costs nothing.
    """
    self._steps += 1
    if not distributed.several():
      return self.signal
    # Counted from the start of the process: a request from before is for 1.
    if multihost_utils.reached_preemption_sync_point(self._steps):
      return self.signal or signal.SIGTERM
    return None


@contextlib.contextmanager
def stop_requests():
  """Catches the first SIGTERM or SIGINT; the second ends the process at once.

  Of several processes JAX catches every SIGTERM, and SIGINT becomes one.
  """
  request = StopRequest()
  if threading.current_thread() is not threading.main_thread():
    yield request  # Python sets handlers in the main thread only.
    return
  several = distributed.several()
  if several:
    distributed.watch_for_stop()
  before: dict = {}

  def restore():
    for number, handler in before.items():
      signal.signal(number, handler)

  def handle(number, frame):
    del frame
    request.signal = number
    restore()
    # The usual handler would wait for Python's turn, which a step that hangs
    # does not give.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if several:
      os.kill(os.getpid(), signal.SIGTERM)

  for number in (
    (signal.SIGINT,) if several else (signal.SIGTERM, signal.SIGINT)
  ):
    before[number] = signal.signal(number, handle)
  try:
    with _answering(before):
      yield request
  finally:
    restore()


@contextlib.contextmanager
def _answering(before: dict):
  """Says at once that the first signal has come, by a thread of its own.

  The handlers, which replace those `before`, wait for Python's turn: minutes,
  while XLA compiles. The second signal need not wait either.
  """
  reading, writing = os.pipe()
  os.set_blocking(writing, False)

  def answer():
    while (number := os.read(reading, 1)[0]) != _END:
      if number in before:
        _answer(before)
        return

  _keep_signals_of_children_apart()
  thread = threading.Thread(target=answer, daemon=True)
  thread.start()
  old = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
  try:
    yield
  finally:
    _wake(old)
    with contextlib.suppress(BlockingIOError):  # Then it reads signals.
      os.write(writing, bytes([_END]))
    thread.join()
    os.close(writing)
    os.close(reading)


def _answer(before: dict) -> None:
  for number, handler in before.items():
    if number == signal.SIGINT or handler == signal.SIG_DFL:
      # As `signal.signal`, which only the main thread may call.
      _set_handler(number, int(signal.SIG_DFL))
  if distributed.is_first():
    # Not by `print`, which this may have interrupted; and a reader, such as
    # `tee`, may have ended by the same Ctrl-C.
    with contextlib.suppress(OSError):
      os.write(2, _ANSWER)


def _wake(descriptor: int) -> None:
  """Gives numbers of signals to `descriptor`, unless it has been closed."""
  try:
    signal.set_wakeup_fd(descriptor)
  except (OSError, ValueError):
    signal.set_wakeup_fd(-1)


@functools.cache
def _keep_signals_of_children_apart() -> None:
  """A forked process has the same pipe, but its signals are its own."""
  leave = lambda: signal.set_wakeup_fd(-1)
  os.register_at_fork(after_in_child=leave)
