"""What a training step needs on GPUs, by their own compiler, without a GPU.

  pip install --no-deps jax-cuda12-plugin==0.10.2 jax-cuda12-pjrt==0.10.2
  python benchmarks/gpu_compile.py --config configs/cifar10.py:method=uda \\
      --config.dtype=bfloat16 --gpu h100 --gpus 8 --json FILE

Compiles the step that `main.py` would run, sampling and augmentation included,
for arrays without content. Numbers are those of one GPU and one step. FLOPs are
XLA's count before optimization; bytes are what the compiled instructions read
and write, loops once. No kernel is tuned and none runs, so no time follows. A
row that the file has is not compiled again.
"""

import collections
import json
import os
import pathlib
import sys
import time
from typing import NamedTuple

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from absl import app, flags
from jax.experimental import topologies
from ml_collections import config_flags

from benchmarks import compiled_step, hlo, hlo_bytes
from benchmarks.chips import batch_factor
from flatmatch_jax.system import cli, files, sharding
from flatmatch_jax.types import UserError

_MOVES = ('copy', 'transpose')  # What only changes the order of elements.
_LARGE = 0.01  # Of all bytes.


class Gpu(NamedTuple):
  """What Nvidia publishes of a GPU, as far as the compiler asks for it."""

  name: str
  capability: tuple[int, int]
  cores: int  # Streaming multiprocessors.
  units: int  # For float32, in each of them.
  threads: int  # Of each at once.
  shared: int  # Bytes of memory that a core's threads share.
  bandwidth: int  # Bytes a second.
  cache: int  # Bytes.
  clock: float  # GHz.
  memory: int  # Bytes.

  def spec(self) -> str:
    """The text that XLA reads."""
    major, minor = self.capability
    # Volta and Turing let a block have all shared memory; later a KiB is kept.
    block = self.shared - 1024 * (major >= 8)
    return f"""
      gpu_device_info {{
        cuda_compute_capability {{ major: {major} minor: {minor} }}
        threads_per_block_limit: 1024
        threads_per_warp: 32
        threads_per_core_limit: {self.threads}
        shared_memory_per_block: 49152
        shared_memory_per_block_optin: {block}
        shared_memory_per_core: {self.shared}
        registers_per_core_limit: 65536
        registers_per_block_limit: 65536
        core_count: {self.cores}
        fpus_per_core: {self.units}
        block_dim_limit_x: 2147483647
        block_dim_limit_y: 65535
        block_dim_limit_z: 65535
        memory_bandwidth: {self.bandwidth}
        l2_cache_size: {self.cache}
        clock_rate_ghz: {self.clock}
        device_memory_size: {self.memory}
      }}
      platform_name: "CUDA"
      dnn_version_info {{ major: 9 minor: 8 }}
      device_description_str: "{self.name}"
    """


_MB = 2**20
GPUS = {
  'h100': Gpu(
    'NVIDIA H100 80GB HBM3', (9, 0), 132, 128, 2048, 228 * 1024,
    3_352_000_000_000, 50 * _MB, 1.98, 85_000_000_000,
  ),
  'a100': Gpu(
    'NVIDIA A100-SXM4-80GB', (8, 0), 108, 64, 2048, 164 * 1024,
    2_039_000_000_000, 40 * _MB, 1.41, 85_000_000_000,
  ),
  'rtx3090': Gpu(
    'NVIDIA GeForce RTX 3090', (8, 6), 82, 128, 1536, 100 * 1024,
    936_000_000_000, 6 * _MB, 1.695, 25_400_000_000,
  ),
  't4': Gpu(
    'Tesla T4', (7, 5), 40, 64, 1024, 64 * 1024,
    320_000_000_000, 4 * _MB, 1.59, 15_800_000_000,
  ),
}  # fmt: skip


def make_mesh(name: str, number: int, fsdp: int = 1):
  """So many GPUs of this name; each `fsdp` of them share one state."""
  if name not in GPUS:
    raise UserError(f'--gpu={name} is unknown. Known: {", ".join(GPUS)}.')
  try:
    found = topologies.get_topology_desc(
      '',
      platform='cuda',
      target_config=GPUS[name].spec(),
      topology=f'1x1x{number}',
    )
  except Exception as error:
    raise UserError(
      f'There is no compiler for GPUs: {str(error).splitlines()[0]} First `pip '
      'install --no-deps jax-cuda12-plugin==V jax-cuda12-pjrt==V`, where V is '
      'the version of jax.'
    ) from error
  return sharding.make_mesh(fsdp, found.devices)


