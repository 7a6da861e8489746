"""Steps compiled for GPUs: arithmetic, and the real step with the wheels."""

import importlib.util

import pytest

from benchmarks import compiled_step, gpu_compile
from configs import cifar10_t4
from flatmatch_jax.types import UserError

HAS_COMPILER = importlib.util.find_spec('jax_cuda12_plugin') is not None


def test_what_only_moves_elements_is_counted():
  text = """
%fused (p: f32[64,32]) -> f32[32,64] {
  %p = f32[64,32]{1,0} parameter(0)
  ROOT %t = f32[32,64]{1,0} transpose(%p), dimensions={1,0}
}

ENTRY %main (x: f32[64,32]) -> f32[32,64] {
  %x = f32[64,32]{1,0} parameter(0)
  %wrapped_transpose.1 = f32[32,64]{1,0} fusion(%x), kind=kInput, \
calls=%fused, metadata={op_name="kernel"}
  %c = f32[32,64]{1,0} copy(%wrapped_transpose.1)
  ROOT %a = f32[32,64]{1,0} add(%c, %c)
}
"""
  size = 64 * 32 * 4
  total, moved = gpu_compile.moves(text)
  assert total == (2 + 2 + 3) * size
  assert moved == {'kernel': 2 * size, 'c': 2 * size}


def test_unknown_gpus_are_refused():
  with pytest.raises(UserError, match='Known: h100'):
    gpu_compile.make_mesh('p100', 1)


@pytest.mark.skipif(HAS_COMPILER, reason='The compiler is there.')
def test_a_missing_compiler_is_named():
  with pytest.raises(UserError, match='pip install --no-deps jax-cuda12'):
    gpu_compile.make_mesh('t4', 1)


@pytest.mark.skipif(
  not HAS_COMPILER,
  reason='NOT COMPILED FOR GPUS: jax-cuda12-plugin is not installed.',
)
def test_the_real_step_compiles_for_a_gpu():
  mesh = gpu_compile.make_mesh('t4', 1)
  row = gpu_compile.measure(cifar10_t4.get_config(), mesh, None)
  assert row['convolutions'] > 20  # All by cuDNN.
  assert row['held_bytes'] < gpu_compile.GPUS['t4'].memory
  assert row['moved_bytes'] < 0.1 * row['bytes']


def test_a_table_compares_with_fixmatch():
  config = cifar10_t4.get_config('method=fixmatch')
  row = compiled_step.describe(config, 1, 1) | {
    'gpu': 't4',
    'flops': 2e9,
    'bytes': 4e9,
    'held_bytes': 1e9,
    'temporary_bytes': 5e8,
    'moved_bytes': 1e9,
    'convolutions': 40,
    'collectives': {},
    'compile_cpu_seconds': 30,
  }
  other = row | {'method': 'flatmatch', 'bytes': 5e9}
  last = gpu_compile.table([other, row]).splitlines()[-1]
  assert '| 1 t4 | cifar10 | fast_128_256_512 | flatmatch |' in last
  assert '| 5.00 | 1.250 | 1.00 | 0.50 | 40 | 20.0% |' in last
