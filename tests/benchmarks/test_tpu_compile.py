"""The arithmetic behind docs/speed.md, without a TPU's compiler."""

from conftest import TinyNet
import pytest

from benchmarks import compiled_step, hlo_bytes, pod_arithmetic, tpu_compile
from benchmarks.chips import CHIPS, Chip, batch_factor, reduced_bytes, roofline
from configs import cifar10, imagenet
from flatmatch_jax import models
from flatmatch_jax.data.pipeline import Data
from flatmatch_jax.system import sharding
from flatmatch_jax.types import Batch, UserError

CHIP = Chip(flops=100e12, bandwidth=1e12, memory=16e9, links=200e9)


@pytest.mark.parametrize(
  ('asked', 'binds', 'ms'),
  [
    ((1e12, 1e9, 0), 'compute', 10.0),
    ((1e10, 5e9, 0), 'memory', 5.0),
    ((1e10, 1e9, 4e8), 'collectives', 3.0),  # Twice, but for a fourth.
  ],
)
def test_the_roofline_is_the_longest_of_three_times(asked, binds, ms):
  row = roofline(CHIP, *asked, chips=4)
  assert row['binds'] == binds
  assert row['roofline_ms'] == row['ms'][binds] == pytest.approx(ms)


def test_only_an_all_reduce_sends_its_bytes_twice():
  sent = {'all-reduce': (3, 100), 'all-gather': (1, 40), 'all-to-all': (2, 6)}
  assert reduced_bytes(sent) == 100 + 20 + 3


def test_one_chip_sends_nothing():
  assert roofline(CHIP, 1e12, 1e9, 4e8, chips=1)['ms']['collectives'] == 0


@pytest.mark.parametrize(
  ('sizes', 'chips', 'factor'),
  [((64, 448), 64, 1), ((64, 448), 256, 4), ((32, 224), 64, 2), ((8, 8), 1, 1)],
)
def test_batches_grow_until_they_divide(sizes, chips, factor):
  assert batch_factor(sizes, chips) == factor
  assert all(size * factor % chips == 0 for size in sizes)


def test_a_row_is_found_by_all_that_it_is_about():
  config = cifar10.get_config()
  about = tpu_compile.describe(config, 'v5e:2x2', 1, 1, 0.0)
  rows = [about | {'flops': 1}]
  assert compiled_step.find(rows, about) == rows[0]
  for field, value in (('dtype', 'bfloat16'), ('recipe_args.groups', 4)):
    other = cifar10.get_config()
    other.update_from_flattened_dict({field: value})
    other = tpu_compile.describe(other, 'v5e:2x2', 1, 1, 0.0)
    assert compiled_step.find(rows, other) is None


def test_unknown_chips_are_refused():
  with pytest.raises(UserError, match='v5e'):
    tpu_compile.make_mesh('v1:2x2', 0)


def test_data_stays_abstract_and_has_its_true_size():
  mesh = sharding.make_mesh()
  data = compiled_step.abstract_data(cifar10.get_config(), ('weak',), mesh)
  assert isinstance(data, Data)
  assert data.images.shape == (50_000, 32, 32, 3)
  assert data.labeled.shape == (40,)
  data = compiled_step.abstract_data(imagenet.get_config(), ('weak',), mesh)
  assert isinstance(data, Batch)
  assert data.unlabeled['weak'].shape == (224, 224, 224, 3)
  assert data.unlabeled['weak'].sharding == sharding.over_batch(mesh)


@pytest.mark.parametrize(
  ('config', 'fsdp'), [(cifar10, 1), (cifar10, 4), (imagenet, 1)]
)
def test_the_step_is_lowered_for_the_devices_of_a_mesh(
  config, fsdp, monkeypatch
):
  create = lambda name, classes, heads, *rest: TinyNet(classes, heads)
  monkeypatch.setattr(models, 'create', create)
  config = config.get_config('method=flatmatch_e')
  monkeypatch.setattr(sharding, '_LARGE', 256)
  mesh = sharding.make_mesh(fsdp)
  text = compiled_step.lower(config, mesh).as_text()
  # The second kernel, [3, 3, 8, 16].
  assert ('[{}, {}, {}, {"fsdp"}]' in text) == (fsdp > 1)
  assert f'mhlo.num_partitions = {mesh.size} ' in text
  assert 'tensor<50000x3072xui8>' in text or config.dataset == 'imagenet'


