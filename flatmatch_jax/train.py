"""Training from a config: the one long function, read from top to bottom."""

import functools
import statistics
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from flatmatch_jax import classify as classify_lib
from flatmatch_jax import config as config_lib
from flatmatch_jax import data as data_lib
from flatmatch_jax import (
  forward,
  interrupt,
  logging,
  methods,
  models,
  optimizer,
  recipes,
  sharding,
  train_step,
)
from flatmatch_jax.checkpoint import Checkpoints
from flatmatch_jax.data import resident, splits
from flatmatch_jax.types import DatasetInfo, TrainState
from flatmatch_jax.workdir import Workdir, as_dict, versions


class Program(NamedTuple):
  """What a config means, as functions."""

  init: Any  # (rng) -> TrainState
  step: Any  # (TrainState, Batch) -> (TrainState, metrics)
  clean_losses: Any  # (TrainState, Batch) -> Losses; None for plain recipes.
  classify: Any  # (params, batch_stats, images) -> probabilities
  views: tuple[str, ...]
  schedule: optax.Schedule


def create(config, info: DatasetInfo, image_shape) -> Program:
  """Builds model, method, recipe and optimizer."""
  method_name, recipe_name = recipes.parse(config.method, methods.METHODS)
  method = methods.create(method_name, **config.method_args)
  recipe = recipes.RECIPES[recipe_name]
  perturb = recipe.perturb and recipe.perturb(**config.recipe_args)
  model = models.create(config.model, info.num_classes, config.bn_momentum)
  schedule = optimizer.cosine_schedule(config.learning_rate, config.steps)
  tx = optimizer.sgd(schedule, config.weight_decay)
  run = forward.make_forward(model, config.batch_norm)

  def init(rng):
    images = jnp.zeros((1, *image_shape))
    variables = model.init(rng, images, train=True)
    return train_step.create_train_state(
      rng, variables, tx, method, info, perturb
    )

  return Program(
    init=init,
    step=train_step.make_train_step(
      run, method, tx, recipe, perturb, config.ema_decay
    ),
    clean_losses=perturb and train_step.make_clean_losses(run, method),
    classify=classify_lib.make_classifier(
      model, config.mean, config.std, config.eval_batch_size
    ),
    views=method.views,
    schedule=schedule,
  )


def train_and_evaluate(config, workdir: str) -> TrainState:
  """Trains to `config.steps`, from where `workdir` stands; returns the state."""
  began = time.perf_counter()
  config_lib.check(config)
  files = Workdir(workdir)
  files.check_config(config)

  # Data.
  dataset = data_lib.load(config.dataset, config.data_dir)
  info = DatasetInfo(len(dataset.class_names), len(dataset.train_images))
  labeled = choose_labeled(config, dataset)
  write_description(files, config, dataset, labeled)

  # Devices and functions.
  mesh = sharding.make_mesh()
  everywhere = sharding.replicated(mesh)
  data = resident.place(
    dataset, labeled, config.unlabeled_includes_labeled, everywhere
  )
  test_images = jax.device_put(dataset.test_images, everywhere)
  program = create(config, info, dataset.train_images.shape[1:])
  sample = make_sample(config, program.views, sharding.over_batch(mesh))
  init = jax.jit(program.init, out_shardings=everywhere)
  state = init(jax.random.key(config.seed))

  # Where the run stands.
  checkpoints = Checkpoints(files.checkpoints)
  seconds_before = 0.0
  if (last := checkpoints.latest_step()) is not None:
    state, seconds_before = checkpoints.restore(last, state)
    logging.say(f'Going on from step {last} of {config.steps}.')
  start = int(state.step)
  files.cut_metrics(start)

  # One compiled function: sample, augment, differentiate, update.
  def train(state, data):
    return program.step(state, sample(data, state))

  def look(state, data):
    return program.clean_losses(state, sample(data, state))

  compiled = compile_step(train, state, data)
  look = jax.jit(look)
  images = config.batch_size + config.unlabeled_batch_size * bool(program.views)
  progress = logging.Progress(files, start, config.steps, images)
  evaluate = functools.partial(
    classify_lib.errors,
    program.classify,
    images=test_images,
    labels=dataset.test_labels,
  )
  save = lambda step, error: checkpoints.save(
    step, state, seconds_before + time.perf_counter() - began, error
  )

  with interrupt.stop_requests() as request:
    progress.start(start)
    for step in range(start + 1, config.steps + 1):
      last = step == config.steps
      logs = last or step % config.log_every == 0
      row = {}
      if logs and program.clean_losses:
        losses = look(state, data)
        row['unlabeled_loss'] = losses.unlabeled
      state, metrics = compiled(state, data)
      metrics['labeled_loss'].block_until_ready()
      progress.step()
      error = None
      if logs:
        row |= metrics | {'learning_rate': program.schedule(step - 1)}
      if last or step % config.eval_every == 0:
        row |= (result := evaluate(state))
        error = result['error']
      if row:
        progress.write(step, row)
      best = error is not None and error <= best_error(files)
      if best or last or request.signal or step % config.checkpoint_every == 0:
        save(step, error)
      if request.signal:
        break
    speed = progress.images_per_second(int(state.step))
    progress.close()
    checkpoints.close()

  if request.signal and int(state.step) < config.steps:
    logging.say(
      f'Stopped by signal {request.signal}; step {int(state.step)} is saved. '
      'The same command goes on from there.'
    )
    raise SystemExit(128 + request.signal)
  if start < config.steps:
    seconds = seconds_before + time.perf_counter() - began
    files.write(
      'result.json', summarize(config, files, labeled, seconds, speed)
    )
  logging.say(describe_result(files))
  return state


