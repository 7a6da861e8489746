"""The arithmetic of the benchmarks of speed, on numbers that are known."""

import itertools
import json
import re

from conftest import Setup, make_batch
import jax
import numpy as np
import pytest

from benchmarks import op_times, pages, scaling, steps, throughput
from flatmatch_jax.types import DatasetInfo, UserError


class Fake:
  """Stands in for a compiled part; takes as long as it is told."""

  def __init__(self, name, seconds, log):
    self._name, self._seconds, self._log = name, seconds, log

  def run(self):
    self._log.append(self._name)
    return self._seconds, 2 * self._seconds

  def counts(self):
    return {'flops': 6e9, 'bytes': 1e9}

  compile_seconds = 1.0


@pytest.fixture
def log():
  return []


@pytest.fixture
def timed(log):
  seconds = {'sample': 0.1, 'update a': 0.2, 'a': 1.0, 'update b': 0.3, 'b': 2}
  return {name: Fake(name, s, log) for name, s in seconds.items()}


def test_every_part_runs_once_a_round_after_one_or_another(timed, log):
  found = throughput.rounds(timed, seconds=0)
  assert {rows.shape for rows in found.values()} == {(3, 2)}
  order = [log[i : i + 5] for i in range(0, len(log), 5)]
  assert all(sorted(part) == sorted(timed) for part in order)
  pairs = set(itertools.pairwise(log[5:]))
  assert len(pairs) > 1.5 * len(timed)  # A cycle has as many as parts.


def test_shares_and_ratios_are_those_of_a_round(timed, monkeypatch):
  monkeypatch.setattr(throughput, 'host_seconds', lambda step: (0.01, 2.0))
  times = throughput.rounds(timed, seconds=0)
  row = throughput.row('b', 'a', times, timed, images=64)
  assert row['ratio'] == row['cpu_ratio'] == [2, 2, 2]
  assert row['images_per_second'] == [32, 32, 32]
  assert row['gflop_per_cpu_second'] == [1.5, 1.5, 1.5]
  medians = {part: share[1] for part, share in row['shares'].items()}
  assert medians == {'sample': 0.05, 'network': 0.8, 'update': 0.15}
  assert row['host_share'] == 0.005


@pytest.mark.usefixtures('tiny_network')
def test_real_parts_are_built_and_timed():
  names = ['pseudo_label', 'pseudo_label+flatmatch_e']  # No strong views.
  timed = throughput.build(names, 'wrn_10_1', batch_size=8)
  assert sorted(timed) == sorted(
    ['sample', *names, *(f'update {name}' for name in names)]
  )
  before = jax.device_get(timed[f'update {names[1]}'].state)
  times = throughput.rounds(timed, seconds=0)
  for name in names:
    row = throughput.row(name, names[0], times, timed, images=64)
    assert all(
      row['counts']['whole']['flops'] > row['counts'][part]['flops'] > 0
      for part in ('sample', 'update')
    )
    assert row['host_ms'] > 0
  # An update is all of it: parameters, averages, momenta and M.
  after = jax.device_get(timed[f'update {names[1]}'].state)
  for part in ('params', 'ema_params', 'perturb'):
    for old, new in zip(
      jax.tree.leaves(getattr(before, part)),
      jax.tree.leaves(getattr(after, part)),
      strict=True,
    ):
      assert (old != new).any(), part
  assert after.step == before.step + 4


@pytest.mark.usefixtures('tiny_network')
def test_numbers_of_devices_are_compared_in_one_run(monkeypatch):
  monkeypatch.setattr(throughput, 'host_seconds', lambda step: (0.01, 2.0))
  timed = {
    number: throughput.build(['pseudo_label'], 'wrn_10_1', 8, number)
    for number in (1, 2)
  }
  one, two = (
    len(timed[n]['pseudo_label'].state.step.devices()) for n in (1, 2)
  )
  assert (one, two) == (1, 2)
  flops = [timed[n]['pseudo_label'].counts()['flops'] for n in (1, 2)]
  assert flops[1] == pytest.approx(flops[0], rel=0.05)  # Of all devices.
  before = {'pseudo_label': np.full((3, 2), 3.0)}
  times = {name: np.full((3, 2), 1.5) for name in timed[2]}
  name = 'pseudo_label'
  row = throughput.row(name, name, times, timed[2], 64, before)
  assert row['faster'] == [2, 2, 2]


def test_devices_that_are_not_there_are_refused(monkeypatch):
  monkeypatch.setattr(throughput.os, 'sched_getaffinity', lambda _: range(4))
  assert throughput.check_devices([1, 4, 4]) == [1, 4]
  for wrong in ([1, 5], [2, 1], [0]):
    with pytest.raises(UserError, match='1 first'):
      throughput.check_devices(wrong)


def test_methods_that_take_other_images_are_refused():
  assert throughput.images_of(['fixmatch', 'flatmatch_e'], 'wrn_10_1', 8) == 64
  assert throughput.images_of(['supervised'], 'wrn_10_1', 8) == 8
  for other in ('mixmatch', 'pi_model', 'fixmatch+flatmatch_fix'):
    with pytest.raises(UserError, match=re.escape(f'{other} takes')):
      throughput.images_of(['fixmatch', other], 'wrn_10_1', 8)


