"""A trace of a few steps, where a config asks for one."""

import gzip
import json

import jax
import pytest
import tiny_main

from configs import digits
from flatmatch_jax import models
from flatmatch_jax.run import checkpoint, progress
from flatmatch_jax.system.trace import Trace
from flatmatch_jax.training import loop


def traced_steps(folder):
  """The steps marked in the only trace of a folder."""
  (path,) = folder.glob('plugins/profile/*/*.json.gz')
  with gzip.open(path) as file:
    events = json.load(file)['traceEvents']
  numbers = [event.get('args', {}).get('step_num') for event in events]
  return sorted({int(number) for number in numbers if number})


def test_a_run_traces_as_many_steps_as_asked_for(tmp_path, monkeypatch, capfd):
  monkeypatch.setattr(models, 'create', tiny_main.create)
  monkeypatch.setattr(progress, '_tensorboard_writers', lambda _: [None])
  config = digits.get_config('method=supervised')
  config.update(steps=6, batch_size=8, unlabeled_batch_size=8, profile_steps=2)
  loop.train_and_evaluate(config, str(tmp_path))
  assert traced_steps(tmp_path / 'tensorboard') == [3, 4]
  assert 'TensorBoard' in capfd.readouterr().err


def take(trace, steps):
  """Steps that compute next to nothing, until the run ends."""
  step = jax.jit(lambda x: x + 1)
  pending = jax.numpy.zeros(())
  for number in steps:
    with trace.step(number, pending):
      pending = step(pending)
  trace.close(pending)


@pytest.mark.parametrize(
  ('steps', 'found'), [(range(11, 15), [13, 14]), (range(11, 19), [13, 14, 15])]
)
def test_a_trace_begins_after_two_steps_and_ends_with_the_run(
  steps, found, tmp_path
):
  take(Trace(tmp_path, start=10, steps=3, shown=tmp_path), steps)
  assert traced_steps(tmp_path) == found


def test_nothing_is_traced_by_default(tmp_path, capfd):
  number = digits.get_config().profile_steps
  take(Trace(tmp_path, start=0, steps=number, shown=tmp_path), range(1, 9))
  assert not list(tmp_path.iterdir())
  assert not capfd.readouterr().err


def test_run_that_ends_before_its_trace_says_so(tmp_path, capfd):
  take(Trace(tmp_path, start=10, steps=3, shown=tmp_path), [11, 12])
  assert not list(tmp_path.iterdir())
  said = capfd.readouterr().err
  assert said.count('Nothing is traced') == 1
  assert 'ended before step 13' in said


def test_steps_outside_are_waited_for_before_a_trace_begins_and_ends(
  tmp_path, monkeypatch
):
  happened = []

  class Pending:
    def __init__(self, step):
      self._step = step

    def block_until_ready(self):
      happened.append(self._step)

  for name in ('start_trace', 'stop_trace'):
    note = lambda *_, name=name: happened.append(name)
    monkeypatch.setattr(jax.profiler, name, note)
  trace = Trace(tmp_path, start=10, steps=3, shown=tmp_path)
  for step in range(11, 19):
    with trace.step(step, Pending(step - 1)):
      pass
  trace.close(Pending(18))
  assert happened == [12, 'start_trace', 15, 'stop_trace']


def test_trace_survives_an_error_of_the_last_checkpoint(tmp_path, monkeypatch):
  monkeypatch.setattr(models, 'create', tiny_main.create)
  monkeypatch.setattr(progress, '_tensorboard_writers', lambda _: [None])

  def fail(checkpoints):
    raise OSError(5, 'Input/output error')

  monkeypatch.setattr(checkpoint.Checkpoints, 'close', fail)
  config = digits.get_config('method=supervised')
  config.update(steps=3, batch_size=8, unlabeled_batch_size=8, profile_steps=2)
  with pytest.raises(OSError, match='Input/output'):
    loop.train_and_evaluate(config, str(tmp_path))
  assert traced_steps(tmp_path / 'tensorboard') == [3]
