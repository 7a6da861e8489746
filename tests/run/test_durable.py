"""What a power cut may take: never a row that a checkpoint counts on."""

import os
import pathlib

from conftest import make_config
from orbax.checkpoint._src.path import async_path
import pytest

from flatmatch_jax import sweep
from flatmatch_jax.run.workdir import Workdir
from flatmatch_jax.training import loop


class Disk:
  """Notes which rows would survive a power cut, and which steps are saved.

  A row survives once its file is flushed, and the folder that has its name; a
  checkpoint counts once Orbax renames its folder to the number of its step.
  """

  def __init__(self, monkeypatch):
    self._written: dict[pathlib.Path, set[int]] = {}
    self._durable: dict[pathlib.Path, set[int]] = {}
    self._named: set[pathlib.Path] = set()
    self.saved: list[tuple[pathlib.Path, int]] = []
    self.lost: list[tuple[pathlib.Path, int, set[int]]] = []
    append, fsync = Workdir.append_metrics, os.fsync
    rename = async_path.rename

    def append_metrics(workdir, row):
      append(workdir, row)
      self._written.setdefault(workdir.path, set()).add(row['step'])

    def flush(descriptor):
      fsync(descriptor)
      path = pathlib.Path(os.readlink(f'/proc/self/fd/{descriptor}'))
      if (path / 'metrics.jsonl').exists():
        self._named.add(path)
      if path.name == 'metrics.jsonl' and path.parent in self._named:
        self._durable[path.parent] = set(self._written.get(path.parent, ()))

    async def renamed(source, target):
      await rename(source, target)
      self._look(pathlib.Path(target))

    monkeypatch.setattr(Workdir, 'append_metrics', append_metrics)
    monkeypatch.setattr(os, 'fsync', flush)
    monkeypatch.setattr(async_path, 'rename', renamed)

  def _look(self, target):
    if target.parent.name != 'checkpoints' or not target.name.isdigit():
      return
    run, step = target.parents[1], int(target.name)
    self.saved.append((run, step))
    before = {row for row in self._written.get(run, ()) if row <= step}
    if missing := before - self._durable.get(run, set()):
      self.lost.append((run, step, missing))


@pytest.fixture
def config():
  """A row a step, and a checkpoint after most."""
  return make_config('supervised', probe_every=0, log_every=1, eval_every=4)


@pytest.fixture
def disk(monkeypatch, tiny_network):
  return Disk(monkeypatch)


def test_rows_are_on_disk_before_the_checkpoint_after_them(
  config, disk, tmp_path
):
  loop.train_and_evaluate(config, str(tmp_path / 'run'))
  assert {step for _, step in disk.saved} >= {2, 4, 6}
  assert not disk.lost


def test_rows_of_a_sweep_are_too(config, disk, tmp_path):
  sweep.sweep(config, str(tmp_path), {'seed': [0, 1]}, at_once=2)
  assert {run.name for run, _ in disk.saved} == {'seed=0', 'seed=1'}
  assert not disk.lost
