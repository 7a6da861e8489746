"""What a run tells: a bar on a terminal, lines in a log, files for later."""

from collections.abc import Sequence
import contextlib
import datetime
import os
import statistics
import sys
import time

import numpy as np
from tqdm import tqdm

from flatmatch_jax import distributed
from flatmatch_jax.workdir import Workdir, writing

SHOWN = 10  # Names in a list; the rest is a number.


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


def _make_bar(step: int, steps: int) -> tqdm:
  """A bar whose times are right when somebody sets the clock."""
  bar = tqdm(initial=step, total=steps, unit='step', dynamic_ncols=True)
  bar._time = time.monotonic
  bar.start_t = bar.last_print_t = time.monotonic()
  return bar


class Progress:
  """Writes each interval's metrics where people and programs look for them.

  metrics.jsonl holds what a run computes and nothing of how long it took, so
  that two runs of one config have equal files; speed goes to the screen, to
  TensorBoard and to result.json.
  """

  def __init__(
    self, workdirs: list[Workdir], step: int, steps: int, images: int
  ):
    """`step` of `steps` are done; each takes `images` images of a run.

    Runs that train side by side have a workdir each.
    """
    self._steps, self._images = steps, images
    self.runs = len(workdirs)  # That go on; the loop takes others out.
    self._seen = 0  # Images.
    self._writers = list(
      zip(workdirs, _tensorboard_writers(workdirs), strict=True)
    )
    self._bar = None
    self._shown: dict[str, float] = {}
    if sys.stderr.isatty() and distributed.is_first():
      self._bar = _make_bar(step, steps)
    self.start()

  def start(self) -> None:
    """Speed is measured from here: compilation is over."""
    self._last = self._start = (self._seen, time.perf_counter())

  def step(self) -> None:
    self._seen += self.runs * self._images
    if self._bar is not None:
      self._bar.update()

  def write(self, step: int, rows: list[dict]) -> None:
    """Records each run's row of metrics, if not empty; shows their means.

    Arrays go to metrics.jsonl only.
    """
    speed = self.images_per_second(self._last)
    self._last = (self._seen, time.perf_counter())
    finite: dict[str, list[float]] = {}
    for (workdir, tensorboard), row in zip(self._writers, rows, strict=True):
      if not row:
        continue
      row = {'step': step} | {
        key: np.asarray(value).tolist() for key, value in row.items()
      }
      workdir.append_metrics(row)
      scalars = {
        key: value
        for key, value in row.items()
        if isinstance(value, float) and np.isfinite(value)
      }
      if tensorboard is not None:
        with writing(workdir.tensorboard):
          tensorboard.write_scalars(
            step, scalars | {'images_per_second': speed}
          )
      for key, value in scalars.items():
        finite.setdefault(key, []).append(value)
    means = {key: statistics.fmean(values) for key, values in finite.items()}
    self._show(step, means, speed)

  def _show(self, step, scalars, speed):
    shown = {
      'loss': scalars.get('labeled_loss'),
      'unlabeled': scalars.get('unlabeled_loss'),
      'used': scalars.get('used_fraction'),
      'error%': scalars.get('error'),
      'validation%': scalars.get('val_error'),
    }
    shown = {k: v for k, v in shown.items() if v is not None}
    if self._bar is not None:
      self._shown |= shown  # An error stays in sight until the next.
      parts = [f'{k} {v:.3f}' for k, v in self._shown.items()]
      self._bar.set_postfix_str(' '.join([*parts, f'{speed:.0f} images/s']))
      return
    parts = [f'{k} {v:.3f}' for k, v in shown.items()]
    images = (self._steps - step) * self.runs * self._images
    left = images / speed if speed else 0
    eta = datetime.timedelta(seconds=round(left))
    say(
      f'step {step}/{self._steps} {" ".join(parts)} '
      f'{speed:.0f} images/s, {eta} left'
    )

  def images_per_second(self, since=None) -> float:
    """Training images a second since (images, time), or since the start."""
    before, began = since or self._start
    seconds = time.perf_counter() - began
    return (self._seen - before) / seconds if seconds > 0 else 0.0

  def close(self) -> None:
    if self._bar is not None:
      self._bar.close()
    for workdir, tensorboard in self._writers:
      if tensorboard is not None:
        with writing(workdir.tensorboard):
          tensorboard.close()


def quiet_tensorflow() -> None:
  """To be called before its import, which else tells of the CPU it found.

  Here it reads and writes files: oneDNN, whose use it announces, has no part.
  """
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')  # Errors only.
  os.environ.setdefault('TF_ENABLE_ONEDNN_OPTS', '0')


def _tensorboard_writers(workdirs):
  """clu's writers; None, said aloud, where TensorFlow is not installed."""
  if not distributed.is_first():
    return [None] * len(workdirs)
  quiet_tensorflow()
  try:
    from clu import metric_writers  # Loads TensorFlow: seconds.
  except ImportError as error:
    say(f'No TensorBoard events: {error}.')
    return [None] * len(workdirs)
  return [metric_writers.SummaryWriter(str(w.tensorboard)) for w in workdirs]
