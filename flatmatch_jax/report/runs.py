"""A run as its folder tells it, finished or not."""

import os
from typing import Any, NamedTuple

from flatmatch_jax.run import results
from flatmatch_jax.run.workdir import Workdir
from flatmatch_jax.system import buckets
from flatmatch_jax.system.files import to_path
from flatmatch_jax.types import UserError

# Datasets whose images depend on more than their name.
_OWN = {'folder': 'data_dir', 'npz': 'data_dir', 'tfds': 'tfds_name'}
_NEEDED = (
  'dataset',
  'method',
  'labels',
  'seed',
  'split_seed',
  'steps',
  'model',
  'batch_size',
  'unlabeled_batch_size',
  'variant',
)


class RunFiles(NamedTuple):
  """What a run left so far; a file that is not there yet is empty."""

  files: Workdir
  config: dict[str, Any]
  dataset: dict[str, Any]  # dataset.json
  split: dict[str, Any]  # split.json
  versions: dict[str, str]
  rows: list[dict[str, Any]]  # metrics.jsonl
  result: dict[str, Any]  # result.json, or of its errors those so far.
  finished: bool

  @property
  def step(self) -> int:
    return self.rows[-1]['step'] if self.rows else 0

  @property
  def labels(self) -> int | str:
    """How many images are labeled."""
    return len(self.split['labeled']) if self.split else self.config['labels']

  @property
  def data(self) -> str:
    """The dataset's name; of the user's own, which one."""
    name = self.config['dataset']
    if name not in _OWN:
      return name
    value = str(self.config[_OWN[name]])
    return f'{name} {os.path.basename(value.rstrip("/"))}'

  @property
  def status(self) -> str:
    if self.finished:
      return 'finished'
    return f'unfinished, at step {self.step:,} of {self.config["steps"]:,}'


def members(path: str) -> list[str]:
  """The folder of a run itself, or the runs in a folder and in its folders.

  Such as those of a sweep, and of the sweeps in runs/.
  """
  folder = to_path(path)
  if not folder.is_dir() or (folder / 'config.json').exists():
    return [path]
  depths = ('*/config.json', '*/*/config.json')
  inside = {file.parent for depth in depths for file in folder.glob(depth)}
  return [str(run) for run in sorted(inside)] or [path]


def read(path: str) -> RunFiles:
  """Reads a workdir; UserError if it is not one."""
  if not buckets.holds(path) and to_path(path).is_file():
    raise UserError(
      f'--workdir {path} is a file; name folders of runs, such as runs/*/.'
    )
  files = Workdir(path)
  config = files.read('config.json')
  absent = [key for key in _NEEDED if key not in config]
  if absent:
    raise UserError(
      f'{files.path / "config.json"} is not the config of a run: it has no '
      f'{", ".join(absent)}. Give the --workdir of a `python main.py`.'
    )

  def optional(name):
    content = files.read(name) if files.has(name) else {}
    if not isinstance(content, dict):
      raise UserError(
        f'{files.path / name} is not what a run writes: it has no fields. Put '
        'it back, or remove it.'
      )
    return content

  rows, result = files.metrics(), optional('result.json')
  return RunFiles(
    files=files,
    config=config,
    dataset=optional('dataset.json'),
    split=optional('split.json'),
    versions=optional('versions.json'),
    rows=rows,
    result=result or results.errors(rows),
    finished=bool(result),
  )
