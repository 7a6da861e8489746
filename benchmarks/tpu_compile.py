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
from jax.experimental import topologies
from ml_collections import config_flags

from benchmarks import compiled_step, hlo
from benchmarks.chips import CHIPS, Chip, batch_factor, reduced_bytes, roofline
from flatmatch_jax.system import cli, files, sharding
from flatmatch_jax.types import UserError


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
  compiled = compiled_step.lower(config, mesh).compile(
    {'exec_time_optimization_effort': effort}
  )
  seconds = time.process_time() - began
  text = compiled.as_text()
  if out:
    pathlib.Path(out).write_text(text)
  sent = hlo.totals(hlo.collectives(text))
  cost: Any = compiled.cost_analysis()
  held, temporary = compiled_step.memory(compiled)
  return {
    'flops': cost['flops'],
    'bytes': cost['bytes accessed'],
    'hbm_bytes': held,
    'temporary_bytes': temporary,
    'hbm_share': round(held / chip.memory, 4),
    'collectives': compiled_step.as_json(sent),
    'compile_cpu_seconds': round(seconds),
    **roofline(
      chip,
      cost['flops'],
      cost['bytes accessed'],
      reduced_bytes(sent),
      mesh.size,
    ),
  }


def describe(config, topology: str, chips: int, factor: int, effort: float):
  """What a row is about: two rows with equal descriptions are one."""
  about = compiled_step.describe(config, chips, factor)
  return about | {'topology': topology, 'effort': effort}


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
  about = describe(config, chosen.topology, mesh.size, factor, chosen.effort)
  row = compiled_step.find_or_add(
    chosen.json,
    about,
    lambda: measure(config, mesh, chip, chosen.effort, chosen.hlo),
  )
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
