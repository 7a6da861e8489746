"""Batches that reach the devices before they are asked for."""

import atexit
from collections.abc import Generator
import queue
import threading
import time

import jax

from flatmatch_jax.system import sharding
from flatmatch_jax.types import Batch


class Prefetch:
  """Moves batches to the devices while the step before is computed.

  One batch waits on the devices while the next is on its way. Each process
  gives its own rows of the global arrays. Use it in a `with`, which ends its
  thread; an error of the thread is raised where the batch is taken.
  """

  def __init__(self, source: Generator[Batch, None, None], over_batch):
    self.waited = 0.0  # Seconds for which the taker of batches stood still.
    self._source, self._sharding = source, over_batch
    self._queue: queue.Queue = queue.Queue(maxsize=1)
    self._closed = threading.Event()
    self._thread = threading.Thread(target=self._run, daemon=True)
    # Python must not end while its thread puts arrays on devices.
    atexit.register(self.close)
    self._thread.start()

  def __enter__(self) -> 'Prefetch':
    return self

  def __exit__(self, *_) -> None:
    self.close()

  def __iter__(self) -> 'Prefetch':
    return self

  def __next__(self) -> Batch:
    if self._closed.is_set():
      raise StopIteration
    began = time.perf_counter()
    batch, error = self._queue.get()
    self.waited += time.perf_counter() - began
    if error is not None:
      self.close()
      raise error
    return batch

  def close(self) -> None:
    """Ends the thread, and waits for the batch that it has begun."""
    self._closed.set()
    self._thread.join()
    atexit.unregister(self.close)

  def _run(self) -> None:
    try:
      for batch in self._source:
        if not self._put(jax.tree.map(self._place, batch), None):
          return
      self._put(None, StopIteration())
    except BaseException as error:
      self._put(None, error)
    finally:
      self._source.close()

  def _place(self, rows):
    return sharding.from_local_rows(rows, self._sharding)

  def _put(self, batch, error) -> bool:
    """False if nobody wants the batch any more."""
    while not self._closed.is_set():
      try:
        self._queue.put((batch, error), timeout=0.1)
        return True
      except queue.Full:
        continue
    return False
