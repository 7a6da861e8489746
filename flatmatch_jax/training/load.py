"""What there is already: a config file, and a run with its data."""

import pathlib
import runpy
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from flatmatch_jax import data, methods, models
from flatmatch_jax.run.checkpoint import Checkpoints
from flatmatch_jax.run.workdir import Workdir
from flatmatch_jax.step import recipes
from flatmatch_jax.system import messages, sharding
from flatmatch_jax.training import config as config_lib
from flatmatch_jax.training import program as program_lib
from flatmatch_jax.types import DatasetInfo, PyTree, TrainState, UserError

ROOT = pathlib.Path(__file__).parents[2]
_MAX_SIDE = 2**14  # Pixels of an image that a workdir may ask for.


def load_config(file: str, argument: str):
  """What a file of configs/ makes of the argument behind its colon."""
  path = ROOT / 'configs' / file
  if not path.is_file():
    raise UserError(
      f'There is no config file {path}: the tables need the folder configs/ '
      'beside the package, as in a clone of the repository.'
    )
  return runpy.run_path(str(path))['get_config'](argument)


class Run(NamedTuple):
  """A run read back from its folder."""

  config: Any
  dataset: dict[str, Any]  # The content of dataset.json.
  state: TrainState
  classify: Any
  program: program_lib.Program


def load_run(files: Workdir, which: str = 'latest') -> Run:
  """The 'latest' or 'best' checkpoint of a run, as it was trained."""
  config, dataset = _read_description(files)
  info = DatasetInfo(
    len(dataset['class_names']),
    dataset['num_train'],
    dataset['num_unlabeled'],
    tuple(files.read('split.json')['per_class']),
  )
  program = program_lib.create(config, info, dataset['image_shape'])
  shapes = jax.eval_shape(program.init, jax.random.key(0))
  like = sharding.abstract_state(program.mesh, shapes)
  state = _restore(files, dataset, like, which)
  return Run(config, dataset, state, program.classify, program)


class Trained(NamedTuple):
  """A run's averaged weights, on the host, and the network they are for."""

  config: Any
  dataset: dict[str, Any]  # The content of dataset.json.
  step: int
  model: nn.Module
  variables: dict[str, PyTree]  # 'params' and, if it has some, 'batch_stats'.


def load_trained(files: Workdir, which: str = 'latest') -> Trained:
  """Reads nothing but averaged weights and running statistics."""
  config, dataset = _read_description(files)
  model, variables = network(config, dataset)
  like = {'step': np.int32(0), 'ema_params': variables['params']}
  if 'batch_stats' in variables:
    like['batch_stats'] = variables['batch_stats']
  # Arrays of numpy are read to the host, where nothing has to be compiled.
  like = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), like)
  state = _restore(files, dataset, like, which)
  step, params = int(state.pop('step')), state.pop('ema_params')
  return Trained(config, dataset, step, model, {'params': params, **state})


def warn_unfinished(step: int, steps: int, what: str) -> None:
  """If the run has steps to go; `what` is then to be done again."""
  if step < steps:
    messages.say(
      f'The run has not ended: this is its step {step:,} of {steps:,}. '
      f'{what} again when it has.'
    )


def network(config, dataset) -> tuple[nn.Module, dict[str, PyTree]]:
  """What classifies outside training, and the shapes of its variables."""
  method, _ = recipes.parse(config.method)
  heads = methods.asks(method, **config.method_args).heads
  model = models.create(
    config.model,
    len(dataset['class_names']),
    tuple(head for head in heads if head.evaluated),
    config.dtype,
  )
  image = jnp.zeros((1, *dataset['image_shape']))
  return model, jax.eval_shape(
    lambda rng: model.init(rng, image, train=True), jax.random.key(0)
  )


def _read_description(files: Workdir):
  """config.json and dataset.json, checked."""
  config, dataset = files.config(), files.read('dataset.json')
  try:
    config_lib.check_fields(config)
  except UserError as error:
    raise UserError(f'{files.path / "config.json"}: {error}') from None
  check_dataset(files.path / 'dataset.json', dataset)
  return config, dataset


def _restore(files: Workdir, dataset, like, which: str):
  checkpoints = Checkpoints(files.checkpoints, read_only=True)
  if (found := checkpoints.restore(like, which)) is None:
    raise UserError(f'{files.checkpoints} holds no {which} checkpoint.')
  state, notes = found
  if notes['class_names'] != dataset['class_names']:
    raise UserError(
      f'{files.checkpoints} were saved for the classes '
      f'{", ".join(notes["class_names"])}, but dataset.json beside them has '
      f'{", ".join(dataset["class_names"])}; put back the one that belongs.'
    )
  return state


def check_dataset(path: pathlib.Path, dataset) -> None:
  """The fields of dataset.json that are used, which anyone may have edited."""
  match dataset:
    case {
      'class_names': [_, _, *_] as names,
      'image_shape': [int(height), int(width), 1 | 3],
      'num_train': int(train),
      'num_unlabeled': int(unlabeled),
      'test_share': int(share) | float(share),
    } if (
      all(isinstance(name, str) for name in names)
      and 1 <= min(height, width) <= max(height, width) <= _MAX_SIDE
      and 1 <= unlabeled <= train < 2**31
      and 0.5 <= share <= 1
    ):
      return
  raise UserError(
    f'{path} does not describe the data of a run; put back the one that was '
    'written with it.'
  )


def load_data(run: Run | Trained, data_dir: str | None) -> data.Dataset:
  """The data a run was trained on, now in `data_dir` if that is given."""
  if data_dir:
    run.config.data_dir = data_dir
  dataset = data.from_config(run.config)
  here = {
    'class_names': list(dataset.class_names),
    'image_shape': list(dataset.train_images.shape[1:]),
  }
  for name, value in here.items():
    if value != run.dataset[name]:
      raise UserError(
        f'The run was trained with {name} {run.dataset[name]}, but the data '
        f'now have {value}; give the data it was trained on with --data_dir.'
      )
  return dataset


def choose_images(files: Workdir, run: Run | Trained, dataset: data.Dataset):
  """Images, labels and whether they are 'test' or 'validation' images."""
  if len(dataset.test_labels):
    return dataset.test_images, dataset.test_labels, 'test'
  held_out = np.array(files.read('split.json')['validation'], np.int64)
  if not len(held_out):
    raise UserError(
      f'{run.config.dataset} in {run.config.data_dir} has no test images, and '
      'none were held out in training by config.num_val.'
    )
  images, labels = dataset.train_images, dataset.train_labels
  return images[held_out], labels[held_out], 'validation'
