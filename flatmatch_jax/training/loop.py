"""Training from a config: the one long function, read from top to bottom."""

import contextlib
import math
import os
import time
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

import flatmatch_jax
from flatmatch_jax import data as data_lib
from flatmatch_jax.data import augment, resident, splits, streaming
from flatmatch_jax.data.prefetch import Prefetch
from flatmatch_jax.models import pretrained
from flatmatch_jax.run import plots, reference, results, watch
from flatmatch_jax.run.checkpoint import Checkpoints
from flatmatch_jax.run.progress import Progress
from flatmatch_jax.run.workdir import Workdir, as_dict, versions
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
from flatmatch_jax.training import estimate, load
from flatmatch_jax.training import program as program_lib
from flatmatch_jax.types import DatasetInfo, TrainState, UserError

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
  split = choose_split(config, dataset)
  fix_at = step_of_fixing(config, len(split.labeled))

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
    weights = read_weights(config.pretrained, shapes.params)
  write_description(files, config, dataset, split)
  tell_data(config, dataset, split)
  selection = results.selection(len(dataset.test_labels), config.num_val)

  # Devices.
  held_out = evaluation_sets(dataset, split, everywhere)
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
    weights = weights or read_weights(config.pretrained, shapes.params)
    state = start_from(weights, state)
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
  unseen = probe_images(config, held_out)
  images = config.batch_size + config.unlabeled_batch_size * bool(program.views)
  progress = Progress([files], start, config.steps, images)
  timing = estimate.Estimate(config)
  watcher = watch_over(config, dataset, split, notes)
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
          data = add_fixed(config, files, program, dataset, split, state, data)
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


def watch_over(config, dataset, split, notes, name='') -> watch.Watch:
  """A watch that continues where the `notes` of a checkpoint left it."""
  labels, classes = dataset.train_labels, len(dataset.class_names)
  shares = watch.class_shares(labels, split, classes)
  return watch.Watch(config, shares, name, notes.get('watch'))


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


def read_weights(path: str, shapes):
  """The parameters of a file; those that it has not stay shapes."""
  params, report = pretrained.load(os.path.expanduser(path), shapes)
  messages.say(f'{path}: {report.describe()}')
  return params


def start_from(weights, state):
  """The state with weights from a file, in the average too."""
  params = jax.tree.map(
    lambda new, drawn: (
      drawn
      if isinstance(new, jax.ShapeDtypeStruct)
      else sharding.place(new, drawn.sharding)
    ),
    weights,
    state.params,
  )
  return state.replace(params=params, ema_params=jax.tree.map(jnp.copy, params))


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


def step_of_fixing(config, num_labeled: int) -> int:
  """After how many plain steps labels are fixed; 0 where none are.

  Where there are enough labels none are added, and nothing waits for them.
  """
  if 'num_fixed' not in config.recipe_args:
    return 0
  args = config.recipe_args
  if num_labeled >= args.num_fixed:
    return 0
  if not 1 <= args.pretrain_steps < config.steps:
    raise UserError(
      f'config.recipe_args.pretrain_steps={args.pretrain_steps} must be at '
      f'least 1 and below config.steps={config.steps}: labels are fixed then, '
      f'because {num_labeled} are fewer than the {args.num_fixed} of '
      'config.recipe_args.num_fixed.'
    )
  return args.pretrain_steps


def add_fixed(config, files, program, dataset, split, state, data):
  """Fixes the labels of the most confident unlabeled images (Algorithm 2)."""
  if int(state.step) <= config.recipe_args.pretrain_steps:
    (surest,) = program.classify(
      [state.ema_params],
      state.batch_stats,
      dataset.train_images,
      keep=classify_lib.surest,
    )
    confidence, guess = surest.T
    others = np.setdiff1d(np.arange(len(guess)), split.unlabeled)
    chosen = splits.most_confident(
      confidence,
      guess,
      np.union1d(split.labeled, others),
      config.recipe_args.num_fixed,
      dataset.train_labels,
    )
    files.write('fixed.json', chosen)
    messages.say(
      f'Fixed the labels of {len(chosen["index"])} unlabeled images; '
      f'{chosen["accuracy"]}% of them are right.'
    )
  elif not files.has('fixed.json'):
    raise UserError(
      f'{files.path / "fixed.json"} is gone, which has the labels that were '
      f'fixed at step {config.recipe_args.pretrain_steps}: the run cannot go '
      'on as it was. Put the file back, or start in another --workdir.'
    )
  else:
    chosen = files.read('fixed.json')
    classes = len(dataset.class_names)
    if not splits.are_fixed(chosen, len(dataset.train_labels), classes):
      raise UserError(
        f'{files.path / "fixed.json"} is not what this run wrote at step '
        f'{config.recipe_args.pretrain_steps}: it was damaged or changed. Put '
        'back a copy of it, or start in another --workdir.'
      )
  kind = resident if isinstance(data, resident.Resident) else streaming
  return kind.add_fixed(data, chosen['index'], chosen['label'])


