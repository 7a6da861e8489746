"""Training from a config: the one long function, read from top to bottom."""

import time
from typing import Any

import jax

from flatmatch_jax import classify as classify_lib
from flatmatch_jax import config as config_lib
from flatmatch_jax import data as data_lib
from flatmatch_jax import interrupt, logging, plots, results, sharding
from flatmatch_jax import program as program_lib
from flatmatch_jax.checkpoint import Checkpoints
from flatmatch_jax.data import resident, splits
from flatmatch_jax.types import DatasetInfo, TrainState, UserError
from flatmatch_jax.workdir import Workdir, as_dict, versions


def train_and_evaluate(config, workdir: str) -> TrainState:
  """Trains to `config.steps` from where `workdir` stands."""
  began = time.perf_counter()
  config_lib.check(config)
  files = Workdir(workdir)
  files.check_config(config)
  if files.has('result.json'):
    logging.say(f'Finished before. {results.describe(files)}')
    return program_lib.load_run(files).state

  # Data.
  dataset = data_lib.load(config.dataset, config.data_dir)
  labeled = choose_labeled(config, dataset)
  write_description(files, config, dataset, labeled)

  # Devices and functions.
  mesh = sharding.make_mesh()
  everywhere = sharding.replicated(mesh)
  data = resident.place(
    dataset, labeled, config.unlabeled_includes_labeled, everywhere
  )
  test_images = jax.device_put(dataset.test_images, everywhere)
  info = DatasetInfo(
    len(dataset.class_names), len(dataset.train_images), len(data.unlabeled)
  )
  program = program_lib.create(config, info, dataset.train_images.shape[1:])
  sample = program_lib.make_sample(
    config, program.views, sharding.over_batch(mesh)
  )
  init = jax.jit(program.init, out_shardings=everywhere)
  state = init(jax.random.key(config.seed))

  # Where the run stands.
  checkpoints = Checkpoints(files.checkpoints)
  seconds_before = 0.0
  if (at := checkpoints.latest_step()) is not None:
    state, seconds_before = checkpoints.restore(at, state)
    logging.say(f'Going on from step {at} of {config.steps}.')
  start = int(state.step)
  files.cut_metrics(start)
  seconds = lambda: seconds_before + time.perf_counter() - began

  # One compiled function: sample, augment, differentiate, update.
  def compile_step(step_function):
    return compile_and_tell(
      lambda state, data: step_function(state, sample(data, state)),
      state,
      data,
      everywhere,
    )

  look = jax.jit(
    lambda state, data: program.clean_losses(state, sample(data, state))
  )
  fix_at = step_of_fixing(config, len(labeled))
  train: Any = None
  if start < fix_at:
    train = compile_step(program.pretrain_step)
  images = config.batch_size + config.unlabeled_batch_size * bool(program.views)
  progress = logging.Progress(files, start, config.steps, images)

  pending = None
  with interrupt.stop_requests() as request:
    for step in range(start + 1, config.steps + 1):
      if step > fix_at and (train is None or step == fix_at + 1):
        if fix_at:
          data = add_fixed(
            config, files, program, dataset, labeled, state, data
          )
        train = compile_step(program.step)
      if step == start + 1:
        progress.start(start)
      last = step == config.steps
      logs = last or step % config.log_every == 0
      row = {}
      if logs and program.clean_losses:
        row['unlabeled_loss'] = look(state, data).unlabeled
      state, metrics = train(state, data)
      if pending is not None:  # The device is at most one step behind.
        pending.block_until_ready()
      pending = metrics['labeled_loss']
      progress.step()
      if logs:
        row |= metrics | {'learning_rate': program.schedule(step - 1)}
      if last or step % config.eval_every == 0:
        row |= classify_lib.errors(
          program.classify, state, test_images, dataset.test_labels
        )
      if row:
        progress.write(step, row)
      error = row.get('error')
      best = error is not None and error <= min(results.test_errors(files))
      if best or last or request.signal or step % config.checkpoint_every == 0:
        checkpoints.save(step, state, seconds(), error)
      if request.signal:
        break
    speed = progress.images_per_second(int(state.step))
    progress.close()
    checkpoints.close()

  if int(state.step) < config.steps:
    logging.say(
      f'Stopped by signal {request.signal}; step {int(state.step)} is saved. '
      'The same command goes on from there.'
    )
    raise SystemExit(128 + (request.signal or 0))
  result = results.summarize(config, files, labeled, seconds(), speed)
  files.write('result.json', result)
  plots.curves(
    files.metrics(),
    f'{config.method} on {config.dataset}, {len(labeled)} labels',
    files.path / 'curves.png',
  )
  logging.say(results.describe(files))
  return state


