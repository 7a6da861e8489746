"""What a training step costs on TPUs, by their own compiler, without a TPU.

  pip install libtpu==0.0.42.*
  python benchmarks/tpu_compile.py --config configs/cifar10.py:method=uda \\
      --config.dtype=bfloat16 --topology v5e:2x2 --chips 1 --json FILE

Compiles the step that `main.py` would run, sampling and augmentation included,
for arrays without content. FLOPs, bytes, memory and collectives are those of
one chip and one step. A batch that does not divide by the chips is multiplied
until it does; the row says so. A row that the file has is not compiled again.

The roofline is the least time that the chip's published peaks allow: the
longest of FLOPs, bytes and collectives, as if they overlapped perfectly. Not a
measurement. Loops count once, whatever their turns: those of RandAugment.
float32 products are counted at the peak of bfloat16, in which TPUs multiply
them by JAX's default.
"""

import json
import os
import pathlib
import sys
import time
from typing import Any

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')
os.environ.setdefault('TPU_ACCELERATOR_TYPE', 'v5litepod-4')
os.environ.setdefault('TPU_WORKER_HOSTNAMES', 'localhost')
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from absl import app, flags
import jax
from jax.experimental import topologies
import jax.numpy as jnp
from ml_collections import config_flags

from benchmarks import hlo, steps
from benchmarks.chips import CHIPS, Chip, batch_factor, reduced_bytes, roofline
from flatmatch_jax import data as data_lib
from flatmatch_jax.data import resident, streaming
from flatmatch_jax.paper import cost
from flatmatch_jax.system import cli, files, sharding
from flatmatch_jax.training import program as program_lib
from flatmatch_jax.types import Batch, DatasetInfo, UserError


def abstract_data(config, views, mesh):
  """What a feed gives the step, as shapes: all images, or a step's."""
  count, shape = cost.IMAGES[config.dataset]
  if config.dataset not in ('imagenet', 'imagenet30'):
    labeled = count if config.labels == 'all' else config.labels
    return steps.data_shapes(count, shape, labeled, mesh)
  split = lambda dtype, *shape: jax.ShapeDtypeStruct(
    shape, dtype, sharding=sharding.over_batch(mesh)
  )
  images = lambda rows: split(jnp.uint8, rows, *shape)
  number = lambda rows: split(jnp.int32, rows)
  rows = config.batch_size
  labeled = {'weak': images(rows), 'label': number(rows)}
  labeled['index'] = number(rows)
  rows = config.unlabeled_batch_size
  unlabeled = {name: images(rows) for name in views}
  return Batch(
    labeled, unlabeled | {'index': number(rows), 'truth': number(rows)}
  )


def lower(config, mesh):
  """The step as `loop.py` compiles it, for the devices of `mesh`."""
  count, shape = cost.IMAGES[config.dataset]
  classes = data_lib.SOURCES[config.dataset].num_classes or 0
  program = program_lib.create(
    config, DatasetInfo(classes, count, count), shape, mesh=mesh
  )
  over_batch = sharding.over_batch(mesh)
  data = abstract_data(config, program.views, mesh)
  streams = isinstance(data, Batch)
  pipeline = streaming.PIPELINE if streams else resident.PIPELINE
  sample = program_lib.make_sample(config, program.views, over_batch, pipeline)
  shapes = jax.eval_shape(program.init, jax.eval_shape(jax.random.key, 0))
  out = sharding.of_state(mesh, shapes), sharding.replicated(mesh)
  step = lambda state, data: program.step(state, sample(data, state))
  jitted = jax.jit(step, donate_argnums=0, out_shardings=out)
  return jitted.lower(sharding.abstract_state(mesh, shapes), data)


def make_mesh(topology: str, chips: int, fsdp: int = 1):
  """The first `chips` of a topology, or all, and what one can do.

  Of them each `fsdp` share one state.
  """
  kind = topology.partition(':')[0]
  if kind not in CHIPS:
    raise UserError(
      f'Nothing is known of the chips of {topology!r}. Known: '
      f'{", ".join(CHIPS)}; write such as v5e:2x2.'
    )
  # As on a machine that has them: by default a v4 chip would be two devices.
  options = {'chip_config_name': 'megacore'} if kind == 'v4' else {}
  try:
    devices = topologies.get_topology_desc(topology, 'tpu', **options).devices
  except Exception as error:
    raise UserError(
      f'There is no topology {topology!r}: {str(error).splitlines()[0]} '
      "Without libtpu, `pip install 'libtpu==0.0.42.*'` first."
    ) from error
  if chips > len(devices):
    raise UserError(
      f'--chips={chips} are more than the {len(devices)} of {topology}; take a '
      'larger --topology.'
    )
  mesh = sharding.make_mesh(fsdp, devices[: chips or len(devices)])
  return mesh, CHIPS[kind]