def test_arithmetic_counts_the_real_network():
  net = pod_arithmetic.network(cifar10.get_config())
  biases = 16 + 9 * (32 + 64 + 128)  # Which the published count is without.
  assert net.params == 1_467_610 + biases
  assert net.norms == 23  # Of 25; two are dead, as in the port.
  stem = 32 * 32 * 16
  first = 32 * 32 * 32 * 9  # Four blocks of two, and a shortcut.
  second, third = first // 2, first // 4
  assert net.outputs == stem + first + second + third + 10


def test_no_chip_is_asked_for_less_by_more_chips():
  config = cifar10.get_config()
  net = pod_arithmetic.network(config)
  eight, sixteen = (pod_arithmetic.step(config, net, n) for n in (8, 16))
  assert eight.flops == sixteen.flops
  assert eight.reduced == sixteen.reduced
  assert eight.held > sixteen.held
  config.method = 'fixmatch'
  plain = pod_arithmetic.step(config, net, 8)
  assert plain.flops == eight.flops
  assert plain.reduced == eight.reduced
  # As the compiler has it: ε stands between two halves of the step.
  assert (plain.collectives, eight.collectives) == (2 * 23 + 1, 4 * 23 + 2)
  config.method = 'flatmatch_e'  # There ε is known before.
  remembers = pod_arithmetic.step(config, net, 8)
  assert remembers.collectives == plain.collectives
  assert remembers.held > eight.held


def test_lanes_are_filled_by_images_or_by_channels():
  net = pod_arithmetic.network(cifar10.get_config())
  assert pod_arithmetic.spread(net, 512) == 1
  assert pod_arithmetic.spread(net, 56) == 128 / 56
  channels = pod_arithmetic.spread(net, 1)
  assert channels == net.padded / net.outputs < 8


def test_every_dataset_and_network_of_the_paper_is_there():
  found = {(c.dataset, c.model) for c in pod_arithmetic.configurations('uda')}
  assert len(found) == 7
  assert ('imagenet', 'vit_base_16') in found
  assert set(CHIPS) == {'v4', 'v5e', 'v5p', 'v6e'}


def test_a_table_marks_what_binds():
  about = tpu_compile.describe(cifar10.get_config(), 'v5e:2x2', 4, 1, 0.0)
  row = about | roofline(CHIP, 1e10, 5e9, 0, 4)
  row |= {'flops': 1e10, 'bytes': 5e9, 'hbm_bytes': 1e9}
  row['collectives'] = {'all-reduce': {'count': 3, 'bytes': 2e6}}
  last = tpu_compile.table([row]).splitlines()[-1]
  assert '| 4 | 64 + 448 |' in last
  assert last.endswith('| 3 | 2.0 | 0.10 | **5.00** | 0.00 |')
  row |= {'batch_factor': 4, 'fsdp': 2}
  last = tpu_compile.table([row]).splitlines()[-1]
  assert '| 4, state split by 2 | 64 + 448 (4 times) |' in last


def test_bytes_count_padding_and_what_a_gather_takes():
  assert hlo_bytes.padded('bf16[448,8,8,16]{0,3,2,1:T(8,128)(2,1)S(1)}') == (
    512 * 8 * 8 * 16 * 2
  )
  assert hlo_bytes.padded('(f32[3]{0:T(128)}, u8[10,4])') == 3 * 4 + 40
  text = """
%fused (p: u8[100,128]) -> u8[8,128] {
  %p = u8[100,128]{1,0} parameter(0)
  ROOT %g = u8[8,128]{1,0} gather(%p)
}

ENTRY %main (x: u8[100,128]) -> f32[8,128] {
  %x = u8[100,128]{1,0} parameter(0)
  %i = s32[8]{0} constant({...})
  %t = u8[8,128]{1,0} fusion(%x, %i), kind=kCustom, calls=%fused, \
metadata={op_name="jit(f)/gather"}
  ROOT %c = f32[8,128]{1,0} convert(%t), metadata={op_name="jit(f)/add"}, \
backend_config={"estimated_cycles":"77"}
}
"""
  found = list(hlo_bytes.instructions(text))
  assert found == [
    (1024 + 1024 + 32, 0, 'fusion', 'jit(f)/gather', 't'),
    (4096 + 1024, 77, 'convert', 'jit(f)/add', 'c'),
  ]
  parts = [hlo_bytes.part(source, kind) for _, _, kind, source, _ in found]
  assert parts[0] == 'taking and shifting images'
  assert parts[1].startswith('all else')
