"""A study of CIFAR-10 at an hour of a CPU core per run: docs/results.md.

  python benchmarks/cifar10_fast.py --budget 120 --data_dir DIR
  python benchmarks/cifar10_fast.py --budget 0      # only the tables

Starts one `main.py` after another, --jobs at a time and at low priority, in the
order of the protocol, until all are done or --budget minutes are over. It then
stops what still runs, which takes up to a minute; the next call resumes it.
Each finished run leaves a small record in docs/results/ and is not repeated,
wherever you call this again. A run that fails is named, and the others go on,
unless three fail in a row. Every call ends by writing the tables of
docs/results.md and docs/results/summary.json, and by telling runs to come what
to expect: flatmatch_jax/run/references.json.
"""

import contextlib
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import time
from typing import NamedTuple
import zlib

import psutil

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import pages, references, study_report
from configs import cifar10_fast as fast_config
from flatmatch_jax.run import reference
from flatmatch_jax.run.settings import as_dict
from flatmatch_jax.run.workdir import Workdir
from flatmatch_jax.system import cli, files
from flatmatch_jax.types import UserError

RECORDS = ROOT / 'docs' / 'results'
EVALUATED = ('step', 'error', 'error_raw')
AVERAGED = (  # Over the rows since the evaluation before.
  'labeled_loss',
  'unlabeled_loss',
  'worst_loss',
  'gradient_norm',
  'gradient_angle',
  'cross_sharpness',
  'held_out_sharpness',
  'used_fraction',
  'pseudo_label_accuracy',
  'threshold',
)
SEEDS = (0, 1, 2, 3)
IMAGES = 'fe204151'  # CIFAR-10's fingerprint, as in a run's dataset.json.
_ENOUGH = 3  # Failures one after another.
# Supervised training gets the steps it needs to converge, by number of labels;
# each costs a sixth of the others.
SUPERVISED_STEPS = {250: 10_000, 4000: 20_000}
# Four and a half times as many steps, with smaller ones, in two core-hours.
FLAGSHIP = (('steps', 36_000), ('learning_rate', 0.01))


class Cell(NamedTuple):
  """One run of the study."""

  method: str
  labels: int
  seed: int
  changed: tuple[tuple[str, float], ...] = ()  # Fields of the config.

  @property
  def name(self) -> str:
    changed = (f'{field}={value}' for field, value in self.changed)
    return '-'.join([self.method, str(self.labels), str(self.seed), *changed])

  @property
  def variant(self) -> str:
    seed = f'seed={self.seed},split_seed={self.seed}'
    return f'method={self.method},labels={self.labels},{seed}'

  @property
  def config(self):
    config = fast_config.get_config(self.variant)
    config.update_from_flattened_dict(self.fields)
    return config

  @property
  def fields(self) -> dict:
    """What a run changes in the config's file."""
    fields = dict(self.changed)
    if self.method == 'supervised':
      fields['steps'] = SUPERVISED_STEPS[self.labels]
    return fields

  def command(self, runs: pathlib.Path, data_dir: str) -> list[str]:
    fields = self.fields | {'data_dir': data_dir}
    return [
      sys.executable,
      str(ROOT / 'main.py'),
      f'--config={ROOT}/configs/cifar10_fast.py:{self.variant}',
      *(f'--config.{key}={value}' for key, value in fields.items()),
      f'--workdir={runs / self.name}',
    ]


def cells() -> list[Cell]:
  """The protocol, most important first."""
  grid = lambda methods, labels, seeds: [
    Cell(method, labels, seed) for seed in seeds for method in methods
  ]
  return [
    *grid(('supervised', 'freematch', 'flatmatch'), 250, [0]),
    Cell('flatmatch', 250, 0, FLAGSHIP),
    *grid(('fixmatch', 'flatmatch_e'), 250, [0]),
    *grid(('supervised', 'freematch', 'flatmatch'), 250, [1, 2]),
    *grid(('supervised', 'flatmatch', 'freematch'), 4000, [0]),
    *grid(('supervised', 'freematch', 'flatmatch'), 250, [3]),
    *grid(('supervised', 'flatmatch', 'freematch'), 4000, [1]),
    *grid(('fixmatch', 'flatmatch_e'), 250, [1, 2, 3]),
  ]


