"""Any number of devices gives one result.

The sums over a batch run in another order on other devices, so each may differ
in its last bit, 6e-8 of it; three steps later the difference has passed through
norms, divisions and the direction of ε. Leaves agree to 1e-4 of their values,
and to 1e-6 near zero.
"""

from collections import Counter
import functools
import os

from conftest import NUM_CLASSES, Setup, compile_step, make_batch, run_steps
import flax.linen as nn
import jax
import pytest
import runs
from trees import assert_close

from benchmarks import hlo
from flatmatch_jax import methods
from flatmatch_jax.methods.base import Method
from flatmatch_jax.models.layers import predict
from flatmatch_jax.step.forward import LAYOUTS
from flatmatch_jax.step.recipes import RECIPES
from flatmatch_jax.system import sharding
from flatmatch_jax.types import Head

LABELED, UNLABELED = 16, 32
FEATURES = 8

# Each method with a state, each recipe and each layout at least once: method,
# recipe, layout, and what else there is.
CASES = {
  'fixmatch': ('fixmatch', 'plain', 'split', {}),
  'flexmatch': ('flexmatch', 'sharp_labeled', 'split', {}),
  'freematch': ('freematch', 'plain', 'joint', {'microbatches': 2}),
  'flatmatch': ('freematch', 'flatmatch', 'split', {'rho': 0.5}),
  'flatmatch_e': ('freematch', 'flatmatch_e', 'joint', {'rho': 0.5}),
  'fix': ('freematch', 'flatmatch_fix', 'clean_strong', {}),
  'official': ('freematch', 'flatmatch_official', 'split', {'groups': 2}),
  'dash': ('dash', 'sharp_all', 'split', {}),
  'softmatch': ('softmatch', 'sharp_unlabeled', 'clean_strong', {}),
  'mixmatch': ('mixmatch', 'plain', 'split', {}),
  'remixmatch': ('remixmatch', 'plain', 'split', {}),
  'mpl': ('mpl', 'flatmatch_last', 'split', {}),
  'adamatch': ('adamatch', 'flatmatch', 'split', {}),
  'debiaspl': ('debiaspl', 'plain', 'split', {}),
  'comatch': ('comatch', 'plain', 'split', {}),
  'simmatch': ('simmatch', 'plain', 'split', {}),
  'saw': ('saw', 'plain', 'split', {}),
  'daso': ('daso', 'plain', 'split', {}),
  'sam': ('supervised', 'sam', 'split', {}),
}


# Bytes of a batch that all devices must have. FlexMatch and SAW enter guesses
# into the table of all images, and DASO labeled features into a queue of each
# class; (Re)MixMatch mix each image with any other.
MIXED = 8 * 8 * 4 + 4 * NUM_CLASSES  # An image, and its label.
GATHERED = {
  'flexmatch': UNLABELED * 17,
  'saw': UNLABELED * 17,
  'daso': LABELED * 4 * (FEATURES + 4),
  'mixmatch': (LABELED + 2 * UNLABELED) * MIXED,
  'remixmatch': (LABELED + 3 * UNLABELED) * MIXED,
}


class Net(nn.Module):
  """One convolution and BatchNorm: these tests compile many programs."""

  heads: tuple[Head, ...] = ()

  @nn.compact
  def __call__(self, x, train):
    x = nn.Conv(FEATURES, (3, 3), 2)(x)
    x = nn.BatchNorm(use_running_average=not train, momentum=0.0)(x)
    x = nn.leaky_relu(x).mean((1, 2))
    return predict(x, NUM_CLASSES, self.heads, train, nn.Dense)


@functools.cache
def setup_of(case):
  method, recipe, layout, options = CASES[case]
  return Setup(method, recipe, layout, Net, **options)


def batch_of(case, seed=0, times=1):
  setup = setup_of(case)
  size = times * LABELED, times * UNLABELED
  batch = make_batch(seed, *size, views=setup.method.views)
  if setup.recipe.fixed:
    batch = batch._replace(fixed=make_batch(seed + 50, *size).labeled)
  return batch


@functools.cache
def compile_case(case, devices, times=1):
  mesh = sharding.make_mesh(devices=jax.devices()[:devices])
  batch = jax.eval_shape(lambda: batch_of(case, times=times))
  return compile_step(setup_of(case), batch, mesh)


def test_cases_have_all_states_recipes_and_layouts():
  stateful = set()
  for name in methods.METHODS:
    method = methods.asks(name)
    if method.init is not Method._field_defaults['init']:
      stateful.add(name)
  named, recipes, layouts, options = zip(*CASES.values(), strict=True)
  assert stateful <= set(named)
  assert set(recipes) == set(RECIPES)
  assert set(layouts) == set(LAYOUTS)
  assert {'groups', 'microbatches'} <= {key for o in options for key in o}


def sent(case, times=1):
  """What eight devices sum, as bytes of arrays, and bytes that they gather.

  They send nothing else.
  """
  sums: Counter[int] = Counter()
  rows = 0
  for c in hlo.collectives(compile_case(case, 8, times).as_text()):
    assert c.kind in ('all-reduce', 'all-gather')
    if c.kind == 'all-reduce':
      sums.update(c.times * c.arrays)
    else:
      rows += c.times * c.bytes
  return sums, rows


@pytest.mark.parametrize('case', CASES)
def test_one_and_more_devices_agree_and_keep_their_images(case):
  batches = [batch_of(case, seed) for seed in range(3)]
  results = []
  # Two devices as eight, but for their number: once for each kind of sum.
  some = ('flatmatch_e', 'flexmatch', 'mixmatch', 'comatch')
  for devices in (1, 2, 8) if case in some else (1, 8):
    mesh = sharding.make_mesh(devices=jax.devices()[:devices])
    step = compile_case(case, devices)
    results.append(run_steps(setup_of(case), step, mesh, batches))
    (state, _) = results[-1]
    assert all(
      x.sharding.num_devices == devices for x in jax.tree.leaves(state)
    )
  one, *others = results
  assert int(one[0].step) == 3
  for other in others:
    assert_close(one, other)
  if case == 'comatch':
    return  # Compares all images of a batch: they must meet.
  sums, rows = sent(case)
  assert rows == GATHERED.get(case, 0)
  state = jax.eval_shape(setup_of(case).init)
  kept = jax.tree.leaves((state.params, state.method))
  assert max(sums) <= max(4 * leaf.size for leaf in kept)
  # Twice the batch: sums stay as they are.
  assert sent(case, times=2) == (sums, 2 * rows)


# Without `settle` XLA ends this process: two programs wait for each other.
OVERLAP = """
import jax, jax.numpy as jnp
from flatmatch_jax.system import sharding

mesh = sharding.make_mesh()
x = jax.device_put(jnp.ones((64, 256)), sharding.over_batch(mesh))
w = jax.device_put(jnp.full((256, 256), 1e-3), sharding.replicated(mesh))
loss = lambda w, x: jnp.tanh(x @ w).mean()
step = jax.jit(lambda w, x: w - 1e-6 * jax.grad(loss)(w, x))
look = jax.jit(loss)
for _ in range(300):
  seen = [sharding.settle(look(w, x)) for _ in range(5)]
  w = sharding.settle(step(w, x))
print('done', jax.device_count())
"""


def test_programs_of_virtual_devices_do_not_wait_for_ever(tmp_path):
  flag = '--xla_cpu_collective_call_terminate_timeout_seconds=10'
  env = os.environ | {'XLA_FLAGS': flag}
  done = runs.python('-c', OVERLAP, env=env, cwd=tmp_path)
  assert done.stdout == 'done 8\n', done.stderr
