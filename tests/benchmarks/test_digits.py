"""The table of the digits benchmark."""

import argparse
import json

from benchmarks import digits


def runs(*errors):
  return [{'error': error, 'used_fraction': None} for error in errors]


def test_differences_are_those_of_the_same_seed():
  found = {'fixmatch': runs(9, 1, 5), 'abc': runs(8, 0, 4.5), 'saw': runs(9)}
  fixmatch, abc, saw = digits.table(found).splitlines()[2:]
  assert fixmatch == '| fixmatch | 5.00 ± 4.00 |  |  |  |'
  assert abc == '| abc | 4.17 ± 4.01 | -0.83 ± 0.17 |  |  |'
  assert saw == '| saw | 9.00 |  |  |  |'
  assert json.loads(digits.record(found))['abc'] == {
    'error': [8, 0, 4.5],
    'used_fraction': [None] * 3,
  }


def test_each_method_once_under_each_recipe_that_makes_sense():
  args = argparse.Namespace(
    methods='supervised,abc,freematch,flatmatch', recipes='plain,flatmatch'
  )
  assert digits.names(args) == [
    'supervised',
    'abc',
    'abc+flatmatch',
    'freematch',
    'freematch+flatmatch',
  ]
