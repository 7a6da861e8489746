"""A state split over devices: equal, smaller, and free to move."""

from collections import Counter
import functools

from conftest import (
  NUM_CLASSES,
  Setup,
  TinyNet,
  compile_step,
  make_batch,
  run_steps,
)
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from trees import assert_close

from benchmarks import hlo
from configs import digits
from flatmatch_jax import models
from flatmatch_jax.models.vit import VisionTransformer
from flatmatch_jax.run.checkpoint import Checkpoints
from flatmatch_jax.run.workdir import Workdir
from flatmatch_jax.system import sharding
from flatmatch_jax.training import classify, engine, load, loop
from flatmatch_jax.types import UserError


def vit(heads=(), num_classes=NUM_CLASSES):
  return VisionTransformer(
    num_classes, patch=4, size=64, depth=1, num_heads=2, heads=heads
  )


def create(name, num_classes, heads=(), *_, **__):
  """A network for runs by `models.create`."""
  del name
  return vit(heads, num_classes)


def bytes_of(tree):
  """Of all that one device has of a tree of arrays."""
  first = lambda x: x.addressable_shards[0].data.nbytes
  return sum(map(first, jax.tree.leaves(tree)))


@functools.cache
def trained(network, data, fsdp):
  """FlatMatch-e after three steps on `data` x `fsdp` devices."""
  mesh = sharding.make_mesh(fsdp, jax.devices()[: data * fsdp])
  setup = Setup('freematch', 'flatmatch_e', network=network, mesh=mesh, rho=0.5)
  batches = [make_batch(seed, 16, 32) for seed in range(3)]
  step = compile_step(setup, batches[0], mesh)
  state, metrics = run_steps(setup, step, mesh, batches)
  return step, state, metrics


def split_leaves(tree):
  return [x for x in jax.tree.leaves(tree) if not x.is_fully_replicated]


def test_split_vit_equals_one_device():
  _, one, metrics = trained(vit, 1, 1)
  step, split, other = trained(vit, 2, 4)
  assert_close((one, metrics), (split, other))
  for tree in (split.params, split.ema_params, split.opt_state, split.perturb):
    assert len(split_leaves(tree)) >= 4  # The four matrices of the block.
  # θ and θ + ε; M by itself is not gathered.
  sent = hlo.totals(hlo.collectives(step.as_text()))
  size = sum(x.nbytes for x in split_leaves(split.params))
  assert sent['all-gather'] == (2 * 4, 2 * size)


def test_split_convolutions_equal_one_device(monkeypatch):
  monkeypatch.setattr(sharding, '_LARGE', 256)
  _, one, metrics = trained(TinyNet, 1, 1)
  _, split, other = trained(TinyNet, 4, 2)
  assert_close((one, metrics), (split, other))
  kernel = split.params['Conv_1']['kernel']
  assert kernel.sharding.shard_shape(kernel.shape) == (3, 3, 8, 8)


def test_split_state_takes_less_memory():
  whole_step, whole, _ = trained(vit, 8, 1)
  split_step, split, _ = trained(vit, 2, 4)
  for part in ('params', 'ema_params', 'opt_state', 'perturb'):
    # A quarter, and what is too small to be split.
    share = bytes_of(getattr(split, part)) / bytes_of(getattr(whole, part))
    assert share < 0.3, part
  needs = []
  for step in (whole_step, split_step):
    memory = step.memory_analysis()
    needs.append(
      memory.argument_size_in_bytes
      + memory.output_size_in_bytes
      - memory.alias_size_in_bytes
      + memory.temp_size_in_bytes
    )
  saved = bytes_of(whole) - bytes_of(split)
  assert needs[0] - needs[1] > 0.8 * saved


