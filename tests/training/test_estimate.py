"""How long a run takes, said before it starts and once it runs."""

import re
import time
import types

import jax.numpy as jnp
import numpy as np
import pytest

from configs import cifar10, folder, imagenet, npz
from flatmatch_jax.system import sharding
from flatmatch_jax.training import estimate

MINUTE, HOUR, DAY = 60, 3600, 24 * 3600


@pytest.mark.parametrize(
  ('seconds', 'text'),
  [
    (0.2, '0 s'),
    (45.4, '45 s'),
    (59.4, '59 s'),
    (59.6, '1 min'),
    (50 * MINUTE, '50 min'),
    (59.6 * MINUTE, '1 h'),
    (3 * HOUR + 20 * MINUTE, '3 h 20 min'),
    (23 * HOUR + 59.6 * MINUTE, '1 day'),
    (25 * HOUR, '1 day 1 h'),
    (2 * DAY + 4 * HOUR, '2 days 4 h'),
    (1234 * DAY, '1,234 days'),
  ],
)
def test_durations_have_two_units_at_most(seconds, text):
  assert estimate.duration(seconds) == text


class Engine:
  """With a compiled step of so many FLOPs, if they are known."""

  def __init__(self, mesh, flops=None):
    self.program = types.SimpleNamespace(mesh=mesh)
    self._found = {} if flops is None else {'flops': flops}
    self.compiled = types.SimpleNamespace(cost_analysis=lambda: self._found)
    self.clock = 0.0

  def step(self, state):
    """Takes 30 s at first, and then 0.5 s."""
    self.clock += 30.0 if self.clock == 0 else 0.5
    return state.at[0].add(1), {}


@pytest.fixture
def config(monkeypatch):
  """Of 1,000 steps, on devices of 1 GFLOP/s and under a clock of its own."""
  monkeypatch.setattr(estimate, 'throughput', lambda mesh, dtype: 1e9)
  config = cifar10.get_config()
  config.steps = 1000
  return config


@pytest.fixture(scope='module')
def mesh():
  return sharding.make_mesh()


def test_estimate_is_flops_by_throughput(config, mesh, capfd):
  estimate.Estimate(config).compiled(401, Engine(mesh, 20e9), None)
  (line,) = capfd.readouterr().err.splitlines()
  assert 'About 3 h 20 min for 600 steps on this machine' in line
  assert '20.00 GFLOP per step and device' in line


def test_quick_steps_are_tried_out(config, mesh, monkeypatch, capfd):
  engine, state = Engine(mesh, 1e9), jnp.zeros(1)  # A second by its FLOPs.
  monkeypatch.setattr(time, 'perf_counter', lambda: engine.clock)
  estimate.Estimate(config).compiled(401, engine, state)
  assert 'About 5 min for 600 steps' in capfd.readouterr().err
  np.testing.assert_array_equal(state, 0)


def test_nothing_is_printed_without_flops(config, mesh, capfd):
  estimate.Estimate(config).compiled(1, Engine(mesh), None)
  config.microbatches = 2  # XLA counts a loop's body once.
  estimate.Estimate(config).compiled(1, Engine(mesh, 20e9), None)
  assert capfd.readouterr().err == ''


def run_at(seconds_per_step, config, monkeypatch, start=0):
  """The steps of a run that take so long each."""
  monkeypatch.setattr(time, 'perf_counter', lambda: clock)
  timing, clock = estimate.Estimate(config), 100.0
  for step in range(start + 1, config.steps + 1):
    timing.step(step)
    clock += seconds_per_step


def test_ten_steps_give_a_measured_number_once(config, monkeypatch, capfd):
  run_at(10.0, config, monkeypatch, start=389)
  (line,) = capfd.readouterr().err.splitlines()
  assert 'About 1 h 40 min left, measured over 10 steps.' in line


def test_short_runs_stay_quiet(config, monkeypatch, capfd):
  run_at(0.119, config, monkeypatch)
  assert capfd.readouterr().err == ''
  run_at(0.121, config, monkeypatch)
  assert 'About 2 min left' in capfd.readouterr().err


def test_more_than_a_day_on_a_cpu_is_warned_of_once(config, mesh, capfd):
  timing = estimate.Estimate(config)
  timing.compiled(1, Engine(mesh, 86.3e9), None)
  assert 'Warning' not in capfd.readouterr().err
  timing.compiled(1, Engine(mesh, 86.5e9), None)
  timing.compiled(1, Engine(mesh, 86.5e9), None)
  printed = capfd.readouterr().err
  assert printed.count('Warning: the run takes more than a day') == 1
  assert 'configs/cifar10_fast.py' in printed


def test_measured_days_are_warned_of_too(config, monkeypatch, capfd):
  run_at(90.0, config, monkeypatch)
  assert 'more than a day' in capfd.readouterr().err


def test_accelerators_are_not_warned_of(config, mesh, monkeypatch, capfd):
  monkeypatch.setattr(estimate.jax, 'default_backend', lambda: 'gpu')
  estimate.Estimate(config).compiled(1, Engine(mesh, 900e9), None)
  assert 'Warning' not in capfd.readouterr().err


@pytest.mark.parametrize(
  ('config', 'words'),
  [
    (cifar10.get_config(), 'configs/cifar10_fast.py'),
    (folder.get_config('fast=false'), 'configs/folder.py:fast=true'),
    (folder.get_config('fast=true'), 'fewer steps'),
    (npz.get_config('fast=false'), 'configs/npz.py:fast=true'),
    (imagenet.get_config(), 'fewer steps'),
  ],
)
def test_faster_setting_goes_with_the_data(config, words):
  assert words in estimate.faster(config)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_throughput_is_a_speed(mesh, dtype):
  assert 1e6 < estimate.throughput(mesh, dtype) < 1e18


def test_log_has_the_estimate_before_the_first_step(tmp_path_factory):
  from runs import STEPS, finished_run

  _, log = finished_run(tmp_path_factory)
  (found,) = re.finditer(
    rf'About \d+ s for {STEPS} steps .* \(by a trial step\)', log
  )
  assert found.start() < log.index('The first step was done')
  # All is compiled by then.
  assert log.index('Compiling the measurements.') < found.start()
  assert 'measured over' not in log
