"""What a training step costs: XLA's FLOPs, memory, compilation.

  python benchmarks/step_cost.py --model wrn_28_2 --out cost.json
  python benchmarks/step_cost.py --methods fixmatch,freematch \\
      --recipes plain,flatmatch,flatmatch_e

The whole step is compiled, sampling and augmentation included, on random
CIFAR-sized images. Ratios are to plain FixMatch in the same BatchNorm layout.
"At least" counts the images that must pass through the network, forward and
backward, when nothing is computed twice and BatchNorm couples no views: what
`split` can reach. A small batch has the same ratios. FLOPs come sooner with
XLA_FLAGS=--xla_backend_optimization_level=0, which makes no difference to them.
Seconds are throughput.py's.
"""

import argparse
import json
import pathlib
import sys
import time

import jax

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from benchmarks import steps
from configs import cifar10
from flatmatch_jax.methods import METHODS
from flatmatch_jax.paper import cost
from flatmatch_jax.step import recipes
from flatmatch_jax.step.forward import LAYOUTS
from flatmatch_jax.types import UserError


def compile_step(method, recipe, layout, model, batch_size):
  """Returns the compiled step, and the seconds it took."""
  name = method if recipe == 'plain' else f'{method}+{recipe}'
  setup = steps.create(name, layout, model, batch_size)
  given = steps.arrays(setup)
  began = time.perf_counter()
  compiled = jax.jit(steps.step(setup)).lower(*given).compile()
  return compiled, time.perf_counter() - began


def minimal_ratio(method, recipe):
  """To FixMatch, by the images that must pass through the network."""
  count = lambda method, recipe: cost.images_per_step(
    cifar10.get_config(f'method={method}'), method, recipe
  )
  return count(method, recipe) / count('fixmatch', 'plain')


def measure(layout, pairs, model, batch_size):
  """Rows for all (method, recipe) pairs in one layout; FixMatch is first."""
  rows = []
  for method, recipe in pairs:
    compiled, seconds = compile_step(method, recipe, layout, model, batch_size)
    flops = compiled.cost_analysis()['flops']
    rows.append(
      {
        'method': method,
        'recipe': recipe,
        'batch_norm': layout,
        'flops': flops,
        'flops_ratio': flops / (rows[0]['flops'] if rows else flops),
        'minimal_ratio': minimal_ratio(method, recipe),
        'temp_bytes': compiled.memory_analysis().temp_size_in_bytes,
        'compile_seconds': round(seconds, 1),
      }
    )
    print(
      f'  {layout} {method}+{recipe}: {flops / 1e9:.2f} GFLOP',
      file=sys.stderr,
    )
  return rows


def show(rows):
  print(
    '| method | recipe | BatchNorm | GFLOP | × FixMatch | at least | '
    'temporary MB | compile s |\n'
    '|---|---|---|---|---|---|---|---|'
  )
  for row in rows:
    print(
      f'| {row["method"]} | {row["recipe"]} | {row["batch_norm"]} | '
      f'{row["flops"] / 1e9:.2f} | {row["flops_ratio"]:.3f} | '
      f'{row["minimal_ratio"]:.3f} | '
      f'{row["temp_bytes"] / 1e6:.0f} | {row["compile_seconds"]} |'
    )


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--model', default='wrn_28_2')
  parser.add_argument('--batch_size', type=int, default=8, help='labeled')
  parser.add_argument('--methods', default=','.join(METHODS))
  parser.add_argument('--recipes', default=','.join(recipes.RECIPES))
  parser.add_argument('--layouts', default=','.join(LAYOUTS))
  parser.add_argument('--out', help='JSON file for the rows')
  args = parser.parse_args()

  pairs = [('fixmatch', 'plain')]
  for method in args.methods.split(','):
    for recipe in args.recipes.split(','):
      try:
        name = method if recipe == 'plain' else f'{method}+{recipe}'
        recipes.parse(name)
      except UserError as error:
        parser.error(str(error))
      has_unlabeled = method != 'supervised'
      meaningless = recipes.objection(method, recipe, has_unlabeled)
      if not meaningless and (method, recipe) not in pairs:
        pairs.append((method, recipe))
  rows = []
  for layout in args.layouts.split(','):
    rows += measure(layout, pairs, args.model, args.batch_size)
  show(rows)
  if args.out:
    pathlib.Path(args.out).write_text(json.dumps(rows, indent=2) + '\n')


if __name__ == '__main__':
  main()
