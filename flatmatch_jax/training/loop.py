"""Training: one loop, read from top to bottom, for one run or for several."""

from collections.abc import Callable
import contextlib
import functools
import math
import time
from typing import Any, NoReturn

import jax
import numpy as np

import flatmatch_jax
from flatmatch_jax import data as data_lib
from flatmatch_jax.run import plots, reference, results, watch
from flatmatch_jax.run.progress import Progress
from flatmatch_jax.run.workdir import Workdir
from flatmatch_jax.system import (
  distributed,
  failures,
  memory,
  messages,
  sharding,
  signals,
  startup,
)
from flatmatch_jax.system.files import writing
from flatmatch_jax.system.trace import Trace
from flatmatch_jax.training import classify as classify_lib
from flatmatch_jax.training import config as config_lib
from flatmatch_jax.training import estimate, fixed_labels, load, setup
from flatmatch_jax.training import program as program_lib
from flatmatch_jax.training.engine import Engine, Single
from flatmatch_jax.training.setup import Run
from flatmatch_jax.types import TrainState

_IMPORT_SECONDS = time.perf_counter() - flatmatch_jax.IMPORT_BEGAN


def train_and_evaluate(
  config, workdir: str, prepare: Callable[[], None] = lambda: None
) -> TrainState:
  """Trains to `config.steps` from where `workdir` stands.

  `prepare` is called before, when no other process trains there.
  """
  config_lib.check(config)
  config_lib.check_loops(config)
  files = Workdir(workdir)
  if distributed.is_first():
    files.check_config(config)
  with writing(files.path):
    distributed.check_shared(files.path)
  if files.has('result.json'):
    messages.say(f'Finished before. {results.describe(files)}')
    return load.load_run(files).state
  first = distributed.is_first()  # It holds the lock for all.
  with files.lock() if first else contextlib.nullcontext():
    if first:
      prepare()
    return train_in(files, config)


def train_in(files: Workdir, config) -> TrainState:
  """The run of `config` in its folder, which no other process trains in."""
  phases = startup.Phases(_IMPORT_SECONDS)
  startup.use_compilation_cache(config.compilation_cache)
  run, engine, state = set_up(files, config, phases)
  return train([run], engine, state, phases)


def set_up(files: Workdir, config, phases) -> tuple[Run, Single, TrainState]:
  """Turns a config into a run: its data, its functions and its state."""
  with distributed.first_goes_ahead('data'):  # It may download them.
    dataset = data_lib.from_config(config)
  split = setup.choose_split(config, dataset)
  fix_at = fixed_labels.step_of_fixing(config, len(split.labeled))

  # Functions. All that can be refused is, before anything is written.
  image_shape = dataset.train_images.shape[1:]
  info = setup.info_of(dataset, split)
  program = program_lib.create(config, info, image_shape)
  key = jax.random.key(config.seed)
  shapes = jax.eval_shape(program.init, key)
  placed = sharding.of_state(program.mesh, shapes)
  memory.check(config, shapes, image_shape, program.views)
  weights = None
  if config.pretrained and not files.has_steps():
    weights = setup.read_weights(config.pretrained, shapes)
  setup.write_description(files, config, dataset, split)
  setup.tell_data(config, dataset, split)

  # Data, on the devices or streamed to them.
  everywhere = sharding.replicated(program.mesh)
  pipeline = data_lib.pipeline_of(dataset)
  held_out = setup.evaluation_sets(dataset, split, everywhere)
  data = pipeline.place(dataset, split, everywhere)
  # The one copy; the test images are in `held_out`.
  dataset = dataset._replace(train_images=data.images, test_images=None)
  phases.done('data')

  # Where the run stands.
  state = sharding.settle(jax.jit(program.init, out_shardings=placed)(key))
  run, state = setup.open_run(
    config, files, dataset, split, held_out, state, weights
  )
  if step := int(state.step):
    messages.say(f'Resuming from step {step} of {config.steps}.')
  phases.done('state')
  choose_fixed = functools.partial(
    fixed_labels.choose, config, files, program.classify, dataset, split
  )
  engine = Single(config, program, placed, pipeline, data, fix_at, choose_fixed)
  return run, engine, state


