"""What devices send each other in the step that loop.py compiles.

Sampling, weak and strong views included, on eight virtual devices. Every array
that is sent follows from the shapes of the network, and none from the batch.
"""

from collections import Counter

import jax
import pytest

from benchmarks import hlo, steps
from configs import cifar10
from flatmatch_jax.data import augment
from flatmatch_jax.system import sharding
from flatmatch_jax.training import engine, program
from flatmatch_jax.types import DatasetInfo

CLASSES = 10
IMAGES, SHAPE = 100, (8, 8, 3)
FLOAT = 4  # Bytes.

# Of RandAugment: how many turns the slowest device needs for each of its
# operations and kinds.
TURNS = 3 * 5 * FLOAT

# By method and layout: BatchNorm populations, and how many are trained on; sums
# of [K], and scalars, of the losses, thresholds and metrics. FreeMatch under
# FlatMatch takes its thresholds in both passes.
CASES = {
  ('fixmatch', 'split'): (3, 2, 1, 5),
  ('flatmatch', 'split'): (3, 2, 7, 9),
  ('flatmatch_e', 'split'): (3, 2, 7, 9),
  ('freematch', 'joint'): (1, 1, 5, 8),
}


def compile_step(method, layout, batch_size):
  """The collectives of the compiled step, and the shapes of its state."""
  config = cifar10.get_config(f'method={method}')
  config.model, config.batch_norm = 'wrn_10_1', layout
  config.batch_size, config.unlabeled_batch_size = batch_size, 2 * batch_size
  mesh = program.make_mesh(config)
  info = DatasetInfo(CLASSES, IMAGES, IMAGES, (1,) * CLASSES)
  made = program.create(config, info, SHAPE, mesh=mesh)
  shapes = jax.eval_shape(made.init, jax.eval_shape(jax.random.key, 0))
  everywhere = sharding.replicated(mesh)
  data = steps.data_shapes(IMAGES, SHAPE, 40, mesh)
  over_batch = sharding.over_batch(mesh)
  sample = program.make_sample(config, made.views, over_batch)
  compiled = engine.compile_step(
    lambda state, data: made.step(state, sample(data, state)),
    sharding.abstract_state(mesh, shapes),
    data,
    (sharding.of_state(mesh, shapes), everywhere),
  )
  return hlo.collectives(compiled.as_text()), shapes


def expected(shapes, populations, trained, class_sums, scalars):
  """Bytes of the arrays to be summed, by how many there are of each."""
  # Norms that the port computes nothing with.
  dead = {f'stage{stage}_block1' for stage in (2, 3)}
  leaves = jax.tree_util.tree_leaves_with_path
  keys = lambda path: [entry.key for entry in path]
  is_dead = lambda path: keys(path)[0] in dead and 'norm1' in keys(path)
  gradients = [x for path, x in leaves(shapes.params) if not is_dead(path)]
  means = [
    x
    for path, x in leaves(shapes.batch_stats)
    if 'mean' in keys(path) and not is_dead(path)
  ]
  sizes = lambda arrays: Counter(FLOAT * x.size for x in arrays)
  total = Counter({CLASSES * FLOAT: class_sums})
  total[FLOAT] += scalars
  for _ in range(populations):
    total += sizes(2 * means)  # The means of x and of its square.
  for _ in range(trained):
    # That of the variance follows from the gradient of the scale.
    total += sizes(gradients + means)
  return total, len(means)


def check(case, batch_size, turns):
  found, shapes = compile_step(*case, batch_size)
  populations, trained, *others = CASES[case]
  sums, norms = expected(shapes, populations, trained, *others)
  sums[TURNS] += turns
  assert {c.kind for c in found} == {'all-reduce'}
  # XLA for CPUs keeps them in order only outside of loops.
  assert {c.times for c in found} == {1}
  sent = Counter(size for c in found for size in c.arrays)
  assert sent == +sums
  assert sum(c.bytes for c in found) == sum(
    size * number for size, number in sums.items()
  )
  # One a norm, forward and backward; one for the gradients of each pass, and
  # two for the losses, where none of the others can take them along.
  passes = 2 if 'flatmatch' in case[0] else 1
  messages = len(found)
  depth = norms * (populations + trained)
  assert depth < messages <= depth + passes + turns + 2


@pytest.mark.parametrize(
  'case', [('fixmatch', 'split'), ('flatmatch_e', 'split')], ids='-'.join
)
def test_gradients_moments_and_scalars_are_sent(case):
  check(case, 8, turns=1)


@pytest.mark.parametrize('case', [*CASES][1:], ids='-'.join)
def test_a_larger_batch_sends_no_more(case, monkeypatch):
  """With weak views for strong ones, which take long to compile."""
  weak = lambda key, images, pad, flip, *_: augment.weak(key, images, pad, flip)
  monkeypatch.setattr(augment, 'strong', weak)
  check(case, 24, turns=0)
