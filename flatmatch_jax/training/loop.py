"""Training from a config: the one long function, read from top to bottom."""

import contextlib
import math
import time
from typing import Any, NoReturn

import jax
import numpy as np

import flatmatch_jax
from flatmatch_jax import data as data_lib
from flatmatch_jax.data import resident, streaming
from flatmatch_jax.data.prefetch import Prefetch
from flatmatch_jax.run import plots, reference, results
from flatmatch_jax.run.checkpoint import Checkpoints
from flatmatch_jax.run.progress import Progress
from flatmatch_jax.run.workdir import Workdir, as_dict
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
from flatmatch_jax.types import DatasetInfo, TrainState

_IMPORT_SECONDS = time.perf_counter() - flatmatch_jax.IMPORT_BEGAN


def train_and_evaluate(config, workdir: str) -> TrainState:
  """Trains to `config.steps` from where `workdir` stands."""
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
    return train_in(files, config)


def train_in(files: Workdir, config) -> TrainState:
  """The run of `config` in its folder, which no other process trains in."""
  began = time.perf_counter()
  startup.use_compilation_cache(config.compilation_cache)
  phases = startup.Phases(_IMPORT_SECONDS)

  # Data.
  with distributed.first_goes_ahead('data'):  # It may download them.
    dataset = data_lib.from_config(config)
  split = setup.choose_split(config, dataset)
  fix_at = fixed_labels.step_of_fixing(config, len(split.labeled))

  # Functions; all that can be refused is, before anything is written.
  mesh = program_lib.make_mesh(config)
  everywhere = sharding.replicated(mesh)
  image_shape = dataset.train_images.shape[1:]
  info = DatasetInfo(
    len(dataset.class_names), len(dataset.train_labels), len(split.unlabeled)
  )
  program = program_lib.create(config, info, image_shape, mesh=mesh)
  key = jax.random.key(config.seed)
  shapes = jax.eval_shape(program.init, key)
  placed = sharding.of_state(mesh, shapes)
  memory.check(config, shapes, image_shape, len(program.views))
  weights = None
  if config.pretrained and not files.has_steps():
    weights = setup.read_weights(config.pretrained, shapes.params)
  setup.write_description(files, config, dataset, split)
  setup.tell_data(config, dataset, split)
  selection = results.selection(len(dataset.test_labels), config.num_val)

  # Devices.
  held_out = setup.evaluation_sets(dataset, split, everywhere)
  over_batch = sharding.over_batch(mesh)
  data: resident.Resident | streaming.Streaming
  if streams := not isinstance(dataset.train_images, np.ndarray):
    data = streaming.place(dataset, split)
  else:
    data = resident.place(dataset, split, everywhere)
    # The one copy; the test images are in `held_out`.
    dataset = dataset._replace(train_images=data.images, test_images=None)
  phases.done('data')
  sample = program_lib.make_sample(config, program.views, over_batch, streams)
  state = sharding.settle(jax.jit(program.init, out_shardings=placed)(key))

  # Where the run stands.
  checkpoints = Checkpoints(files.checkpoints)
  notes: dict = {'seconds': 0.0, 'class_names': list(dataset.class_names)}
  if (found := checkpoints.restore(state)) is not None:
    state, notes = found
    messages.say(f'Going on from step {int(state.step)} of {config.steps}.')
  elif config.pretrained:
    weights = weights or setup.read_weights(config.pretrained, shapes.params)
    state = setup.start_from(weights, state)
  start = int(state.step)
  rows = files.cut_metrics(start)
  least = min(results.history(rows, selection), default=math.inf)
  seconds = lambda: notes['seconds'] + time.perf_counter() - began
  phases.done('state')

  # One compiled function: sample, augment, differentiate, update.
  def compile_step(step_function, given):
    return compile_and_tell(
      lambda state, given: step_function(state, sample(given, state)),
      state,
      given,
      (placed, everywhere),
    )

  look: Any = jax.jit(
    lambda state, given: program.clean_losses(state, sample(given, state))
  )
  probe: Any = jax.jit(
    lambda state, given, held_out: program.probe(
      state, sample(given, state), held_out
    )
  )
  unseen = setup.probe_images(config, held_out)
  images = config.batch_size + config.unlabeled_batch_size * bool(program.views)
  progress = Progress([files], start, config.steps, images)
  timing = estimate.Estimate(config)
  watcher = setup.watch_over(config, dataset, split, notes)
  expected = {}
  if distributed.is_first():
    described = files.read('dataset.json')
    expected = reference.find(as_dict(config), described['fingerprint'])
  trace = Trace(files.tensorboard, start, config.profile_steps)
  phases.done('log')
  feed: Any = None
  train: Any = None
  pending: Any = None
  signal: int | None = None
  try:
    with failures.ending_together(), signals.stop_requests() as request:
      for step in range(start + 1, config.steps + 1):
        if step > fix_at > 0 and data.fixed is None:
          chosen = fixed_labels.choose(
            config, files, program.classify, dataset, split, state
          )
          kind = streaming if streams else resident
          data = kind.add_fixed(data, chosen['index'], chosen['label'])
          if feed is not None:
            feed.close()
          feed = train = None
        if feed is None:
          feed = open_feed(config, program.views, data, step - 1, over_batch)
        given = next(feed)
        if train is None:
          plain = step <= fix_at
          several = f' for {mesh.size} devices' if mesh.size > 1 else ''
          messages.say(f'Compiling the step{several}.')
          train = compile_step(
            program.pretrain_step if plain else program.step, given
          )
          phases.done('compile')
          timing.compiled(step, train, mesh)
          phases.done('estimate')
          if program.clean_losses:
            # Compiled now, not when it is first asked.
            sharding.settle(look(state, given))
          if config.probe_every:
            sharding.settle(probe(state, given, unseen))
          progress.start()
          phases.done('probes')
        last = step == config.steps
        logs = last or step % config.log_every == 0
        row: dict = {}
        if config.probe_every and step % config.probe_every == 0:
          row |= sharding.settle(probe(state, given, unseen))
        elif logs and program.clean_losses:
          losses = sharding.settle(look(state, given))
          row['unlabeled_loss'] = losses.unlabeled
        with trace.step(step, pending):
          state, metrics = sharding.settle(train(state, given))
        if pending is not None:  # The device is at most one step behind.
          watcher.step(step - 1, pending, checkpoints.latest_step)
          timing.step(step - 1)
        pending = metrics
        progress.step()
        if step == start + 1:
          jax.block_until_ready(metrics)
          phases.done('first step')
          phases.tell()
        if logs:
          # The optimizer has not seen the skipped steps.
          updates = step - 1 - metrics['skipped_steps']
          row |= metrics | {'learning_rate': program.schedule(updates)}
          watcher.row(step, row)
        if last or step % config.eval_every == 0:
          row |= evaluate(program.classify, state, held_out)
          reference.compare(expected, step, row.get('error'))
        if row:
          progress.write(step, [row])
          checkpoints.check()
        error = row.get(selection)
        best = error is not None and error <= least
        least = min(least, math.inf if error is None else error)
        signal = request.at_this_step()
        if best or last or signal or step % config.checkpoint_every == 0:
          watcher.look(step, metrics)  # The checkpoint has what it has seen.
          files.sync_metrics()
          now = {'seconds': seconds(), 'watch': watcher.state()}
          checkpoints.save(step, state, notes | now, error)
        if signal:
          break
    speed = progress.images_per_second()
    if isinstance(feed, Prefetch):
      messages.say(f'Waiting for images took {feed.waited:.0f} s of the run.')
  finally:
    with contextlib.ExitStack() as closing:  # From last to first, all of them.
      closing.callback(checkpoints.close)
      if feed is not None:
        closing.callback(feed.close)
      closing.callback(progress.close)
      closing.callback(trace.close, pending)

  if int(state.step) < config.steps:
    stop(signal, int(state.step))
  skipped = int(state.skipped.total)
  if distributed.is_first():
    write_result(
      config,
      files,
      len(split.labeled),
      skipped,
      watcher.warnings,
      seconds(),
      speed,
    )
  if signal:  # It came in the last step; a sweep has others to train.
    stop(signal, config.steps)
  return state


