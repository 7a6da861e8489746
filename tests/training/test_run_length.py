"""In a short run averages hold what they saw, not what they began with."""

import importlib
import json

import jax.numpy as jnp
import numpy as np
import pytest

from configs import cifar10, cifar10_fast, digits
from flatmatch_jax import data, methods, sweep
from flatmatch_jax.data import augment
from flatmatch_jax.run.settings import as_dict
from flatmatch_jax.run.workdir import Workdir
from flatmatch_jax.step import recipes
from flatmatch_jax.training import load, loop, run_length, traced


@pytest.mark.usefixtures('tiny_network')
@pytest.mark.parametrize('momentum', [None, 0.999])
def test_a_short_run_is_evaluated_as_it_trained(momentum, tmp_path):
  """Within two points of the error by statistics of the test images."""
  config = digits.get_config('method=supervised,labels=all')
  config.update(steps=150, log_every=50, eval_every=150, batch_size=64)
  if momentum:  # By hand, so that the warm-up alone must do.
    config.bn_momentum = momentum
  loop.train_and_evaluate(config, str(tmp_path))
  run = load.load_run(Workdir(str(tmp_path)))
  images = data.from_config(config)

  def error(pixels, labels):
    pixels = augment.normalize(jnp.asarray(pixels), config.mean, config.std)
    outputs, _ = run.program.forward(
      run.state.ema_params, run.state.batch_stats, {'images': pixels}
    )
    guess = outputs['images'].logits.argmax(-1)
    return 100 * np.mean(np.asarray(guess) != labels)

  assert error(images.train_images, images.train_labels) < 5
  (*_, row) = Workdir(str(tmp_path)).metrics()
  expected = error(images.test_images, images.test_labels)
  assert abs(row['error'] - expected) <= 2


@pytest.mark.parametrize(
  ('paper', 'steps', 'expected'),
  [
    (0.999, 2**20, 0.999),
    (0.999, 20_000, 0.999),
    (0.999, 10_000, 0.998),
    (0.999, 2000, 0.99),
    (0.999, 400, 0.95),
    (0.999, 40, 0.5),
    (0.999, 1, 0.5),
    (0.99, 2000, 0.99),
    (0.99, 400, 0.95),
    (0.9, 400, 0.9),
    (0.9, 100, 0.8),
    (0.0, 1, 0.0),
  ],
)
def test_an_average_covers_at_most_a_twentieth(paper, steps, expected):
  assert run_length.decay(paper, steps) == expected


@pytest.mark.parametrize(
  ('paper', 'steps', 'expected'),
  [(2048, 2**20, 2048), (2048, 400, 20), (2048, 1, 0), (0, 400, 0)],
)
def test_counts_are_at_most_a_share_of_the_run(paper, steps, expected):
  assert run_length.count(paper, steps, 20) == expected


def test_a_run_is_evaluated_and_saved_four_times_at_least():
  config = cifar10_fast.get_config()
  for steps, every in ((8000, 1000), (800, 200), (401, 101), (3, 1)):
    config.steps = steps
    assert config.eval_every == config.checkpoint_every == every
  config.eval_every = 7
  config.steps = 800
  assert (config.eval_every, config.checkpoint_every) == (7, 200)


NAMES = [*methods.METHODS, 'sam', 'flatmatch_e', 'flatmatch_fix']


@pytest.mark.parametrize('name', NAMES)
def test_a_long_run_has_the_papers_numbers(name):
  """Those of the signatures, to the bit."""
  config = cifar10.get_config(f'method={name}')
  method, recipe = recipes.parse(name)
  assert config.method_args.to_dict() == methods.defaults(method)
  assert config.recipe_args.to_dict() == recipes.defaults(recipe)
  assert config.ema_decay == config.bn_momentum == 0.999


@pytest.mark.parametrize('name', NAMES)
def test_a_short_run_leaves_no_decay_or_count_of_a_long_one(name):
  config = cifar10.get_config(f'method={name}')
  config.steps = 400
  fields = config.method_args.to_dict() | config.recipe_args.to_dict()
  fields |= {key: config[key] for key in ('ema_decay', 'bn_momentum')}
  for key, value in fields.items():
    if key.endswith(('decay', 'momentum')):
      assert value == 0.95, key
    elif key.endswith('steps') or key == 'interval':
      assert value <= 100, key


def test_fields_follow_the_steps_until_they_are_set():
  config = digits.get_config('method=flatmatch_e')
  assert config.recipe_args.decay == config.method_args.decay == 0.95
  config.steps = 4000
  assert config.recipe_args.decay == config.method_args.decay == 0.995
  config.method_args.decay = config.ema_decay = 0.9999
  config.steps = 2000
  assert config.method_args.decay == config.ema_decay == 0.9999
  assert config.recipe_args.decay == config.bn_momentum == 0.99


def test_copies_follow_their_own_steps():
  config = digits.get_config()
  other = traced.changed(config, {'steps': 4000})
  assert (config.ema_decay, other.ema_decay) == (0.95, 0.995)
  other = traced.changed(config, {'steps': 4000, 'ema_decay': 0.9999})
  assert (config.ema_decay, other.ema_decay) == (0.95, 0.9999)


def test_members_of_a_sweep_follow_their_steps(tmp_path):
  members = sweep.combine(
    digits.get_config(), str(tmp_path), {'steps': ['4000', '2000']}
  )
  found = [member.config.method_args.decay for member in members]
  assert found == [0.995, 0.99]


def test_plain_numbers_are_written(tmp_path):
  config = digits.get_config('method=flatmatch_fix')
  content = as_dict(config)
  assert json.loads(json.dumps(content)) == content
  assert content['ema_decay'] == 0.95
  assert content['recipe_args']['pretrain_steps'] == 100
  # A run that resumes has the same numbers.
  files = Workdir(str(tmp_path))
  files.write('config.json', content)
  files.write('result.json', {})
  files.check_config(digits.get_config('method=flatmatch_fix'))


@pytest.mark.parametrize(
  ('name', 'argument', 'field', 'long', 'short'),
  [
    ('svhn', 'method=freematch', 'method_args.warmup_steps', 2049, 50),
    ('imagenet', '', 'bn_momentum', 0.9, 0.9),
    ('imagenet', 'model=vit_base_16', 'warmup_steps', 5120, 50),
    ('imagenet30', '', 'bn_momentum', 0.9, 0.9),
    (
      'npz',
      'method=flatmatch_fix,fast=false',
      'recipe_args.pretrain_steps',
      4096,
      250,
    ),
  ],
)
def test_numbers_of_a_dataset_follow_too(name, argument, field, long, short):
  config = importlib.import_module(f'configs.{name}').get_config(argument)
  assert traced.get(config, field) == long
  config.steps = 1000
  assert traced.get(config, field) == short