def settings(config: dict) -> str:
  """A checksum of what decides a run's errors, with its seeds."""
  decide = reference.settings(config)
  decide |= {key: config[key] for key in ('seed', 'split_seed')}
  return f'{zlib.crc32(json.dumps(decide, sort_keys=True).encode()):08x}'


def todays_settings(cell: Cell) -> str:
  """The same for a cell that has not run yet."""
  return settings(as_dict(cell.config))


def condense(rows: list[dict]) -> list[dict]:
  """A row for each evaluation, in four digits."""
  short = lambda value: float(f'{value:.4g}')
  condensed, since = [], []
  for row in rows:
    since.append(row)
    if 'error' not in row:
      continue
    kept = {key: row[key] for key in EVALUATED}
    for key in AVERAGED:
      values = [r[key] for r in since if r.get(key) is not None]
      if values:
        kept[key] = short(statistics.mean(values))
    condensed.append(kept)
    since = []
  return condensed


def record(cell: Cell, workdir: Workdir) -> None:
  """Keeps the evaluations of a finished run."""
  workdir.read('result.json')  # Or it is not finished.
  about = {
    'settings': settings(workdir.read('config.json')),
    'images': workdir.read('dataset.json')['fingerprint'],
    'core_hours': round(_spent(workdir.path) / 3600, 3),
  }
  check(cell, about, workdir.path)
  RECORDS.mkdir(parents=True, exist_ok=True)
  with files.replacing(RECORDS / f'{cell.name}.jsonl', 'w') as file:
    for line in (about, *condense(workdir.metrics())):
      file.write(json.dumps(line) + '\n')


def check(cell: Cell, about: dict, path: pathlib.Path) -> None:
  """Raises UserError where what is at `path` is not of the protocol."""
  expected = {'settings': todays_settings(cell), 'images': IMAGES}
  if about | expected != about:
    raise UserError(
      f'{path} has {about}, but the protocol has {expected}: its settings '
      'differ from configs/cifar10_fast.py, or its images are not CIFAR-10. '
      'Restore the config and the data, or remove what does not belong.'
    )


def _spent(path: pathlib.Path) -> float:
  """Seconds of processor time that all starts of a run have taken."""
  file = _cpu_file(path)
  return float(file.read_text()) if file.exists() else 0.0


def _cpu_file(path: pathlib.Path) -> pathlib.Path:
  return path.with_name(f'{path.name}.cpu')


def _poll(process, path: pathlib.Path, earlier: float) -> int | None:
  """The exit code, or None while it runs; notes what the run has spent.

  `earlier` starts took so many seconds. Noted at every look, so that a run that
  is killed together with this script is counted, too.
  """
  with contextlib.suppress(psutil.Error):
    times = psutil.Process(process.pid).cpu_times()
    _cpu_file(path).write_text(f'{earlier + times.user + times.system:.3f}')
  return process.poll()


def is_recorded(cell: Cell) -> bool:
  """Whether a cell is done; UserError where it was, by another protocol."""
  path = RECORDS / f'{cell.name}.jsonl'
  if not path.exists():
    return False
  try:
    found, *rows = [json.loads(line) for line in path.read_text().splitlines()]
  except ValueError:  # Cut off, or empty.
    return False
  check(cell, found, path)
  return bool(rows) and rows[-1]['step'] == cell.config.steps


def finished(cell: Cell) -> references.Finished:
  """A recorded cell, to compare other runs of its setting with."""
  lines = (RECORDS / f'{cell.name}.jsonl').read_text().splitlines()
  errors = {row['step']: row['error'] for row in map(json.loads, lines[1:])}
  decide = reference.settings(as_dict(cell.config))
  return references.Finished(cell.name, decide, IMAGES, cell.seed, errors)


