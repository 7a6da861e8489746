"""The comparison on one's own images changes no more than it is asked to."""

from types import SimpleNamespace

import pytest

from benchmarks import own_images
from flatmatch_jax.types import UserError


def make(method, *fields):
  args = SimpleNamespace(
    config='digits.py', variant='labels=20', data_dir='', out='x', set=fields
  )
  return own_images.make_config(args, method, seed=3)


def test_fields_are_set_in_both_configs():
  for method in own_images.METHODS:
    config = make(method, 'flip=true', 'config.steps=7')
    assert (config.method, config.labels, config.split_seed) == (method, 20, 3)
    assert config.flip is True
    assert config.steps == 7


def test_arguments_of_flatmatch_are_not_for_the_baseline():
  assert make('flatmatch', 'recipe_args.rho=0.2').recipe_args.rho == 0.2
  make('supervised', 'recipe_args.rho=0.2')


@pytest.mark.parametrize(
  'field', ['method=fixmatch', 'seeds=7', 'steps=1,2', 'stepz=1']
)
def test_what_would_change_the_comparison_is_refused(field):
  with pytest.raises(UserError):
    make('flatmatch', field)
