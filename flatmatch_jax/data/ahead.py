"""Work of threads that is begun before its turn."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from flatmatch_jax.system import startup

T = TypeVar('T')
Begin = Callable[[int, Callable[..., Future]], tuple[T, list[Future]]]


def in_turns(
  begin: Begin[T], numbers: Iterable[int]
) -> Generator[T, None, None]:
  """Yields what `begin(number, submit)` gives, once its futures are done.

  `submit` hands a call to a thread for each core. While one result is in use,
  the next is made. The first error of a call is raised in its result's turn.
  """
  pool = ThreadPoolExecutor(startup.cores(), 'images')
  waiting: deque[tuple[T, list[Future]]] = deque()

  def finished():
    result, futures = waiting.popleft()
    for future in futures:
      future.result()
    return result

  try:
    for number in numbers:
      waiting.append(begin(number, pool.submit))
      if len(waiting) > 1:
        yield finished()
    while waiting:
      yield finished()
  finally:
    pool.shutdown(cancel_futures=True)