@pytest.mark.parametrize(
  ('method', 'recipe', 'gathered'),
  [
    ('fixmatch', 'plain', 1),
    ('freematch', 'flatmatch', 2),  # θ, and θ + ε; ε by itself is not.
    ('mean_teacher', 'plain', 2),  # The teacher.
  ],
)
def test_weights_are_gathered_and_no_activations(method, recipe, gathered):
  """With one image of each view on a device, where XLA prefers the latter."""
  mesh = sharding.make_mesh(8)
  setup = Setup(method, recipe, network=vit, mesh=mesh)
  batch = make_batch(0, 8, 8, setup.method.views)
  params = jax.eval_shape(setup.init).params
  compiled = compile_step(setup, batch, mesh)
  sent: dict[str, Counter] = {}
  for c in hlo.collectives(compiled.as_text()):
    sent.setdefault(c.kind, Counter()).update(c.times * c.arrays)
  size = lambda leaf: 4 * leaf.size
  leaves = jax.tree.leaves(params)
  split = [
    size(leaf)
    for leaf in leaves
    if not sharding.of_state(mesh, leaf).is_fully_replicated
  ]
  assert len(split) == 4  # The matrices of the block.
  assert sent.pop('all-gather') == Counter(gathered * split)
  # Gradients of both trained views, and sums of at most [K].
  reduced = sent.pop('all-reduce') + sent.pop('reduce-scatter', Counter())
  small = 4 * NUM_CLASSES
  assert Counter({k: n for k, n in reduced.items() if k > small}) == Counter(
    k for k in 2 * list(map(size, leaves)) if k > small
  )
  assert not sent


def test_gradients_leave_the_network_split():
  """Whatever they are for; XLA would sum them whole, and leave them so."""
  mesh = sharding.make_mesh(8)
  gather = sharding.make_gather(mesh)
  shapes = {'kernel': (64, 64), 'bias': (64,)}
  params = sharding.abstract_state(
    mesh, {k: jax.ShapeDtypeStruct(v, 'float32') for k, v in shapes.items()}
  )

  def loss(params, x):
    whole = gather(params)
    return jnp.sum((x @ whole['kernel'] + whole['bias']) ** 2)

  rows = sharding.over_batch(mesh)
  x = jax.ShapeDtypeStruct((8, 64), 'float32', sharding=rows)
  compiled = jax.jit(jax.grad(loss)).lower(params, x).compile()
  part = lambda name, at: at.shard_shape(shapes[name])
  placed = compiled.output_shardings
  assert part('kernel', placed['kernel']) == (8, 64)
  assert part('bias', placed['bias']) == (64,)


def test_classifier_gathers_weights_and_no_activations(monkeypatch):
  """One image on each device, and at the end all probabilities on all."""
  mesh = sharding.make_mesh(8)
  jitted, jit = {}, jax.jit

  def noted(function, **options):
    jitted[function.__name__] = jit(function, **options)
    return jitted[function.__name__]

  with monkeypatch.context() as patch:
    patch.setattr(jax, 'jit', noted)
    classify.make_classifier(vit(), (0.0,), (1.0,), 8, mesh)
  images = jax.ShapeDtypeStruct(
    (8, 8, 8, 1), 'uint8', sharding=sharding.over_batch(mesh)
  )
  shapes = jax.eval_shape(Setup('fixmatch', network=vit).init)
  params = sharding.abstract_state(mesh, shapes.params)
  lowered = jitted['probabilities'].lower(params, {}, images)
  found = hlo.collectives(lowered.compile().as_text())
  assert {c.kind for c in found} == {'all-gather'}
  leaves = jax.tree.leaves(params)
  split = [x for x in leaves if not x.sharding.is_fully_replicated]
  assert len(split) == 4
  assert Counter(size for c in found for size in c.times * c.arrays) == Counter(
    [4 * leaf.size for leaf in split] + [8 * NUM_CLASSES * 4]
  )


def test_everything_of_the_size_of_a_network_is_split():
  """Also the teacher of MPL and its momenta, and nothing else."""
  shapes = jax.eval_shape(Setup('mpl', 'flatmatch_e', network=vit).init)
  placed = sharding.of_state(sharding.make_mesh(4), shapes)
  split = lambda tree: sum(
    not x.is_fully_replicated for x in jax.tree.leaves(tree)
  )
  number = split(placed.params)
  assert number == 4
  for tree in (placed.ema_params, placed.opt_state, placed.perturb):
    assert split(tree) == number
  assert split(placed.method) == 2 * number
  assert split(placed) == 6 * number