def measure(config, mesh, chip: Chip, effort: float, out: str | None):
  """Compiles the step; returns what the compiler says of it."""
  began = time.process_time()
  compiled = lower(config, mesh).compile(
    {'exec_time_optimization_effort': effort}
  )
  seconds = time.process_time() - began
  text = compiled.as_text()
  if out:
    pathlib.Path(out).write_text(text)
  sent = hlo.totals(hlo.collectives(text))
  cost: Any = compiled.cost_analysis()
  memory: Any = compiled.memory_analysis()
  held = memory.argument_size_in_bytes + memory.output_size_in_bytes
  held += memory.temp_size_in_bytes - memory.alias_size_in_bytes
  return {
    'flops': cost['flops'],
    'bytes': cost['bytes accessed'],
    'hbm_bytes': held,
    'temporary_bytes': memory.temp_size_in_bytes,
    'hbm_share': round(held / chip.memory, 4),
    'collectives': {
      kind: {'count': count, 'bytes': size}
      for kind, (count, size) in sent.items()
    },
    'compile_cpu_seconds': round(seconds),
    **roofline(
      chip,
      cost['flops'],
      cost['bytes accessed'],
      reduced_bytes(sent),
      mesh.size,
    ),
  }


def describe(
  config, topology: str, chips: int, factor: int, effort: float
) -> dict[str, Any]:
  """What a row is about: two rows with equal descriptions are one."""
  return {
    'dataset': config.dataset,
    'model': config.model,
    'method': config.method,
    'batch_norm': config.batch_norm,
    'dtype': config.dtype,
    'topology': topology,
    'chips': chips,
    'fsdp': config.mesh.fsdp,
    'batch_size': config.batch_size,
    'unlabeled_batch_size': config.unlabeled_batch_size,
    'batch_factor': factor,
    'remat': config.remat,
    'microbatches': config.microbatches,
    'optimizer': config.optimizer,
    'labels': config.labels,
    'recipe_args': config.recipe_args.to_dict(),
    'effort': effort,
  }


def find(rows: list[dict], description: dict) -> dict | None:
  """The row of this description, if there is one."""
  for row in rows:
    if all(row.get(key) == value for key, value in description.items()):
      return row
  return None


def table(rows: list[dict]) -> str:
  """The rows in Markdown, those to be compared below each other."""
  head = 'dataset, network, method, dtype, chips, batch, GFLOP, GB accessed, '
  head += 'GB held, collectives, their MB, compute ms, memory ms, links ms'
  lines = [head.split(', ')]
  lines.append(['---'] * len(lines[0]))
  order = 'dataset', 'model', 'chips', 'fsdp', 'dtype', 'method'
  for row in sorted(rows, key=lambda row: [row[key] for key in order]):
    sent = row['collectives'].values()
    batch = f'{row["batch_size"]} + {row["unlabeled_batch_size"]}'
    if (factor := row['batch_factor']) > 1:
      batch += f' ({factor} times)'
    chips = str(row['chips'])
    if row['fsdp'] > 1:
      chips += f', state split by {row["fsdp"]}'
    lines.append(
      [
        *(row[key] for key in ('dataset', 'model', 'method', 'dtype')),
        chips,
        batch,
        f'{row["flops"] / 1e9:,.1f}',
        f'{row["bytes"] / 1e9:.2f}',
        f'{row["hbm_bytes"] / 1e9:.2f}',
        str(sum(kind['count'] for kind in sent)),
        f'{sum(kind["bytes"] for kind in sent) / 1e6:.1f}',
        *(
          f'**{value:.2f}**' if name == row['binds'] else f'{value:.2f}'
          for name, value in row['ms'].items()
        ),
      ]
    )
  return '\n'.join(f'| {" | ".join(line)} |' for line in lines)


def main(argv):
  del argv
  chosen = flags.FLAGS
  if chosen.show:
    print(table(json.loads(pathlib.Path(chosen.show).read_text())))
    return
  config = chosen.config
  for option in ('json', 'hlo'):
    if chosen[option].value:
      files.check_target(f'--{option}', chosen[option].value)
  mesh, chip = make_mesh(chosen.topology, chosen.chips, config.mesh.fsdp)
  sizes = config.batch_size, config.unlabeled_batch_size
  factor = batch_factor(sizes, mesh.size)
  config.batch_size *= factor
  config.unlabeled_batch_size *= factor
  file = pathlib.Path(chosen.json) if chosen.json else None
  rows = json.loads(file.read_text()) if file and file.exists() else []
  description = describe(
    config, chosen.topology, mesh.size, factor, chosen.effort
  )
  row = find(rows, description)
  if row is None:
    row = description | measure(config, mesh, chip, chosen.effort, chosen.hlo)
    if file:
      with files.replacing(file, 'w') as out:
        out.write(json.dumps([*rows, row], indent=1) + '\n')
  print(json.dumps(row, indent=1))


if __name__ == '__main__':
  config_flags.DEFINE_config_file('config', None, 'As of main.py.')
  flags.DEFINE_string('topology', 'v5e:2x2', 'Such as v5e:4x8.')
  flags.DEFINE_integer('chips', 0, 'So many of them; 0 is all.')
  flags.DEFINE_float('effort', 0.0, 'Of the compiler; -1 is quick.')
  flags.DEFINE_string('json', None, 'File of rows, to which to add.')
  flags.DEFINE_string('hlo', None, 'File for the compiled program.')
  flags.DEFINE_string('show', None, 'File of rows to print as a table.')
  with cli.errors_as_lines():
    app.run(main, flags_parser=cli.parse_flags)
