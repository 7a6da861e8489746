"""What a run tells: a bar on a terminal, lines in a log, files for later."""

import datetime
import statistics
import sys
import time

import numpy as np
from tqdm import tqdm

from flatmatch_jax.run.workdir import Workdir
from flatmatch_jax.system import distributed, messages
from flatmatch_jax.system.files import writing


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
      self._bar = tqdm(
        initial=step, total=steps, unit='step', dynamic_ncols=True
      )
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
    messages.say(
      f'step {step}/{self._steps} {" ".join(parts)} '
      f'{speed:.0f} images/s, {eta} left'
    )

  def flush(self) -> None:
    """To be called before a checkpoint: TensorBoard has what it comes after."""
    for workdir, tensorboard in self._writers:
      if tensorboard is not None:
        with writing(workdir.tensorboard):
          tensorboard.flush()

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
        workdir.put_events()


def _tensorboard_writers(workdirs):
  """clu's writers; None, said aloud, where TensorFlow is not installed."""
  if not distributed.is_first():
    return [None] * len(workdirs)
  messages.quiet_tensorflow()
  try:
    from clu import metric_writers  # Loads TensorFlow: seconds.
  except ImportError as error:
    messages.say(f'No TensorBoard events: {error}.')
    return [None] * len(workdirs)
  return [metric_writers.SummaryWriter(str(w.events)) for w in workdirs]
