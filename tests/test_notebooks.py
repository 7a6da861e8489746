"""The notebooks run from top to bottom, and hold what they once gave."""

import pathlib
import re

import nbformat
import pytest

from notebooks import run

ROOT = pathlib.Path(__file__).parent.parent

# As little of each as shows that every cell works.
REDUCED = {
  'ablations': {
    'steps': 1,
    'seeds': [0, 1],
    'rhos': [0.05, 0.1],
    'ablations': [],
    'points': 3,
    'number': 16,
    'batch_sizes': (4, 8),
  },
  'flatmatch_in_one_page': {'steps': 2},
  'quick_start': {'steps': 2},
  'your_own_images': {'steps': 2, 'unlabeled': 48},
}


def read(name):
  return nbformat.read(ROOT / 'notebooks' / f'{name}.ipynb', as_version=4)


def code(notebook):
  return [cell for cell in notebook.cells if cell.cell_type == 'code']


def text_of(notebook):
  """All that was printed or returned as text."""
  found = []
  for cell in code(notebook):
    for output in cell.outputs:
      found.append(output.get('text') or str(output.get('data', '')))
  return ''.join(found)


def test_all_notebooks_are_tested():
  names = {path.stem for path in (ROOT / 'notebooks').glob('*.ipynb')}
  assert names == set(REDUCED)


@pytest.mark.parametrize('name', REDUCED)
def test_notebook_runs_without_tensorflow(name, tmp_path, monkeypatch):
  monkeypatch.setenv('JAX_NUM_CPU_DEVICES', '1')
  path = ROOT / 'notebooks' / f'{name}.ipynb'
  done = run.execute(path, tmp_path, **REDUCED[name])
  assert 'test error' in text_of(done)
  assert all(cell.execution_count for cell in code(done))


@pytest.mark.parametrize('name', REDUCED)
def test_outputs_are_those_of_the_code(name):
  notebook = read(name)
  cells = code(notebook)
  assert notebook.metadata.executed == run.checksum(notebook)
  counts = [cell.execution_count for cell in cells]
  assert counts == list(range(1, len(cells) + 1))
  kinds = [o.output_type for cell in cells for o in cell.outputs]
  assert 'error' not in kinds
  assert kinds.count('stream')
  assert 'test error' in text_of(notebook)


@pytest.mark.parametrize('name', REDUCED)
def test_notebook_is_small_and_opens_in_colab(name):
  path = ROOT / 'notebooks' / f'{name}.ipynb'
  assert path.stat().st_size < 300_000
  first, setup = read(name).cells[:2]
  repository = re.search(r"REPOSITORY = 'https://([^']+)'", setup.source)[1]
  host, project = repository.split('/', 1)
  badge = (
    f'https://colab.research.google.com/{host.removesuffix(".com")}/{project}'
    f'/blob/main/notebooks/{name}.ipynb'
  )
  assert badge in first.source
  assert setup.source == read('quick_start').cells[1].source
