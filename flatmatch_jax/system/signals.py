"""SIGTERM and Ctrl-C as a request that the loop answers when it is ready."""

import contextlib
import ctypes
import os
import signal
import threading

from jax.experimental import multihost_utils

from flatmatch_jax.system import distributed

_ANSWER = (
  b'\nStopping when this step is saved; what is being compiled is finished '
  b'first. Again ends at once.\n'
)


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
    while (found := os.read(reading, 1)) and found[0] not in before:
      pass
    if not found:
      return
    for number, handler in before.items():
      if number == signal.SIGINT or handler == signal.SIG_DFL:
        # As `signal.signal`, which only the main thread may call.
        ctypes.pythonapi.PyOS_setsig(number, signal.SIG_DFL)
    if distributed.is_first():
      # Not by `print`, which this may have interrupted; and a reader, such as
      # `tee`, may have ended by the same Ctrl-C.
      with contextlib.suppress(OSError):
        os.write(2, _ANSWER)

  thread = threading.Thread(target=answer, daemon=True)
  thread.start()
  old = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
  try:
    yield
  finally:
    signal.set_wakeup_fd(old)
    os.close(writing)
    thread.join()
    os.close(reading)
