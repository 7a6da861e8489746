"""Runs of the real program as processes, for the tests to start and stop."""

import fcntl
import hashlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import jax
import numpy as np

from flatmatch_jax.run.workdir import Workdir
from flatmatch_jax.training import load

ROOT = pathlib.Path(__file__).parent.parent
STEPS = 16
TINY = (
  f'--config.steps={STEPS}',
  '--config.model=wrn_10_1',
  '--config.batch_size=8',
  '--config.unlabeled_batch_size=16',
  '--config.eval_batch_size=100',
  '--config.learning_rate=0.03',
  '--config.pad=1',
  '--config.log_every=2',
  '--config.eval_every=4',
  '--config.checkpoint_every=3',
)
# Has both kinds of state: FreeMatch's averages and the buffer of gradients.
CONFIG = f'--config={ROOT}/configs/digits.py:method=flatmatch_e,seed=1'


def environment(folder, tensorflow=False):
  """One device, and programs compiled once for all processes.

  TensorFlow takes seconds to load; without it there are no TensorBoard events,
  and nothing else may change.
  """
  absent = folder / 'absent' / 'tensorflow'
  absent.mkdir(parents=True, exist_ok=True)
  (absent / '__init__.py').write_text("raise ImportError('no tensorflow')\n")
  paths = [str(ROOT)] if tensorflow else [str(absent.parent), str(ROOT)]
  return os.environ | {
    'JAX_NUM_CPU_DEVICES': '1',
    'PYTHONPATH': os.pathsep.join(paths),
  }


def command(workdir, *more, config=CONFIG, main=ROOT / 'main.py', args=()):
  return [str(main), config, *TINY, f'--workdir={workdir}', *args, *more]


def start(folder, args, **options):
  """A process of this Python, its stderr to be read."""
  return subprocess.Popen(
    [sys.executable, *map(str, args)],
    cwd=folder,
    env=environment(folder),
    stdout=subprocess.DEVNULL,
    stderr=subprocess.PIPE,
    text=True,
    **options,
  )


def python(*args, env=os.environ, cwd=None):
  """A process of this Python, which finds the package, from start to end."""
  paths = filter(None, [env.get('PYTHONPATH')])
  return subprocess.run(
    [sys.executable, *map(str, args)],
    cwd=cwd,
    env=dict(env) | {'PYTHONPATH': os.pathsep.join([*paths, str(ROOT)])},
    capture_output=True,
    text=True,
    timeout=600,
  )


def run(folder, args, tensorflow=False):
  return python(*args, env=environment(folder, tensorflow), cwd=folder)


def start_and_stop(folder, args, place, count):
  """A run that has stopped where tests/hurt.py says; None if it ended."""
  process = start(folder, [ROOT / 'tests' / 'hurt.py', place, count, *args])
  _, status = os.waitpid(process.pid, os.WUNTRACED)
  if not os.WIFSTOPPED(status):
    process.returncode = os.waitstatus_to_exitcode(status)
  return process


def go_on(process, number=signal.SIGCONT):
  """Sends a signal to a run that stopped; its exit code and stderr."""
  with process:
    process.send_signal(number)
    process.send_signal(signal.SIGCONT)
    _, stderr = process.communicate(timeout=600)
  return process.returncode, stderr


def interrupt(folder, args, steps, number):
  """Sends a signal to a run that took `steps`; its exit code and stderr."""
  process = start_and_stop(folder, args, 'step', steps)
  assert process.returncode is None, process.stderr.read()
  return go_on(process, number)


def hashes(workdir):
  return {
    str(path.relative_to(workdir)): hashlib.sha256(
      path.read_bytes()
    ).hexdigest()
    for path in sorted(workdir.rglob('*'))
    if path.is_file()
  }


def rows_of(workdir):
  text = (workdir / 'metrics.jsonl').read_text()
  return [json.loads(line) for line in text.splitlines()]


def saved_steps(workdir):
  """Complete checkpoints; unfinished ones have other names."""
  names = (path.name for path in (workdir / 'checkpoints').iterdir())
  return sorted(int(name) for name in names if name.isdigit())


def assert_same_run(workdir, finished, final_state, steps=STEPS):
  """Bit by bit: the whole state, the log, and the errors of the result."""
  state = load.load_run(Workdir(workdir)).state
  assert int(state.step) == steps
  raw = lambda state: jax.tree.leaves_with_path(
    state.replace(rng=jax.random.key_data(state.rng))
  )
  for (path, ours), (_, theirs) in zip(
    raw(state), raw(final_state), strict=True
  ):
    name = jax.tree_util.keystr(path)
    assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes(), name
  ours, theirs = (w / 'metrics.jsonl' for w in (workdir, finished))
  assert ours.read_bytes() == theirs.read_bytes()
  ours, theirs = (
    json.loads((w / 'result.json').read_text()) for w in (workdir, finished)
  )
  for key in theirs.keys() - {'seconds', 'images_per_second'}:
    assert ours[key] == theirs[key], key


def finished_run(tmp_path_factory):
  """A finished run, made once for all tests: a copy of it, and its stderr."""
  folder = own = tmp_path_factory.getbasetemp()
  if 'PYTEST_XDIST_WORKER' in os.environ:
    folder = own.parent
  log = folder / 'first.log'
  with (folder / 'first.lock').open('w') as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    if not log.exists():
      done = run(folder, command(folder / 'first'), tensorflow=True)
      assert done.returncode == 0, done.stderr
      log.write_text(done.stderr)
  if not (own / 'finished').exists():
    shutil.copytree(folder / 'first', own / 'finished')
  return own / 'finished', log.read_text()
