"""Cross-sharpness is free: XLA's own count of the whole WRN-28-2 step."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from benchmarks import step_cost


@pytest.fixture(scope='module')
def fixmatch():
  return flops('fixmatch', 'plain')


def flops(method, recipe):
  # Eight labeled images for the four devices; ratios do not depend on it.
  compiled, _, _ = step_cost.compile_step(
    method, recipe, 'split', 'wrn_28_2', 8
  )
  return compiled.cost_analysis()['flops']


@pytest.mark.parametrize('recipe', ['flatmatch', 'flatmatch_e'])
@pytest.mark.parametrize('method', ['freematch'])
def test_flatmatch_costs_what_fixmatch_costs(method, recipe, fixmatch):
  assert flops(method, recipe) == pytest.approx(fixmatch, rel=0.01)