def run_all(
  todo, runs: pathlib.Path, data_dir, jobs: int, budget: float
) -> list[str]:
  """Trains `todo`, `jobs` at a time, for `budget` seconds at the most.

  Returns what failed; three in a row end it: what they lack others lack, too.
  """
  until = time.monotonic() + budget
  runs.mkdir(parents=True, exist_ok=True)
  # With a core each, two runs do no less than one after another on both.
  cores = sorted(os.sched_getaffinity(0))
  free = [cores[i % len(cores) :: jobs] for i in range(jobs)]
  waiting, running, failed, in_a_row = list(todo), {}, [], 0
  log_of = lambda cell: runs / f'{cell.name}.log'

  def ended(cell, code):
    if code == 0:
      record(cell, Workdir(str(runs / cell.name)))
      _say(f'{cell.name} is done; {len(waiting)} wait.')
    elif code in (-signal.SIGTERM, 128 + signal.SIGTERM):
      _say(f'{cell.name} is stopped; the next call resumes it.')
    else:
      failed.append(str(log_of(cell)))
      said = log_of(cell).read_text(errors='replace').splitlines()
      _say(f'{cell.name} failed (code {code}): {said[-1] if said else ""}')

  try:
    while (
      (waiting or running) and time.monotonic() < until and in_a_row < _ENOUGH
    ):
      while waiting and free:
        cell, mine = waiting.pop(0), free.pop()
        _say(f'{cell.name} begins; its log is {log_of(cell)}')
        with log_of(cell).open('a') as log:
          log.write(f'{time.strftime("%F %T")} {cell.name}\n')
          log.flush()
          process = subprocess.Popen(
            cell.command(runs, data_dir),
            stdout=log,
            stderr=subprocess.STDOUT,
            process_group=0,  # Ctrl-C is for us; we ask them to stop.
          )
        running[cell] = process, mine, _spent(runs / cell.name)
        os.sched_setaffinity(process.pid, mine)  # Before JAX looks at it.
        os.setpriority(os.PRIO_PROCESS, process.pid, 19)
      time.sleep(1)
      for cell, (process, mine, spent) in list(running.items()):
        if _poll(process, runs / cell.name, spent) is not None:
          del running[cell]
          free.append(mine)
          in_a_row = in_a_row + 1 if process.returncode else 0
          ended(cell, process.returncode)
    if in_a_row == _ENOUGH:
      _say(f'{in_a_row} failed in a row, so {len(waiting)} were not tried.')
  finally:
    for process, *_ in running.values():
      process.send_signal(signal.SIGTERM)
    while running:
      time.sleep(0.1)
      for cell, (process, _, spent) in list(running.items()):
        if _poll(process, runs / cell.name, spent) is not None:
          del running[cell]
          ended(cell, process.returncode)
  return failed


def _say(text):
  with contextlib.suppress(OSError):  # Nobody reads it any more.
    print(f'{time.strftime("%H:%M")} {text}', flush=True)


def main():
  parser = cli.Parser(description=__doc__.splitlines()[0])
  parser.add_argument('--runs', default='runs/cifar10_fast')
  parser.add_argument('--data_dir', default='')
  parser.add_argument(
    '--jobs', type=int, default=len(os.sched_getaffinity(0)), help='at a time'
  )
  parser.add_argument('--budget', type=float, default=360, help='in minutes')
  args = parser.parse_args()
  if args.jobs < 1:
    parser.error(f'--jobs {args.jobs} must be at least 1')
  if not args.budget >= 0:
    parser.error(f'--budget {args.budget} must be at least 0 minutes')
  names = [cell.name for cell in cells()]
  todo = [cell for cell in cells() if not is_recorded(cell)]
  print(f'{len(names) - len(todo)} of {len(names)} runs are recorded.')
  runs = pathlib.Path(args.runs).resolve()
  pages.check_marks(ROOT / 'docs' / 'results.md', study_report.MARKS)
  # As Ctrl-C does: what runs is stopped, and saved.
  for number in (signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(number) != signal.SIG_IGN:  # As by nohup.
      signal.signal(number, lambda number, _: sys.exit(128 + number))
  try:
    failed = run_all(todo, runs, args.data_dir, args.jobs, 60 * args.budget)
  finally:
    done = [cell for cell in cells() if is_recorded(cell)]
    shown = [cell.name for cell in done]
    study_report.write(RECORDS, ROOT / 'docs', names, shown)
    references.enter([finished(cell) for cell in done], reference.FILE)
  if failed:
    raise SystemExit(f'These runs failed; their logs: {", ".join(failed)}')


if __name__ == '__main__':
  with cli.errors_as_lines():
    main()
