"""Shared by the tests: a tiny network, a batch, and steps built from them."""

import os
import sys
import tempfile

import gcs

os.environ |= gcs.OF_TENSORFLOW
# Before JAX starts: some tests compare one device with several.
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('JAX_NUM_CPU_DEVICES', '8')
# TensorStore gives a silent request up, in all tests: it reads this only once.
os.environ.setdefault('TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS', '1')
os.environ.setdefault('TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES', '1')
# A program is compiled once for all tests, in whichever process. The first one
# makes the folder and removes it; pytest's workers, and runs that tests start,
# inherit it. config.compilation_cache='auto' leaves it so.
if 'JAX_COMPILATION_CACHE_DIR' not in os.environ:
  _compiled = tempfile.TemporaryDirectory(prefix='flatmatch_jax-tests-')
  os.environ['JAX_COMPILATION_CACHE_DIR'] = _compiled.name
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.05')
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES', '-1')
# Compiling is most of the tests' time: four times less without LLVM's passes,
# and three times less again by the older emitters of fusions. Eight devices on
# two busy cores may wait long for each other; XLA would abort after 40 s.
os.environ.setdefault(
  'XLA_FLAGS',
  '--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false '
  '--xla_cpu_parallel_codegen_split_count=1 '
  '--xla_cpu_collective_call_terminate_timeout_seconds=300',
)

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from configs import digits
from flatmatch_jax import methods, models
from flatmatch_jax.data.pipeline import parted
from flatmatch_jax.models.layers import predict
from flatmatch_jax.run import progress
from flatmatch_jax.step import optimizer, train_step
from flatmatch_jax.step.forward import make_forward
from flatmatch_jax.step.recipes import RECIPES
from flatmatch_jax.system import cli, messages, sharding
from flatmatch_jax.types import Batch, DatasetInfo, Head

NUM_CLASSES = 4
STEPS = 1000
INFO = DatasetInfo(NUM_CLASSES, 50, 50, class_counts=(4, 3, 2, 1))


def pytest_sessionstart():
  messages.quiet_orbax()  # As commands do; after pytest's own hooks.


class TinyNet(nn.Module):
  """Convolutions and BatchNorm, and next to nothing to compile."""

  num_classes: int = NUM_CLASSES
  heads: tuple[Head, ...] = ()
  width: int = 8

  @nn.compact
  def __call__(self, x, train):
    for features in (self.width, 2 * self.width):
      x = nn.Conv(features, (3, 3), 2)(x)
      x = nn.BatchNorm(use_running_average=not train, momentum=0.0)(x)
      x = nn.leaky_relu(x)
    x = x.mean((1, 2))
    return predict(x, self.num_classes, self.heads, train, nn.Dense)


class Setup:
  """A step of `method` under `recipe` on the tiny network, unjitted parts."""

  def __init__(
    self,
    method,
    recipe='plain',
    layout='split',
    network=TinyNet,
    microbatches=1,
    mesh=None,
    **recipe_args,
  ):
    self.tx = optimizer.sgd(optimizer.cosine_schedule(0.03, STEPS), 5e-4)
    if isinstance(method, str):
      method = methods.create(method, self._context())
    self.method = method
    self.model = network(heads=method.heads)
    self.recipe = RECIPES[recipe] if isinstance(recipe, str) else recipe
    factory = self.recipe.perturb
    self.perturb = factory and factory(**recipe_args)
    self.forward = make_forward(
      self.model,
      layout,
      microbatches,
      sharding.make_gather(mesh),
      method.populations,
    )
    self.step = train_step.make_train_step(
      self.forward, self.method, self.tx, self.recipe, self.perturb
    )

  def _context(self):
    return {
      'steps': STEPS,
      'info': INFO,
      'tx': self.tx,
      'forward': lambda *args: self.forward(*args),
      'init_network': self._init_network,
    }

  def _init_network(self, rng):
    return self.model.init(rng, jnp.zeros((1, 8, 8, 1)), train=True)

  def init(self, seed=0):
    rng = jax.random.key(seed)
    return train_step.create_train_state(
      rng, self._init_network(rng), self.tx, self.method, INFO, self.perturb
    )