def compile_and_tell(function, state, data, sharding):
  """Compiles a step that overwrites its state and leaves it where it was."""
  began = time.perf_counter()
  jitted = jax.jit(function, donate_argnums=0, out_shardings=sharding)
  compiled = jitted.lower(state, data).compile()
  flops = (compiled.cost_analysis() or {}).get('flops', float('nan'))
  logging.say(
    f'Step compiled in {time.perf_counter() - began:.1f} s: '
    f'{flops / 1e9:.2f} GFLOP.'
  )
  return compiled


def step_of_fixing(config, num_labeled: int) -> int:
  """After how many plain steps labels are fixed; 0 where none are.

  Where there are enough labels none are added, and nothing waits for them.
  """
  if 'num_fixed' not in config.recipe_args:
    return 0
  enough = num_labeled >= config.recipe_args.num_fixed
  return 0 if enough else config.recipe_args.pretrain_steps


def add_fixed(config, files, program, dataset, labeled, state, data):
  """Fixes the labels of the most confident unlabeled images (Algorithm 2)."""
  if int(state.step) > config.recipe_args.pretrain_steps:
    chosen = files.read('fixed.json')
  else:
    probs = program.classify(
      state.ema_params, state.batch_stats, dataset.train_images
    )
    chosen = splits.most_confident(
      probs, labeled, config.recipe_args.num_fixed, dataset.train_labels
    )
    files.write('fixed.json', chosen)
    logging.say(
      f'Fixed the labels of {len(chosen["index"])} unlabeled images; '
      f'{chosen["accuracy"]}% of them are right.'
    )
  return resident.add_fixed(data, chosen['index'], chosen['label'])


def choose_labeled(config, dataset):
  """Indices of the labeled images: drawn, or read from a file."""
  classes = len(dataset.class_names)
  if config.labels_file:
    labeled = splits.read(config.labels_file, dataset.train_labels, classes)
  else:
    labeled = splits.balanced(
      dataset.train_labels, config.labels, config.split_seed, classes
    )
  if not config.unlabeled_includes_labeled and len(labeled) == len(
    dataset.train_images
  ):
    raise UserError(
      f'All {len(labeled)} images are labeled, and with '
      'config.unlabeled_includes_labeled=False none is left in the unlabeled '
      'pool; set it to true, or take fewer labels.'
    )
  return labeled


def write_description(files: Workdir, config, dataset, labeled) -> None:
  """What the run is, for people, for evaluate and for predict."""
  pool = len(dataset.train_images)
  if not config.unlabeled_includes_labeled:
    pool -= len(labeled)
  description = {
    'split.json': splits.to_json(
      labeled,
      dataset.train_labels,
      len(dataset.class_names),
      None if config.labels_file else config.split_seed,
      config.labels_file or 'drawn',
    ),
    'dataset.json': {
      'class_names': list(dataset.class_names),
      'image_shape': list(dataset.train_images.shape[1:]),
      'num_train': len(dataset.train_images),
      'num_unlabeled': pool,
      'num_test': len(dataset.test_images),
    },
  }
  for name, content in description.items():
    if files.has(name) and files.read(name) != content:
      raise UserError(
        f'{files.path} holds a run on other data: {name} there differs from '
        'what config.data_dir and config.labels_file give now. Use another '
        '--workdir, or the same data to go on.'
      )
  files.write('config.json', as_dict(config))
  files.write('versions.json', versions())
  for name, content in description.items():
    files.write(name, content)
  includes = (
    'stay in' if config.unlabeled_includes_labeled else 'are taken out of'
  )
  logging.say(
    f'{config.method} on {config.dataset}: {len(labeled)} labeled images, '
    f'{pool} unlabeled, {len(dataset.test_images)} for testing. The labeled '
    f'images {includes} the unlabeled pool.'
  )