def moves(text: str) -> tuple[int, dict[str, int]]:
  """Bytes of a program, and those of instructions that only move elements.

  The latter by the name that JAX gave the operation.
  """
  total = 0
  found: collections.Counter = collections.Counter()
  for size, _, operation, source, name in hlo_bytes.instructions(text):
    total += size
    if operation in _MOVES or any(f'wrapped_{move}' in name for move in _MOVES):
      found[source or name] += size
  return total, dict(found)


def measure(config, mesh, out: str | None) -> dict:
  """Compiles the step; returns what the compiler says of it."""
  here = compiled_step.lower(config, sharding.make_mesh(1))
  began = time.process_time()
  compiled = compiled_step.lower(config, mesh).compile()
  seconds = time.process_time() - began
  text = compiled.as_text()
  if out:
    pathlib.Path(out).write_text(text)
  held, temporary = compiled_step.memory(compiled)
  total, moved = moves(text)
  return {
    'flops': here.cost_analysis()['flops'] / mesh.size,
    'bytes': total,
    'held_bytes': held,
    'temporary_bytes': temporary,
    'moved_bytes': sum(moved.values()),
    'large_moves': {
      source: size for source, size in moved.items() if size > _LARGE * total
    },
    'convolutions': text.count('custom_call_target="__cudnn$conv'),
    'products': text.count('custom_call_target="__cublas'),
    'collectives': compiled_step.as_json(hlo.totals(hlo.collectives(text))),
    'compile_cpu_seconds': round(seconds),
  }


def table(rows: list[dict]) -> str:
  """The rows in Markdown, those to be compared below each other."""
  head = 'GPUs, dataset, network, method, dtype, batch, GFLOP, GB accessed, '
  head += '× FixMatch, GB held, GB temporary, cuDNN calls, only moved, '
  head += 'collectives, their MB, compile s'
  lines = [head.split(', ')]
  lines.append(['---'] * len(lines[0]))
  order = 'gpu', 'chips', 'dataset', 'model', 'dtype', 'unlabeled_batch_size'
  key = lambda row: [row[name] for name in order]
  plain = {
    str(key(row)): row['bytes'] for row in rows if row['method'] == 'fixmatch'
  }
  for row in sorted(rows, key=lambda row: [*key(row), row['method']]):
    sent = row['collectives'].values()
    base = plain.get(str(key(row)))
    lines.append(
      [
        f'{row["chips"]} {row["gpu"]}',
        *(row[name] for name in ('dataset', 'model', 'method', 'dtype')),
        f'{row["batch_size"]} + {row["unlabeled_batch_size"]}',
        f'{row["flops"] / 1e9:,.0f}',
        f'{row["bytes"] / 1e9:.2f}',
        f'{row["bytes"] / base:.3f}' if base else '–',
        f'{row["held_bytes"] / 1e9:.2f}',
        f'{row["temporary_bytes"] / 1e9:.2f}',
        str(row['convolutions']),
        f'{100 * row["moved_bytes"] / row["bytes"]:.1f}%',
        str(sum(kind['count'] for kind in sent)),
        f'{sum(kind["bytes"] for kind in sent) / 1e6:.1f}',
        str(row['compile_cpu_seconds']),
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
  mesh = make_mesh(chosen.gpu, chosen.gpus, config.mesh.fsdp)
  sizes = config.batch_size, config.unlabeled_batch_size
  factor = batch_factor(sizes, mesh.size)
  config.batch_size *= factor
  config.unlabeled_batch_size *= factor
  about = compiled_step.describe(config, mesh.size, factor)
  row = compiled_step.find_or_add(
    chosen.json,
    about | {'gpu': chosen.gpu},
    lambda: measure(config, mesh, chosen.hlo),
  )
  print(json.dumps(row, indent=1))


if __name__ == '__main__':
  config_flags.DEFINE_config_file('config', None, 'As of main.py.')
  flags.DEFINE_enum('gpu', 'a100', list(GPUS), 'Which GPU.')
  flags.DEFINE_integer('gpus', 1, 'How many of them.', lower_bound=1)
  flags.DEFINE_string('json', None, 'File of rows, to which to add.')
  flags.DEFINE_string('hlo', None, 'File for the compiled program.')
  flags.DEFINE_string('show', None, 'File of rows to print as a table.')
  with cli.errors_as_lines():
    app.run(main, flags_parser=cli.parse_flags)
