"""How runs take their steps: one run by itself, on all devices."""

from collections.abc import Callable
import time
from typing import Any

import jax

from flatmatch_jax.data.pipeline import Data, Feed, Pipeline
from flatmatch_jax.system import messages, sharding
from flatmatch_jax.training import estimate
from flatmatch_jax.training import program as program_lib
from flatmatch_jax.training.program import Program
from flatmatch_jax.types import TrainState


class Engine:
  """Takes steps with the `state` of one run, or of several that it stacks.

  Runs are told apart by their number, which is 0 for one by itself.
  """

  program: Program
  compiled: Any = None  # The step, for estimates of its time.
  _given: Any = None  # What the step takes beside the state.
  _look: Any = None  # Functions of the state of one run, and what it is given.
  _probe: Any

  @property
  def waited(self) -> float:
    """Seconds for which images were waited for."""
    return 0.0

  def prepare(self, step: int, state) -> bool:
    """Fetches what `step` needs; whether a newly compiled function takes it."""
    raise NotImplementedError

  def step(self, state) -> tuple[Any, dict]:
    """The state after a step, and the metrics of all runs."""
    return self.compiled(state, self._given)

  def look(self, state, run: int) -> dict:
    """The unlabeled loss at θ, unless the step measures it itself."""
    if self._look is None:
      return {}
    losses = self._look(self.member(state, run), self.given(run))
    return {'unlabeled_loss': losses.unlabeled}

  def probe(self, state, run: int, unseen) -> dict:
    """What `step/probe.py` measures, on images no step has trained on."""
    return self._probe(self.member(state, run), self.given(run), unseen)

  def given(self, run: int) -> Any:
    """What the step takes for one run."""
    del run
    return self._given

  def member(self, state, run: int) -> TrainState:
    """The state of one run."""
    del run
    return state

  def metrics(self, metrics: dict, run: int) -> dict:
    """The metrics of one run."""
    del run
    return metrics

  def row(self, metrics: dict, run: int, step: int) -> dict:
    """The same with the learning rate, for the log."""
    raise NotImplementedError

  def close(self) -> None:
    """Stops reading images ahead."""


class Single(Engine):
  """One run; a batch is spread over the mesh."""

  def __init__(
    self,
    config,
    program: Program,
    placed,
    pipeline: Pipeline,
    data: Data,
    fix_at: int,
    choose_fixed: Callable[[TrainState], dict],
  ):
    """`placed` are the shardings of the state.

    After `fix_at` steps, if that is not 0, `choose_fixed` labels more images.
    """
    self.program = program
    self._config, self._placed = config, placed
    self._pipeline, self._data = pipeline, data
    self._over_batch = sharding.over_batch(program.mesh)
    self._sample = program_lib.make_sample(
      config, program.views, self._over_batch, pipeline
    )
    self._fix_at, self._choose_fixed = fix_at, choose_fixed
    self._feed: Feed | None = None
    if program.clean_losses:
      self._look = jax.jit(self._with_sampling(program.clean_losses))
    self._probe = jax.jit(self._with_sampling(program.probe))

  def _with_sampling(self, function):
    """A function of the state and a batch, as one of what a feed gives."""
    return lambda state, given, *more: function(
      state, self._sample(given, state), *more
    )

  def prepare(self, step: int, state: TrainState) -> bool:
    if step > self._fix_at > 0 and self._data.fixed is None:
      chosen = self._choose_fixed(state)
      self._data = self._pipeline.add_fixed(
        self._data, chosen['index'], chosen['label']
      )
      self.close()
      self._feed = self.compiled = None
    if self._feed is None:
      views, over_batch = self.program.views, self._over_batch
      self._feed = self._pipeline.feed(
        self._config, views, self._data, step - 1, over_batch
      )
    self._given = next(self._feed)
    if self.compiled is not None:
      return False
    plain = self.program.pretrain_step if step <= self._fix_at else None
    # One compiled function: sample, augment, differentiate, update.
    self.compiled = compile_step(
      self._with_sampling(plain or self.program.step),
      state,
      self._given,
      (self._placed, sharding.replicated(self.program.mesh)),
    )
    return True

  def row(self, metrics: dict, run: int, step: int) -> dict:
    del run
    # The optimizer has not seen the skipped steps.
    updates = step - 1 - metrics['skipped_steps']
    return metrics | {'learning_rate': self.program.schedule(updates)}

  @property
  def waited(self) -> float:
    return 0.0 if self._feed is None else self._feed.waited

  def close(self) -> None:
    if self._feed is not None:
      self._feed.close()


def compile_step(function, state, given, shardings):
  """Compiles a step that overwrites its state and leaves it where it was."""
  devices = jax.device_count()
  several = f' for {devices} devices' if devices > 1 else ''
  messages.say(f'Compiling the step{several}.')
  began = time.perf_counter()
  jitted = jax.jit(function, donate_argnums=0, out_shardings=shardings)
  compiled = jitted.lower(state, given).compile()
  per_device = ' per device' if devices > 1 else ''
  messages.say(
    f'Step compiled in {time.perf_counter() - began:.1f} s: '
    f'{estimate.flops_of(compiled) / 1e9:.2f} GFLOP{per_device}.'
  )
  return compiled