def test_batches_keep_the_ratio_of_their_method():
  sizes = lambda method: (
    steps.config_of(method, 'wrn_10_1', 8).unlabeled_batch_size
  )
  assert sizes('fixmatch') == 56
  assert sizes('mixmatch') == 8


def test_results_of_other_devices_are_kept(tmp_path):
  file = tmp_path / 'results.json'
  result = {'model': 'a', 'batch_size': 8, 'devices': 2, 'rounds': 1}
  given = [result, result | {'devices': 1}, result | {'rounds': 2}]
  for one in given:
    file.write_text(json.dumps(throughput.kept(file, [one])))
  assert json.loads(file.read_text()) == [given[1], given[2]]


def test_a_table_takes_the_place_between_the_marks(tmp_path):
  page, marks = tmp_path / 'page.md', ('<begin>', '<end>')
  page.write_text('before\n<begin>\nold\n<end>\nafter\n')
  for text in ('| a |', '| b |'):
    pages.put_between(page, marks, text)
    expected = f'before\n<begin>\n\n{text}\n\n<end>\nafter\n'
    assert page.read_text() == expected
  for wrong in ('<begin> and no more', '<end> <begin>', ''):
    page.write_text(wrong)
    with pytest.raises(UserError, match='<begin> and, below it, <end>'):
      pages.put_between(page, marks, 'new')
    assert page.read_text() == wrong


def test_growth_is_exponent_and_slope():
  x = np.array([1, 2, 4, 8])
  assert scaling.growth(x, 3.0 * x**2) == pytest.approx((2, 36))
  exponent, slope = scaling.growth(x, 1e9 + 5.0 * x)
  assert exponent == pytest.approx(0, abs=1e-6)
  assert slope == pytest.approx(5)


def test_points_of_a_size_change_nothing_else():
  row = scaling.BASE | {'method': 'flatmatch', 'flops': 1}
  rows = [row | {'batch': 8}, row, row | {'batch': 8, 'width': 2}]
  found = scaling.points(rows, 'batch', 'flatmatch')
  assert [r['batch'] for r in found] == [4, 8]


PROGRAM = """
%taken (p0: u8[1000,10], p1: s32[4]) -> u8[4,10] {
  %p0 = u8[1000,10]{1,0} parameter(0)
  %p1 = s32[4]{0} parameter(1)
  ROOT %gather = u8[4,10]{1,0} gather(%p0, %p1), slice_sizes={1,10}
}

%whole (p2: u8[1000,10], p3: s32[4]) -> u8[4,10] {
  %p2 = u8[1000,10]{1,0} parameter(0)
  %p3 = s32[4]{0} parameter(1)
  %gather.1 = u8[4,10]{1,0} gather(%p2, %p3), slice_sizes={1,10}
  ROOT %other = u8[4,10]{1,0} add(%gather.1, %p2)
}

ENTRY %main (a: u8[1000,10], b: s32[4]) -> u8[4,10] {
  %a = u8[1000,10]{1,0} parameter(0)
  %b = s32[4]{0} parameter(1)
  %first = u8[4,10]{1,0} fusion(%a, %b), kind=kLoop, calls=%taken
  ROOT %second = u8[4,10]{1,0} fusion(%a, %b), kind=kLoop, calls=%whole
}
"""


def test_of_an_array_that_is_gathered_from_counts_what_is_taken():
  assert scaling.not_read(PROGRAM) == 1000 * 10 - 4 * 10


def test_a_step_of_flexmatch_does_not_go_through_its_table():
  setup, batch = Setup('flexmatch'), make_batch()
  count = lambda compiled: (
    compiled.cost_analysis()['bytes accessed']
    - scaling.not_read(compiled.as_text())
  )
  found = []
  for number in (1000, 101_000):
    info = DatasetInfo(4, number, number, (1,) * 4)
    state = setup.init()
    state = state.replace(method=setup.method.init(None, None, info))
    jitted = jax.jit(setup.step, donate_argnums=0)
    found.append(count(jitted.lower(state, batch).compile()))
  # One pass over the larger table would read 400,000 bytes.
  assert abs(found[1] - found[0]) < 1000


@pytest.mark.parametrize(
  ('name', 'expected'),
  [
    ('jit(step)/jvp(WideResNet)/stem/conv_general_dilated', 'convolutions f'),
    ('jit(f)/transpose(jvp(WideResNet))/x/conv_general_dilated', 'convolution'),
    ('jit(step)/transpose(jvp(WideResNet))/norm/reduce_sum', 'sums backward'),
    ('jit(step)/jvp(WideResNet)/norm1/mul', 'norms, activations'),
    ('jit(step)/gather', 'sampling'),
    ('jit(step)/jit(_where)/select_n', 'all else'),
    ('', 'copies'),
  ],
)
def test_time_is_summed_by_what_jax_asked_for(name, expected):
  known = {'fusion.1': ('fusion', name)}
  event = {'ph': 'X', 'name': 'fusion.1', 'dur': 2.0}
  spent = op_times.total([event, event, event | {'name': 'python'}], known)
  ((found, microseconds),) = spent.items()
  assert found.startswith(expected)
  assert ('backward' in found) == ('transpose' in name)
  assert microseconds == 4.0
