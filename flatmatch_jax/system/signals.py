"""SIGTERM and Ctrl-C as a request that the loop answers when it is ready."""

import contextlib
import os
import signal
import threading

from jax.experimental import multihost_utils

from flatmatch_jax.system import distributed


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
    if distributed.is_first():
      # Not by `print`, which this may have interrupted; and a reader, such as
      # `tee`, may have ended by the same Ctrl-C.
      with contextlib.suppress(OSError):
        os.write(
          2, b'\nStopping when this step is saved; again ends at once.\n'
        )

  for number in (
    (signal.SIGINT,) if several else (signal.SIGTERM, signal.SIGINT)
  ):
    before[number] = signal.signal(number, handle)
  try:
    yield request
  finally:
    restore()