@pytest.mark.parametrize(
  ('shape', 'fsdp', 'part'),
  [
    ((64, 192), 4, (64, 48)),
    ((192, 64), 4, (48, 64)),
    ((3, 3, 64, 64), 8, (3, 3, 8, 64)),
    ((130, 64), 4, (130, 16)),  # The largest that is divisible.
    ((63, 65), 4, (63, 65)),
    ((4096,), 4, (4096,)),  # A table, or biases.
    ((63, 64), 8, (63, 64)),  # Too small.
    ((64, 192), 1, (64, 192)),
  ],
)
def test_leaves_are_split_along_their_largest_dimension(shape, fsdp, part):
  leaf = jax.ShapeDtypeStruct(shape, 'float32')
  placed = sharding.of_state(sharding.make_mesh(fsdp), leaf)
  assert placed.shard_shape(shape) == part


def test_axes_divide_the_devices():
  assert dict(sharding.make_mesh(2).shape) == {'data': 4, 'fsdp': 2}
  for fsdp in (3, 16):
    with pytest.raises(UserError, match=f'fsdp={fsdp}.* 8; .*1, 2, 4, 8'):
      sharding.make_mesh(fsdp)


def test_checkpoints_move_to_any_mesh(tmp_path):
  _, state, _ = trained(vit, 2, 4)
  checkpoints = Checkpoints(tmp_path)
  checkpoints.save(3, state, {'class_names': []}, None)
  checkpoints.close()
  for fsdp, devices in ((1, 1), (1, 8), (2, 2), (8, 8)):
    mesh = sharding.make_mesh(fsdp, jax.devices()[:devices])
    like = sharding.abstract_state(mesh, jax.eval_shape(lambda: state))
    checkpoints = Checkpoints(tmp_path, read_only=True)
    restored, _ = checkpoints.restore(like)
    checkpoints.close()
    assert jax.tree.map(lambda x: x.sharding, restored) == sharding.of_state(
      mesh, state
    )
    raw = lambda x: jax.device_get(x.replace(rng=jax.random.key_data(x.rng)))
    jax.tree.map(np.testing.assert_array_equal, raw(state), raw(restored))


def test_host_copies_are_noticed():
  """Or the guard of the next test would prove nothing."""
  double = jax.jit(lambda x: 2 * x)
  compiled = double.lower(np.ones(3, np.float32)).compile()
  with (
    jax.transfer_guard('disallow'),
    pytest.raises(Exception, match='Disallowed'),
  ):
    compiled(np.ones(3, np.float32))


def test_run_moves_to_another_mesh_and_copies_nothing_from_the_host(
  tmp_path, monkeypatch, stopped_after
):
  monkeypatch.setattr(models, 'create', create)
  compile_step, seen = engine.compile_step, []

  def guarded(*args):
    compiled = compile_step(*args)

    def step(state, given):
      seen.append(given)
      with jax.transfer_guard('disallow'):
        return compiled(state, given)

    step.cost_analysis = compiled.cost_analysis
    return step

  monkeypatch.setattr(engine, 'compile_step', guarded)
  # Without strong views, which take longest to compile.
  config = digits.get_config('method=pseudo_label+flatmatch_e')
  config.batch_size, config.unlabeled_batch_size = 8, 16
  config.steps = 4
  config.log_every = config.checkpoint_every = 2
  whole = loop.train_and_evaluate(config, str(tmp_path / 'whole'))
  config.mesh.fsdp = 4
  parts = str(tmp_path / 'parts')
  stopped_after(3, loop.train_and_evaluate, config, parts)
  config.mesh.fsdp = 2
  split = loop.train_and_evaluate(config, parts)
  assert_close(whole, split)
  assert not split_leaves(whole)
  assert len(split_leaves(split.params)) >= 4
  # All images on each device, put there once for each start; each tries two
  # steps for its estimate.
  assert len(seen) == (4 + 2) + (3 + 2) + (2 + 2)
  for given in seen:
    assert given.images.rows.is_fully_replicated
    assert len(given.images.sharding.device_set) == 8
  assert len({id(given.images.rows) for given in seen}) == 3
  # By a machine whose devices do not share as many.
  loaded = load.load_run(Workdir(parts)).state
  assert_close(split, loaded)
