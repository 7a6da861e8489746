"""How long a step keeps Python busy: docs/speed.md.

  python benchmarks/host_time.py [--models fast_64_128_256] [--steps 2000]

Runs the training loop with a step that computes nothing, but takes and gives
the arrays of the real one, and prints the processor time of the loop's thread
per step. An accelerator waits for Python if its steps are shorter.
"""

import argparse
import pathlib
import sys
import tempfile
import time
from unittest import mock

import jax
import jax.numpy as jnp

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from configs import digits
from flatmatch_jax.training import engine, loop

_WARM_UP = 100  # Steps.


def compile_nothing(marks: list[float]):
  """`engine.compile_step` of a step that only notes when it is called."""

  def compile_step(function, state, given, shardings):
    metrics = jax.eval_shape(function, state, given)[1]

    def nothing(state, given):
      del given
      return state, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), metrics)

    jitted = jax.jit(nothing, donate_argnums=0, out_shardings=shardings)
    compiled = jitted.lower(state, given).compile()

    def step(state, given):
      marks.append(time.thread_time())
      return compiled(state, given)

    step.cost_analysis = dict
    return step

  return compile_step


def milliseconds(model: str, method: str, steps: int) -> float:
  config = digits.get_config(f'method={method}')
  config.update(model=model, steps=steps, probe_every=0, cpu_devices=1)
  config.log_every = 100  # As other configs do.
  config.eval_every = config.checkpoint_every = steps
  marks: list[float] = []
  with (
    tempfile.TemporaryDirectory() as folder,
    mock.patch.object(engine, 'compile_step', compile_nothing(marks)),
  ):
    loop.train_and_evaluate(config, folder)
  seconds = marks[-1] - marks[_WARM_UP]
  return 1000 * seconds / (len(marks) - 1 - _WARM_UP)


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--models', default='fast_64_128_256,wrn_28_2')
  parser.add_argument('--methods', default='fixmatch,flatmatch,flatmatch_e')
  parser.add_argument('--steps', type=int, default=2000)
  args = parser.parse_args()
  print('| network | method | ms |\n|---|---|---|')
  for model in args.models.split(','):
    for method in args.methods.split(','):
      found = milliseconds(model, method, args.steps)
      print(f'| {model} | {method} | {found:.2f} |', flush=True)


if __name__ == '__main__':
  main()
