"""SIGTERM and Ctrl-C as a request that the loop answers when it is ready."""

import contextlib
import signal
import threading


class StopRequest:
  """Holds the signal that asked to stop, or None."""

  signal: int | None = None


@contextlib.contextmanager
def stop_requests():
  """Catches the first SIGTERM or SIGINT; the second acts as ever."""
  request = StopRequest()
  if threading.current_thread() is not threading.main_thread():
    yield request  # Python sets handlers in the main thread only.
    return
  before: dict = {}

  def restore():
    for number, handler in before.items():
      signal.signal(number, handler)

  def handle(number, frame):
    del frame
    request.signal = number
    restore()

  for number in (signal.SIGTERM, signal.SIGINT):
    before[number] = signal.signal(number, handle)
  try:
    yield request
  finally:
    restore()