def stop(signal: int | None, step: int) -> NoReturn:
  """Ends the process as one that was asked to stop."""
  messages.say(
    f'Stopped by signal {signal}; step {step} is saved. '
    'The same command goes on from there.'
  )
  raise SystemExit(128 + (signal or 0))


def write_result(
  config, files: Workdir, num_labeled, skipped, warnings, seconds, speed
) -> None:
  """What came out, in numbers and as a picture."""
  images = files.read('dataset.json')['fingerprint']
  # The result comes last: with it the run is done.
  with writing(files.path):
    plots.curves(
      files.metrics(),
      f'{config.method} on {config.dataset}, {num_labeled} labels',
      files.path / 'curves.png',
      reference.find(as_dict(config), images),
    )
  files.write(
    'result.json',
    results.summarize(
      config, files, num_labeled, skipped, warnings, seconds, speed
    ),
  )
  messages.say(results.describe(files))


def open_feed(config, views, data, start, over_batch):
  """Gives what the compiled step takes, from the step after `start` on."""
  if isinstance(data, resident.Resident):
    return resident.feed(data)
  source = streaming.batches(
    data,
    config.seed,
    start,
    config.steps,
    config.batch_size,
    config.unlabeled_batch_size,
    views,
    rows=lambda size: sharding.local_rows(over_batch, size),
  )
  return Prefetch(source, over_batch)


def compile_and_tell(function, state, given, shardings):
  """Compiles a step that overwrites its state and leaves it where it was."""
  began = time.perf_counter()
  jitted = jax.jit(function, donate_argnums=0, out_shardings=shardings)
  compiled = jitted.lower(state, given).compile()
  messages.say(
    f'Step compiled in {time.perf_counter() - began:.1f} s: '
    f'{estimate.flops_of(compiled) / 1e9:.2f} GFLOP'
    f'{" per device" * (jax.device_count() > 1)}.'
  )
  return compiled


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
