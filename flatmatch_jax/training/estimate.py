"""How long a run takes: estimated before its first step, measured after ten."""

import functools
import math
import time

import jax
import jax.numpy as jnp

from flatmatch_jax.system import distributed, messages, sharding

_MEASURED = 10  # Steps.
_SHORT = 120  # Seconds; runs that take less print no second number.
_LONG = 24 * 3600  # From here on a CPU is the wrong machine.
_CALLS = 3  # Timed; a fixed number, as several processes call together.
_QUICK = 5  # Seconds of a step that is tried out on a CPU.


class Estimate:
  """Prints how long the rest of a run takes, up to `config.steps`."""

  def __init__(self, config):
    self._config = config
    self._first: tuple[int, float] | None = None  # A step, and when it ended.
    self._measured = self._warned = False

  def compiled(self, step: int, engine, state) -> None:
    """Prints an estimate before `step`, the first of a new program."""
    self._first, self._measured = None, False
    mesh, flops = engine.program.mesh, self._flops(engine.compiled)
    per_step = flops / throughput(mesh, self._config.dtype)
    per = 'step and device' if mesh.size > 1 else 'step'
    source = f'estimated from {flops / 1e9:.2f} GFLOP per {per}'
    alone = jax.default_backend() == 'cpu' and not distributed.several()
    if alone and per_step < _QUICK:  # All processes would have to try it.
      per_step, source = timed(engine, state), 'by a trial step'
    left = self._config.steps - step + 1
    if not per_step > 0:  # Not known: NaN.
      return
    messages.say(
      f'About {duration(left * per_step)} for {messages.count(left, "step")} '
      f'on this machine ({source}).'
    )
    self._warn(left * per_step)

  def step(self, step: int) -> None:
    """To be called when the devices have finished `step`."""
    now = time.perf_counter()
    if self._first is None:
      self._first = step, now
    first, began = self._first
    if self._measured or step - first < _MEASURED:
      return
    self._measured = True
    per_step = (now - began) / (step - first)
    if per_step * self._config.steps < _SHORT:
      return
    seconds = per_step * (self._config.steps - step)
    messages.say(
      f'About {duration(seconds)} left, measured over {step - first} steps.'
    )
    self._warn(seconds)

  def _flops(self, program) -> float:
    # XLA counts the operations of a loop once.
    groups = self._config.recipe_args.get('groups', 1)
    if groups > 1 or self._config.microbatches > 1:
      return math.nan
    return flops_of(program)

  def _warn(self, seconds):
    on_cpu = jax.default_backend() == 'cpu'
    if on_cpu and seconds > _LONG and not self._warned:
      self._warned = True
      messages.say(
        'Warning: the run takes more than a day, because there is no '
        f'accelerator. To finish sooner, use {faster(self._config)}.'
      )


def faster(config) -> str:
  """What to use instead of a config that takes too long on a CPU."""
  if config.model.startswith('fast'):
    return 'fewer steps (--config.steps)'
  if config.dataset == 'cifar10':
    return '--config configs/cifar10_fast.py'
  if config.dataset in ('folder', 'npz', 'tfds'):
    return f'--config configs/{config.dataset}.py:fast=true'
  return 'a smaller network (--config.model=fast_32_64_128) or fewer steps'


def duration(seconds: float) -> str:
  """Two units at most: '45 s', '3 h 20 min', '2 days 4 h'."""
  if seconds < 59.5:
    return f'{seconds:.0f} s'
  minutes = round(seconds / 60)
  if minutes < 60:
    return f'{minutes} min'
  hours, minutes = divmod(minutes, 60)
  if hours < 24:
    return f'{hours} h {minutes} min' if minutes else f'{hours} h'
  days, hours = divmod(round(seconds / 3600), 24)
  text = '1 day' if days == 1 else f'{days:,} days'
  return f'{text} {hours} h' if hours else text


def flops_of(compiled) -> float:
  """Floating-point operations of a program per device; NaN if not known."""
  return (compiled.cost_analysis() or {}).get('flops', math.nan)


def timed(engine, state) -> float:
  """Seconds of a step with a copy of the state: the second of two."""
  state = jax.tree.map(jnp.copy, state)
  seconds = math.nan
  for _ in range(2):  # The first one is slower.
    began = time.perf_counter()
    state, _ = jax.block_until_ready(engine.step(state))
    seconds = time.perf_counter() - began
  return seconds


@functools.cache
def throughput(mesh, dtype: str) -> float:
  """FLOP/s of each device when all train a small block of convolutions.

  Cores of one CPU that are devices of their own share its speed, so all work
  at once, as in a step.
  """
  images, channels = 512, 64
  if jax.default_backend() == 'cpu':
    images, channels = max(1, 64 // mesh.size), 16

  def loss(kernels, x):
    for kernel in kernels:
      x = jax.lax.conv_general_dilated(
        x, kernel, (1, 1), 'SAME', dimension_numbers=('NHWC', 'HWIO', 'NHWC')
      )
      x = (x - x.mean((0, 1, 2))) * jax.lax.rsqrt(x.var((0, 1, 2)) + 1e-5)
      x = jax.nn.leaky_relu(x, 0.1)
    return x.mean()

  make = lambda: (
    jnp.full((2, 3, 3, channels, channels), 0.01, dtype),
    jnp.ones((images * mesh.size, 32, 32, channels), dtype),
  )
  everywhere = sharding.replicated(mesh)
  over_batch = sharding.over_batch(mesh)
  args = jax.jit(make, out_shardings=(everywhere, over_batch))()
  gradient = jax.jit(jax.grad(loss), out_shardings=everywhere)
  compiled = gradient.lower(*args).compile()
  jax.block_until_ready(compiled(*args))  # The first is slower.
  began = time.perf_counter()
  for _ in range(_CALLS):
    jax.block_until_ready(compiled(*args))
  return _CALLS * flops_of(compiled) / (time.perf_counter() - began)
