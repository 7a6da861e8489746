"""The cells of the paper's tables as runs."""

from typing import Any, NamedTuple

from flatmatch_jax.paper.tables import NAMES, TABLES
from flatmatch_jax.step import recipes
from flatmatch_jax.training import load


class Cell(NamedTuple):
  """One number of the paper."""

  dataset: str
  method: str
  labels: str  # What stands behind 'labels=', so a model may follow.
  error: str

  def argument(self, seed: int) -> str:
    """What stands behind the colon; every seed has labels of its own."""
    return (
      f'method={self.method},labels={self.labels},seed={seed},split_seed={seed}'
    )

  def command(self, seed: int) -> str:
    labels = self.labels.replace(',model=', '-')
    weights = ' --config.pretrained=WEIGHTS.npz' if 'vit' in labels else ''
    return (
      f'python main.py --config configs/{self.dataset}.py:{self.argument(seed)}'
      f'{weights} --workdir runs/{self.dataset}-{self.method}-{labels}-{seed}'
    )

  def config(self, seed: int = 0) -> Any:
    return load.load_config(f'{self.dataset}.py', self.argument(seed))


def cells(table: str) -> list[Cell]:
  """All cells of a table, row by row."""
  found = []
  for block in TABLES[table].strip().split('\n\n'):
    (dataset, *labels), *lines = (line.split() for line in block.splitlines())
    for method, *errors in lines:
      for column, error in zip(labels, errors, strict=True):
        found.append(Cell(dataset, method, column, error))
  return found


def runs(table: str) -> list[Cell]:
  """The cells of a table that the paper does not leave empty."""
  return [cell for cell in cells(table) if cell.error != '-']


def name(method: str) -> str:
  """The method as the paper calls it."""
  if method in NAMES:
    return NAMES[method]
  return f'{NAMES[recipes.parse(method).method]}+FlatMatch'
