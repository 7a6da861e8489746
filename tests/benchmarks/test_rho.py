"""benchmarks/rho.py: pairs, and the table."""

from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import rho
from flatmatch_jax import sweep


def test_errors_are_of_each_rho_by_seed(monkeypatch, tmp_path):
  def trained(config, workdir, settings):
    members = sweep.combine(config, workdir, settings)
    error = lambda s: 10 * s['seed'] + s.get('recipe_args.rho', 0)
    read = lambda s: lambda name: {'error_last': error(s)}
    return [
      member._replace(files=SimpleNamespace(read=read(member.settings)))
      for member in members
    ]

  monkeypatch.setattr(rho.sweep, 'sweep', trained)
  plain = rho.train('freematch', 20, 3, tmp_path)
  assert [row['errors'] for row in plain] == [[0, 10, 20]]
  rows = rho.train('flatmatch', 20, 3, tmp_path)
  assert [row['rho'] for row in rows] == list(rho.RHOS)
  for row in rows:
    assert row['errors'] == pytest.approx([x + row['rho'] for x in (0, 10, 20)])


def test_table_pairs_runs_on_the_same_split():
  plain = np.array([3.0, 9.0, 6.0])
  row = lambda method, value, errors: {
    'method': method,
    'labels': 10,
    'rho': value,
    'errors': list(errors),
  }
  rows = [row('fixmatch', None, plain), row('freematch', None, plain)]
  rows += [row('flatmatch', r, plain - 10 * r) for r in rho.RHOS]
  _, _, *lines = rho.table(rows).splitlines()
  (line,) = lines  # Methods that have not run yet have none.
  assert line.startswith('| 10 | flatmatch | 3 | freematch 6.00 ± 3.00 | -0.50')
  assert line.endswith('| -10.00 (-10.00 to -10.00) |')