def train(runs: list[Run], engine: Engine, state, phases: startup.Phases):
  """Takes the steps that `runs` have left, which all stand at the same one.

  Their configs differ in seeds and in numbers. Returns the last state.
  """
  config, selection = runs[0].config, runs[0].selection
  start = step = int(np.ravel(state.step)[0])
  history = [
    results.history(run.files.cut_metrics(start), selection) for run in runs
  ]
  least = [min(errors, default=math.inf) for errors in history]
  live = list(range(len(runs)))  # A member of a sweep that breaks stops alone.
  images = config.batch_size
  if engine.program.views:
    images += config.unlabeled_batch_size
  timing = estimate.Estimate(config)
  pending: Any = None  # Metrics of the step before.
  signal: int | None = None

  with contextlib.ExitStack() as closing:  # From last to first, all of them.
    for run in runs:
      closing.callback(run.checkpoints.close)
    closing.callback(engine.close)
    workdirs = [run.files for run in runs]
    progress = Progress(workdirs, start, config.steps, images)
    closing.callback(progress.close)
    place = workdirs[0]
    trace = Trace(
      place.events, start, config.profile_steps, shown=place.tensorboard
    )
    closing.callback(lambda: trace.close(pending))
    phases.done('log')

    with failures.ending_together(), signals.stop_requests() as request:
      for step in range(start + 1, config.steps + 1):
        last = step == config.steps
        logs = last or step % config.log_every == 0
        evaluates = last or step % config.eval_every == 0
        probes = config.probe_every and step % config.probe_every == 0

        if engine.prepare(step, state):
          phases.done('compile')
          # Compiled now, not when they are first called.
          due = probes_are_due(config, step)
          if due or engine.program.clean_losses:
            messages.say('Compiling the measurements.')
          sharding.settle(engine.look(state, 0))
          if due:
            sharding.settle(engine.probe(state, 0, runs[0].unseen))
          phases.done('compile measurements')
          timing.compiled(step, engine, state)
          progress.start()
          phases.done('estimate')

        rows: list[dict] = [{} for _ in runs]
        for i in live:
          if probes:
            rows[i] |= sharding.settle(engine.probe(state, i, runs[i].unseen))
          elif logs:
            rows[i] |= sharding.settle(engine.look(state, i))
        with trace.step(step, pending):
          state, metrics = sharding.settle(engine.step(state))
        if pending is not None:  # The device is at most one step behind.
          live = still_live(live, runs, engine, step - 1, pending)
          timing.step(step - 1)
        if not live:
          signal = request.signal
          break
        pending = metrics
        progress.runs = len(live)
        progress.step()
        if step == start + 1:
          jax.block_until_ready(metrics)
          phases.done('first step')
          phases.tell()

        for i in live:
          if logs:
            rows[i] |= engine.row(metrics, i, step)
            if not runs[i].has_truth:
              rows[i].pop('pseudo_label_accuracy', None)
            runs[i].watcher.row(step, rows[i])
          if evaluates:
            member = engine.member(state, i)
            rows[i] |= evaluate(
              engine.program.classify, member, runs[i].held_out
            )
            error = rows[i].get('error')
            reference.compare(runs[i].expected, step, error, runs[i].name)
        rows = [row if i in live else {} for i, row in enumerate(rows)]
        if any(rows):
          progress.write(step, rows)
          for run in runs:
            run.checkpoints.check()

        errors = [row.get(selection) for row in rows]
        best = lower(least, errors)
        signal = request.at_this_step()
        if best or last or signal or step % config.checkpoint_every == 0:
          progress.flush()
          for i in live:  # All together, so that they resume together.
            member, found = engine.member(state, i), engine.metrics(metrics, i)
            seconds = phases.seconds() / len(runs)
            save(runs[i], step, member, found, seconds, errors[i])
        if signal:
          break
    speed = progress.images_per_second()
    if engine.waited:
      messages.say(f'Waiting for images took {engine.waited:.0f} s of the run.')

  if signal and step < config.steps:
    # Members that stopped before may have saved less, or nothing.
    stop(signal, max(run.checkpoints.latest_step() or 0 for run in runs))
  skipped = np.ravel(state.skipped.total)
  seconds = phases.seconds() / len(runs)
  for i in live:
    finish(runs[i], int(skipped[i]), seconds, speed)
  if signal:  # It came in the last step; a sweep has others to train.
    stop(signal, config.steps)
  return state


def probes_are_due(config, step: int) -> bool:
  """Whether a run measures sharpness at `step` or later."""
  every = config.probe_every
  return every > 0 and config.steps // every > (step - 1) // every


def still_live(live, runs, engine, step, metrics) -> list[int]:
  """Which runs may continue after `step`; names the others.

  A run by itself raises NotFiniteError instead.
  """
  in_a_row = np.ravel(metrics['skipped_in_a_row'])
  left = []
  for i in live:
    run = runs[i]
    try:
      if in_a_row[i] or run.watcher.looks_at(step):
        found = engine.metrics(metrics, i)
        run.watcher.step(step, found, run.checkpoints.latest_step)
      left.append(i)
    except watch.NotFiniteError as error:
      if not run.name:
        raise
      messages.say(f'{run.name}: {error}')
  return left


def lower(least: list[float], errors: list[float | None]) -> bool:
  """Enters `errors` into the `least` ones; whether any is one of them."""
  found = [math.inf if error is None else error for error in errors]
  pairs = zip(found, least, strict=True)
  low = any(error <= old and error < math.inf for error, old in pairs)
  least[:] = map(min, found, least)
  return low


def save(run: Run, step, state, metrics, seconds, error) -> None:
  """Starts to save a checkpoint; its rows of metrics are on disk before it."""
  run.watcher.look(step, metrics)  # The checkpoint has what it has seen.
  run.files.sync_metrics()
  now = {
    'seconds': run.notes['seconds'] + seconds,
    'watch': run.watcher.state(),
  }
  run.checkpoints.save(step, state, run.notes | now, error)


def finish(run: Run, skipped: int, seconds: float, speed: float) -> None:
  """Writes what came out, in numbers and as a picture."""
  if not distributed.is_first():
    return
  config, files = run.config, run.files
  # The result comes last: with it the run is done.
  with writing(files.path):
    plots.curves(
      files.metrics(),
      f'{config.method} on {config.dataset}, {run.num_labeled} labels',
      files.path / 'curves.png',
      run.expected,
    )
  result = results.summarize(
    config,
    files,
    run.num_labeled,
    skipped,
    run.watcher.warnings,
    run.notes['seconds'] + seconds,
    speed,
  )
  files.write('result.json', result)
  messages.say(results.describe(files))


def stop(signal: int, step: int) -> NoReturn:
  """Ends the process as one that was asked to stop."""
  messages.say(
    f'Stopped by signal {signal}; step {step} is saved. '
    'The same command resumes from there.'
  )
  raise SystemExit(128 + signal)


def evaluate(classify, state, sets) -> dict[str, float]:
  """The scalars of the reports on all `sets`."""
  row: dict[str, float] = {}
  for prefix, (images, labels) in sets.items():
    found = classify_lib.evaluate(classify, state, images, labels)
    row |= {
      prefix + key: value
      for key, value in found.items()
      if isinstance(value, float)
    }
  return row
