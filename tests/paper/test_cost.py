"""Cross-sharpness is free: XLA's own count of the whole step."""

import pytest

from benchmarks import step_cost


@pytest.fixture(scope='module')
def fixmatch():
  return flops('fixmatch', 'plain')


def flops(method, recipe):
  # One labeled image for each device, and few layers to compile;
  # ratios do not depend on it.
  compiled, _ = step_cost.compile_step(method, recipe, 'split', 'wrn_10_2', 8)
  return compiled.cost_analysis()['flops']


@pytest.mark.parametrize(
  ('recipe', 'ratio'),
  [('flatmatch', 1.0), ('flatmatch_e', 1.0), ('sharp_labeled', 2176 / 1984)],
)
def test_no_image_passes_through_the_network_in_vain(recipe, ratio, fixmatch):
  assert flops('freematch', recipe) == pytest.approx(ratio * fixmatch, rel=0.01)
  assert step_cost.minimal_ratio('freematch', recipe) == pytest.approx(ratio)