def make_batch(seed=0, labeled=8, unlabeled=16, views=('weak', 'strong')):
  """Random images with the `views` that the method asks for."""
  keys = iter(jax.random.split(jax.random.key(100 + seed), 8))
  image = lambda n: jax.random.normal(next(keys), (n, 8, 8, 1))
  integer = lambda n, top: jax.random.randint(next(keys), (n,), 0, top)
  known, others = parted(views)
  return Batch(
    labeled={'weak': image(labeled), 'label': integer(labeled, NUM_CLASSES)}
    | {name: image(labeled) for name in known[1:]}
    | {'index': jnp.arange(labeled) % sum(INFO.class_counts)},
    unlabeled={name: image(unlabeled) for name in others}
    | {
      'index': integer(unlabeled, INFO.num_train),
      'truth': integer(unlabeled, NUM_CLASSES),
    },
  )


def compile_step(setup, batch, mesh):
  """The step for a mesh, placed as loop.py does."""
  state = sharding.abstract_state(mesh, jax.eval_shape(setup.init))
  rows = sharding.over_batch(mesh)
  batch = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows), batch
  )
  out = sharding.of_state(mesh, state), sharding.replicated(mesh)
  jitted = jax.jit(setup.step, donate_argnums=0, out_shardings=out)
  return jitted.lower(state, batch).compile()


def run_steps(setup, step, mesh, batches):
  """The state and the metrics after some steps."""
  state = setup.init()
  state = jax.device_put(state, sharding.of_state(mesh, state))
  for batch in batches:
    state, metrics = step(
      state, jax.device_put(batch, sharding.over_batch(mesh))
    )
    sharding.settle(metrics)
  return state, metrics


@pytest.fixture
def batch():
  return make_batch()


def make_config(method='pseudo_label+flatmatch_e', **changes):
  """No strong views by default: RandAugment takes long to compile."""
  config = digits.get_config(f'method={method}')
  config.update(
    steps=6,
    batch_size=8,
    unlabeled_batch_size=16,
    eval_batch_size=120,
    log_every=2,
    eval_every=3,
    checkpoint_every=2,
    probe_every=5,
  )
  config.update(changes)
  return config


@pytest.fixture
def call(monkeypatch, capfd):
  """Runs a command in this process; returns exit code, stdout, stderr."""

  def call(module, *args):
    monkeypatch.setattr(sys, 'argv', [module.__name__, *map(str, args)])
    code = 0
    try:
      with cli.errors_as_lines():
        module.main()
    except SystemExit as end:
      code = end.code
    return code, *capfd.readouterr()

  return call


class StoppedError(Exception):
  """Ends a run in the middle."""


@pytest.fixture
def stopped_after(monkeypatch):
  """Runs a function, and ends it when training has taken some steps."""

  def run(steps, function, *args):
    step = progress.Progress.step

    def stop(self):
      nonlocal steps
      step(self)
      steps -= 1
      if not steps:
        raise StoppedError

    with monkeypatch.context() as patch:
      patch.setattr(progress.Progress, 'step', stop)
      with pytest.raises(StoppedError):
        function(*args)

  return run


@pytest.fixture(scope='module')
def tiny_network():
  """Every config's model is the tiny network, and TensorFlow is not loaded."""

  def tiny(name, num_classes, heads=(), dtype='', remat=False):
    del dtype, remat
    return TinyNet(num_classes, heads, 16 if name == 'wrn_10_2' else 8)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(models, 'create', tiny)
    patch.setattr(
      progress, '_tensorboard_writers', lambda workdirs: [None] * len(workdirs)
    )
    yield
