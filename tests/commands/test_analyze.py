"""Probes of a real run, and the command that draws its figures."""

import contextlib
import io
import re
import sys
from types import SimpleNamespace

import jax
from ml_collections import ConfigDict
import numpy as np
import pytest
import runs

from configs import digits
from flatmatch_jax import analyze
from flatmatch_jax.analysis.measures import ANALYSES
from flatmatch_jax.run.workdir import Workdir
from flatmatch_jax.system import sharding
from flatmatch_jax.training import load, loop

PROBED = {
  'sharpness',
  'cross_sharpness',
  'held_out_sharpness',
  'gradient_angle',
  'labeled_gradient_norm',
  'unlabeled_gradient_norm',
  'total_gradient_norm',
}


STEPS = 16


def train_for(folder, name, probe_every):
  """A run without strong views: RandAugment takes long to compile."""
  config = digits.get_config('method=pseudo_label+flatmatch_e,seed=1')
  config.update(
    steps=STEPS,
    batch_size=8,
    unlabeled_batch_size=16,
    eval_batch_size=120,
    learning_rate=0.03,
    log_every=2,
    eval_every=4,
    checkpoint_every=3,
    probe_every=probe_every,
  )
  config.method_args.threshold = 0.2  # So that some guesses are used.
  loop.train_and_evaluate(config, str(folder / name))
  return folder / name


@pytest.fixture(scope='module')
def folder(tmp_path_factory, tiny_network):
  return tmp_path_factory.mktemp('runs')


@pytest.fixture(scope='module')
def finished(folder):
  return train_for(folder, 'finished', probe_every=0)


@pytest.fixture(scope='module')
def waited():
  """The kinds of all results that the probed run waited for."""
  return []


@pytest.fixture(scope='module')
def probed(folder, waited):
  """The finished run once more, probed every four steps."""
  settle = sharding.settle
  with pytest.MonkeyPatch.context() as patch:
    noted = lambda x: (waited.append(type(x)), settle(x))[1]
    patch.setattr(sharding, 'settle', noted)
    return train_for(folder, 'probed', probe_every=4)


@pytest.fixture(scope='module')
def analyzed(finished, probed):
  """What the command said about both runs."""
  stdout = io.StringIO()
  argv = ['analyze', '--workdir', str(probed), str(finished)]
  argv += ['--images=16', '--points=3']
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sys, 'argv', argv)
    with contextlib.redirect_stdout(stdout):
      analyze.main()
  return stdout.getvalue()


def test_probes_do_not_change_the_run(finished, probed):
  plain, looked_at = (
    load.load_run(Workdir(path)).state.replace(rng=())
    for path in (finished, probed)
  )
  jax.tree.map(np.testing.assert_array_equal, plain, looked_at)
  rows = [
    {key: value for key, value in row.items() if key not in PROBED}
    for row in runs.rows_of(probed)
  ]
  for row, before in zip(rows, runs.rows_of(finished), strict=True):
    # The probe and the usual look take the same loss in other programs.
    assert row.pop('unlabeled_loss', 0) == pytest.approx(
      before.pop('unlabeled_loss', 0), rel=1e-4
    )
    assert row == before


@pytest.mark.usefixtures('probed')
def test_loop_waits_for_every_program(waited):
  """Two that overlap on virtual devices may wait for each other for ever."""
  probes, looks = STEPS // 4, STEPS // 2 - STEPS // 4
  assert waited.count(tuple) == STEPS  # State and metrics.
  # Each of the two programs also once when it was compiled.
  assert waited.count(dict) == probes + looks + 2


def test_probes_are_logged_at_their_interval(probed):
  rows = runs.rows_of(probed)
  steps = [row['step'] for row in rows if row.keys() >= PROBED]
  assert steps == [4, 8, 12, 16]
  assert not any(
    row.keys() & PROBED for row in rows if row['step'] not in steps
  )


@pytest.mark.parametrize('name', sorted(ANALYSES.keys() - {'sensitivity'}))
def test_command_leaves_numbers_and_figures(analyzed, probed, finished, name):
  for workdir in (probed, finished):
    made = workdir / 'analysis'
    assert (made / f'{name}.png').read_bytes()[:4] == b'\x89PNG'
    assert (made / f'{name}.svg').read_text().rstrip().endswith('</svg>')
    with np.load(made / f'{name}.npz') as data:
      assert data['checkpoint'] == STEPS
      numbers = [v for v in data.values() if v.dtype.kind == 'f']
      # A class that is never trusted has no accuracy.
      assert name == 'pseudo_labels' or all(
        np.isfinite(values).all() for values in numbers
      )
  assert (probed / 'analysis' / f'compared_{name}.png').exists()
  assert not list(probed.rglob('*.tmp*'))
  assert str(probed / 'analysis') in analyzed
  assert re.search(rf'^{name} +pseudo_label', analyzed, re.MULTILINE)


def test_log_of_the_run_is_in_the_sharpness_figure(analyzed, probed, finished):
  with np.load(probed / 'analysis' / 'sharpness.npz') as data:
    assert data['log_step'].tolist() == [4, 8, 12, 16]
    rows = [r for r in runs.rows_of(probed) if 'sharpness' in r]
    logged = [row['cross_sharpness'] for row in rows]
    np.testing.assert_allclose(data['log_cross_sharpness'], logged)
    assert data['labeled_rise'][0] == 0
  with np.load(finished / 'analysis' / 'sharpness.npz') as data:
    assert 'log_step' not in data


def test_runs_that_differ_in_seeds_have_one_name():
  def names(*given):
    return analyze._labels(
      [
        SimpleNamespace(
          run=SimpleNamespace(
            config=ConfigDict({'dataset': 'digits', 'probe_every': 0} | fields),
            dataset={'fingerprint': fields.get('data_dir')},
          )
        )
        for fields in given
      ]
    )

  uda, vat = {'method': 'uda'}, {'method': 'vat', 'args': {'rho': 1}}
  assert names(uda, vat) == ['uda', 'vat']
  seeds = [uda | {'seed': n, 'split_seed': n, 'probe_every': n} for n in (0, 1)]
  assert names(*seeds, vat) == ['uda', 'uda', 'vat']
  fewer = vat | {'args': {'rho': 0.5}, 'variant': {'labels': 4}}
  assert names(vat, fewer) == ['vat, args.rho=1', 'vat, args.rho=0.5']
  other = uda | {'dataset': 'svhn'}
  assert names(uda, other) == ['uda, digits', 'uda, svhn']
  mine = [uda | {'data_dir': name} for name in ('cats', 'dogs')]
  assert names(*mine) == ['uda, images=cats', 'uda, images=dogs']