def choose_split(config, dataset) -> splits.Split:
  """Which images are labeled, unlabeled, and held out."""
  return splits.make(
    dataset.train_labels,
    len(dataset.class_names),
    config.labels,
    config.split_seed,
    config.labels_file,
    config.imbalance,
    config.unlabeled_imbalance,
    config.num_val,
    config.unlabeled_includes_labeled,
  )


def evaluation_sets(dataset, split, everywhere) -> dict[str, tuple]:
  """Images and labels to evaluate on, by the prefix of their metrics."""
  index = split.validation
  sets = {
    '': (dataset.test_images, dataset.test_labels),
    'val_': (dataset.train_images[index], dataset.train_labels[index]),
  }
  place = lambda images: (
    sharding.place(images, everywhere)
    if isinstance(images, np.ndarray)
    else images
  )
  return {
    prefix: (place(images), labels)
    for prefix, (images, labels) in sets.items()
    if len(labels)
  }


def probe_images(config, sets):
  """A batch of images no step has trained on, and their labels, or None."""
  if not (config.probe_every and sets):
    return None
  images, labels = sets['val_' if 'val_' in sets else '']
  size = min(config.unlabeled_batch_size, len(labels))
  size -= size % config.microbatches
  index = splits.spread(labels, size)
  pixels = augment.normalize(images[index][:], config.mean, config.std)
  return pixels, labels[index]


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


def write_description(files: Workdir, config, dataset, split) -> None:
  """What the run is, for people, for evaluate and for predict."""
  classes = len(dataset.class_names)
  description = {
    'split.json': splits.to_json(
      split,
      dataset.train_labels,
      classes,
      None if config.labels_file else config.split_seed,
      config.labels_file or 'drawn',
    ),
    'dataset.json': {
      'class_names': list(dataset.class_names),
      'image_shape': list(dataset.train_images.shape[1:]),
      'num_train': len(dataset.train_labels),
      'num_unlabeled': len(split.unlabeled),
      'num_test': len(dataset.test_labels),
      'test_share': getattr(dataset.test_images, 'share', 1.0),
      'fingerprint': data_lib.fingerprint(dataset),
    },
  }
  for name, content in description.items():
    if files.has_steps() and files.read(name) != content:
      raise UserError(
        f'{files.path} holds a run on other data: {name} there differs from '
        'what config.data_dir and config.labels_file give now. Use another '
        '--workdir, or the same data to go on.'
      )
  files.write('config.json', as_dict(config))
  for name, content in description.items():
    files.write(name, content)
  if not files.has_steps():
    files.write('versions.json', versions())
  elif changed := files.read('versions.json').items() - versions().items():
    messages.say(
      'The run began with other versions, so it may not go on to the bit: '
      f'{", ".join(" ".join(item) for item in sorted(changed))}.'
    )


def tell_data(config, dataset, split) -> None:
  """What the run is about to see."""
  includes = (
    'stay in' if config.unlabeled_includes_labeled else 'are taken out of'
  )
  labels = dataset.train_labels[split.labeled]
  counts = np.bincount(labels, minlength=len(dataset.class_names)).tolist()
  few, many = min(counts), max(counts)
  per_class = f'{few} a class' if few == many else f'{few} to {many} a class'
  held_out = f'{config.num_val} for validation, ' if config.num_val else ''
  messages.say(
    f'{config.method} on {config.dataset}: {len(split.labeled)} labeled images '
    f'({per_class}), {len(split.unlabeled)} unlabeled, {held_out}'
    f'{len(dataset.test_labels) or "none"} for testing. The labeled images '
    f'{includes} the unlabeled pool.'
  )
  if not results.selection(len(dataset.test_labels), config.num_val):
    messages.say(
      'No errors will be measured: there are no test images, and '
      'config.num_val=0 holds none out.'
    )
