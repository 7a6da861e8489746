"""A short version of tests/faults.py: one run lives through one of each."""

import json
import signal

import faults
import faults_disks
import faults_files
import faults_others
import faults_signals
import lab as lab_lib
import pytest
import runs
import tiny_main

from flatmatch_jax import models


@pytest.fixture(scope='module')
def lab(tmp_path_factory):
  folder = tmp_path_factory.mktemp('faults')
  short = faults.COMMAND | {'args': ('--config.method_args.threshold=0.1',)}
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(models, 'create', tiny_main.create)
    yield lab_lib.start(folder, folder / 'finished', 0, **short)


def seconds_of(workdir):
  step = runs.saved_steps(workdir)[-1]
  notes = workdir / 'checkpoints' / str(step) / 'notes' / 'metadata'
  return json.loads(notes.read_text())['seconds']


def test_run_that_is_hurt_in_every_way_ends_with_the_same_bits(lab):
  workdir = lab.folder / 'hurt'
  killed = lab.stop(workdir, 'write', 8)
  assert list((workdir / 'checkpoints').glob('*tmp*'))
  runs.go_on(killed, signal.SIGKILL)
  assert runs.saved_steps(workdir) == []
  faults_signals.ask_to_stop(lab, workdir, signal.SIGTERM, 'compile')
  assert runs.saved_steps(workdir) == [1]
  before_steps = seconds_of(workdir)
  faults_signals.ask_to_stop(lab, workdir, signal.SIGINT, 'write', 5)

  room = faults_disks.size_of_latest(workdir) // 10
  full = lab.hurt(workdir, 'disk', room)
  previous, latest = runs.saved_steps(workdir)
  faults_disks.assert_full(workdir, full, latest)

  checkpoint = workdir / 'checkpoints' / str(latest)
  faults_files.truncate(lab.random('truncate'), checkpoint / 'notes')
  first = lab.stop(workdir, 'step', 1)
  before = runs.hashes(workdir)
  second = lab.run(workdir)
  lab_lib.assert_refused(second, f'in use by process {first.pid} on ')
  assert runs.hashes(workdir) == before
  _, said = runs.go_on(first, signal.SIGKILL)
  assert f'The checkpoint of step {latest} is damaged' in said
  assert f'Resuming from step {previous} of' in said
  assert 'No TensorBoard events: no tensorflow' in said

  faults_others.clock_jump(lab, workdir, -2 * faults_others.DAY)
  # The time before a signal counts, or resumed runs would look fast.
  assert before_steps < seconds_of(workdir)


def test_fault_that_cannot_be_made_here_is_not_passed_over(monkeypatch, capsys):
  monkeypatch.delenv('FAULTS_MAY_MOUNT', raising=False)
  row, kept = faults.attempt(None, 'full disk', faults_disks.full_disk)
  assert row.startswith('| full disk | 0 | not tried: mounting ')
  assert kept
  assert row in capsys.readouterr().err


def test_fault_that_loses_something_is_told(capsys):
  def fault(lab):
    assert lab, 'step 3 is gone'

  row, kept = faults.attempt(None, 'clock', fault)
  assert (row, kept) == ('| clock | – | LOST: see above |', False)
  assert 'step 3 is gone' in capsys.readouterr().err