class Run(NamedTuple):
  """A run read back from its folder."""

  config: Any
  dataset: dict[str, Any]  # The content of dataset.json.
  state: TrainState
  classify: Any


def load_run(files: Workdir, which: str = 'latest') -> Run:
  """The 'latest' or 'best' checkpoint of a run, ready to classify."""
  config, dataset = files.config(), files.read('dataset.json')
  info = DatasetInfo(len(dataset['class_names']), dataset['num_train'])
  program = create(config, info, dataset['image_shape'])
  everywhere = sharding.replicated(sharding.make_mesh())
  like = jax.jit(program.init, out_shardings=everywhere)(jax.random.key(0))
  checkpoints = Checkpoints(files.checkpoints, read_only=True)
  state, _ = checkpoints.restore(checkpoints.step_of(which), like)
  checkpoints.close()
  return Run(config, dataset, state, program.classify)


def make_sample(config, views, batch_sharding):
  """Returns `sample(data, state) -> Batch` for the state's step."""
  draw = resident.make_sampler(
    config.batch_size,
    config.unlabeled_batch_size,
    views,
    config.pad,
    config.flip,
    config.mean,
    config.std,
    batch_sharding,
  )
  return lambda data, state: draw(data, train_step.step_keys(state)[0])


def compile_step(train, state, data):
  began = time.perf_counter()
  compiled = jax.jit(train, donate_argnums=0).lower(state, data).compile()
  flops = (compiled.cost_analysis() or {}).get('flops', float('nan'))
  logging.say(
    f'Step compiled in {time.perf_counter() - began:.1f} s: '
    f'{flops / 1e9:.2f} GFLOP.'
  )
  return compiled


def choose_labeled(config, dataset):
  """Indices of the labeled images: drawn, or read from a file."""
  classes = len(dataset.class_names)
  if config.labels_file:
    return splits.read(config.labels_file, dataset.train_labels, classes)
  return splits.balanced(
    dataset.train_labels, config.labels, config.split_seed, classes
  )


def write_description(files: Workdir, config, dataset, labeled) -> None:
  """What the run is, for people, for evaluate and for predict."""
  files.write('config.json', as_dict(config))
  files.write('versions.json', versions())
  files.write(
    'split.json',
    splits.to_json(
      labeled,
      dataset.train_labels,
      len(dataset.class_names),
      None if config.labels_file else config.split_seed,
      config.labels_file or 'drawn',
    ),
  )
  pool = len(dataset.train_images)
  if not config.unlabeled_includes_labeled:
    pool -= len(labeled)
  files.write(
    'dataset.json',
    {
      'class_names': list(dataset.class_names),
      'image_shape': list(dataset.train_images.shape[1:]),
      'num_train': len(dataset.train_images),
      'num_unlabeled': pool,
      'num_test': len(dataset.test_images),
    },
  )
  includes = (
    'stay in' if config.unlabeled_includes_labeled else 'are taken out of'
  )
  logging.say(
    f'{config.method} on {config.dataset}: {len(labeled)} labeled images, '
    f'{pool} unlabeled, {len(dataset.test_images)} for testing. The labeled '
    f'images {includes} the unlabeled pool.'
  )


def test_errors(files: Workdir) -> list[float]:
  return [row['error'] for row in files.metrics() if 'error' in row]


def best_error(files: Workdir) -> float:
  return min(test_errors(files))


def summarize(config, files, labeled, seconds, speed) -> dict:
  """The content of result.json; errors of the averaged weights, in percent."""
  errors = test_errors(files)
  return {
    'dataset': config.dataset,
    'method': config.method,
    'labels': len(labeled),
    'seed': config.seed,
    'split_seed': config.split_seed,
    'steps': config.steps,
    'error_last': errors[-1],
    'error_median20': statistics.median(errors[-20:]),
    'error_best': min(errors),
    'seconds': round(seconds, 1),
    'images_per_second': round(speed, 1),
  }


def describe_result(files: Workdir) -> str:
  result = files.read('result.json')
  return (
    f'{result["method"]} on {result["dataset"]} with {result["labels"]} '
    f'labels: test error {result["error_last"]:.2f}% last, '
    f'{result["error_median20"]:.2f}% median of the last 20 evaluations, '
    f'{result["error_best"]:.2f}% best, in {result["seconds"]:.0f} s. '
    f'See {files.path}.'
  )
