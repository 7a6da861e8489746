"""Lines for people: what is said, and how much of it."""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import logging
import os
import sys
import time
import types
import warnings

from absl import logging as absl_logging
from tqdm import tqdm

from flatmatch_jax.system import distributed

SHOWN = 10  # Names in a list; the rest is a number.

_EVERY = 30.0  # Seconds between lines where there is no bar.


def say(text: str) -> None:
  """One line on standard error, above the progress bar if there is one.

  Nothing where nobody reads it any more: a run goes on without its log.
  """
  if not distributed.is_first():
    return
  line = f'[{time.strftime("%H:%M:%S")}] {printable(text)}'
  with contextlib.suppress(BrokenPipeError):
    tqdm.write(line, file=sys.stderr)


def printable(text: str) -> str:
  """With escapes for what would steer a terminal: names come from anywhere."""
  return ''.join(
    c if c.isprintable() else c.encode('unicode_escape').decode() for c in text
  )


def some(names: Sequence[str]) -> str:
  """The first few, and how many more."""
  text = ', '.join(names[:SHOWN]) or 'nothing'
  more = len(names) - SHOWN
  return f'{text} and {more} more' if more > 0 else text


@contextlib.contextmanager
def errors_only(name: str) -> Iterator[None]:
  """Hides what a library warns itself of in its logger, such as what it does
  not need, or its own deprecated calls."""
  logger = logging.getLogger(name)
  level = logger.level
  # Under absl's `app.run` that is the root's, by which we silence Orbax.
  logger.setLevel(max(logger.getEffectiveLevel(), logging.ERROR))
  try:
    yield
  finally:
    logger.setLevel(level)


def count(number: int, noun: str) -> str:
  """'1 image', '2,000 images', '3 classes'."""
  ending = 'es' if noun.endswith('s') else 's'
  return f'{number:,} {noun}{ending if number != 1 else ""}'


@contextlib.contextmanager
def progress(title: str, total: int, done: int = 0) -> Iterator[Callable]:
  """Yields a function to call after each of `total` images.

  A terminal shows a bar; a log gets a line every half minute.
  """
  if sys.stderr.isatty() and distributed.is_first():
    with tqdm(
      total=total, initial=done, desc=title, unit='image', dynamic_ncols=True
    ) as bar:
      yield bar.update
    return
  first, began = done, time.monotonic()
  last = began

  def advance():
    nonlocal done, last
    done += 1
    now = time.monotonic()
    if now - last >= _EVERY and done < total:
      last = now
      left = (now - began) / (done - first) * (total - done)
      say(
        f'{title}: {done:,} of {count(total, "image")}, about '
        f'{tqdm.format_interval(left)} left.'
      )

  yield advance


def quiet_tensorflow() -> None:
  """To be called before its import, which else tells of the CPU it found.

  Here it reads and writes files: oneDNN, whose use it announces, has no part.
  """
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')  # Errors only.
  os.environ.setdefault('TF_ENABLE_ONEDNN_OPTS', '0')


def quiet_orbax() -> None:
  """For a process of our own: silences what Orbax prints beside its errors.

  It logs each decision as a warning and, with a traceback, each error that it
  also raises. At the first file that cannot be read or written it abandons
  coroutines, which would print pages after the one line that counts.
  """
  absl_logging.set_verbosity(absl_logging.FATAL)
  warnings.filterwarnings('ignore', message='coroutine .* was never awaited')
  hook = sys.unraisablehook

  def unless_abandoned(unraisable):
    closed = str(unraisable.exc_value) == 'Event loop is closed'
    if not closed and not isinstance(unraisable.object, types.CoroutineType):
      hook(unraisable)

  sys.unraisablehook = unless_abandoned
