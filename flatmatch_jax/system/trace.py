"""A trace of a few steps, to look at in TensorBoard or Perfetto."""

import contextlib
import pathlib
from typing import Any

import jax

from flatmatch_jax.system import distributed, messages
from flatmatch_jax.system.files import writing

_BEFORE = 2  # Steps of a start that warm up caches and are not of interest.


class Trace:
  """Traces `steps` steps of a run that has taken `start`; 0 traces none.

  Of several processes the first does. Files go to FOLDER/plugins/profile, and
  people look for them in `shown`, where they are put from there.
  """

  def __init__(
    self, folder: pathlib.Path, start: int, steps: int, shown: pathlib.Path
  ):
    self._folder, self._shown = folder, shown
    if not distributed.is_first():
      steps = 0
    self._first = start + _BEFORE + 1
    self._end = self._first + steps
    self._last = self._first
    self._waits, self._on = steps > 0, False

  def step(self, step: int, pending: Any):
    """A context to dispatch a step in; `pending` are the last step's results.

    They are waited for where the trace begins and ends, so that it holds its
    steps whole, and no others.
    """
    if self._waits and step == self._first:
      jax.block_until_ready(pending)
      with writing(self._folder):
        self._folder.mkdir(parents=True, exist_ok=True)
      jax.profiler.start_trace(str(self._folder))
      self._waits, self._on = False, True
    elif self._on and step == self._end:
      self.close(pending)
    if not self._on:
      return contextlib.nullcontext()
    self._last = step
    return jax.profiler.StepTraceAnnotation('train', step_num=step)

  def close(self, pending: Any) -> None:
    """Ends a trace that is on, and writes it."""
    if self._waits:
      self._waits = False
      messages.say(
        f'Nothing is traced: the first {_BEFORE} steps of a start are not, and '
        f'the run ended before step {self._first}.'
      )
    if not self._on:
      return
    self._on = False
    jax.block_until_ready(pending)
    with writing(self._folder):
      jax.profiler.stop_trace()
    messages.say(
      f'Steps {self._first} to {self._last} are traced: look at '
      f"{self._shown} in TensorBoard's profiler, or at the .json.gz in it in "
      'ui.perfetto.dev.'
    )
