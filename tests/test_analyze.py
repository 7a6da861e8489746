"""Probes of a real run, and the command that draws its figures."""

import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import runs

from flatmatch_jax import analyze, program
from flatmatch_jax.analysis.measures import ANALYSES
from flatmatch_jax.workdir import Workdir

PROBED = {
  'sharpness',
  'cross_sharpness',
  'held_out_sharpness',
  'gradient_angle',
  'labeled_gradient_norm',
  'unlabeled_gradient_norm',
  'total_gradient_norm',
}


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return tmp_path_factory.getbasetemp()


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
  return runs.finished_run(tmp_path_factory)[0]


@pytest.fixture(scope='module')
def probed(finished, folder):
  """The finished run once more, probed every four steps."""
  workdir = folder / 'probed'
  if not workdir.exists():
    done = runs.run(folder, runs.command(workdir, '--config.probe_every=4'))
    assert done.returncode == 0, done.stderr
  return workdir


@pytest.fixture(scope='module')
def analyzed(finished, probed, folder):
  """What the command said about both runs."""
  done = runs.run(
    folder,
    [
      *('-m', 'flatmatch_jax.analyze', '--workdir', probed, finished),
      *('--images=16', '--points=3'),
    ],
  )
  assert done.returncode == 0, done.stderr
  return done


def test_probes_do_not_change_the_run(finished, probed):
  plain, looked_at = (
    program.load_run(Workdir(path)).state.replace(rng=())
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
      assert data['checkpoint'] == runs.STEPS
      numbers = [v for v in data.values() if v.dtype.kind == 'f']
      # A class that is never trusted has no accuracy.
      assert name == 'pseudo_labels' or all(
        np.isfinite(values).all() for values in numbers
      )
  assert (probed / 'analysis' / f'compared_{name}.png').exists()
  assert not list(probed.rglob('*.tmp*'))
  assert str(probed / 'analysis') in analyzed.stdout


def test_log_of_the_run_is_in_the_sharpness_figure(analyzed, probed, finished):
  with np.load(probed / 'analysis' / 'sharpness.npz') as data:
    assert data['log_step'].tolist() == [4, 8, 12, 16]
    rows = [r for r in runs.rows_of(probed) if 'sharpness' in r]
    logged = [row['cross_sharpness'] for row in rows]
    np.testing.assert_allclose(data['log_cross_sharpness'], logged)
    assert data['labeled_rise'][0] == 0
  with np.load(finished / 'analysis' / 'sharpness.npz') as data:
    assert 'log_step' not in data


@pytest.mark.parametrize(
  ('args', 'words'),
  [
    (['--what=landscape,colour'], "'colour'"),
    (['--points=4'], '--points=4'),
    (['--images=0'], '--images=0'),
    (['--rotate=-1'], '--rotate=-1'),
    ([], 'not the folder of a run'),
  ],
)
def test_wrong_arguments_are_one_line(
  args, words, tmp_path, monkeypatch, capsys
):
  from flatmatch_jax import cli

  argv = ['analyze', '--workdir', str(tmp_path), *args]
  monkeypatch.setattr('sys.argv', argv)
  with pytest.raises(SystemExit) as stopped, cli.errors_as_lines():
    analyze.main()
  assert stopped.value.code == 2
  error = capsys.readouterr().err
  assert words in error
  assert error.count('\n') == 1


def test_runs_have_names_of_their_own():
  def names(*given):
    return analyze._labels(
      [
        SimpleNamespace(
          run=SimpleNamespace(config=SimpleNamespace(method=method)),
          files=Workdir(path),
        )
        for method, path in given
      ]
    )

  assert names(('uda', '/a/x'), ('vat', '/b/x')) == ['uda', 'vat']
  assert names(('uda', '/a/x'), ('uda', '/a/y')) == ['x', 'y']
  assert names(('uda', '/a/x'), ('uda', '/b/x')) == ['/a/x', '/b/x']


def test_training_loads_no_analyses_nor_reports_nor_these_matplotlib(folder):
  code = (
    'import sys, json, flatmatch_jax.train;'
    'before = {"flatmatch_jax.analysis", "flatmatch_jax.report"}'
    ' & set(sys.modules);'
    'import flatmatch_jax.analyze;'
    'print(json.dumps([sorted(before), "matplotlib" in sys.modules]))'
  )
  done = runs.run(folder, ['-c', code])
  assert json.loads(done.stdout) == [[], False]
