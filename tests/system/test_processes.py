"""Real processes on one machine, each with devices of its own, as one run."""

import http.server
import json
import os
import re
import socket
import threading

import gcs
import jax
import numpy as np
import processes
import pytest
import runs
import streams
import tiny_imagenet
import tiny_main

from flatmatch_jax import models
from flatmatch_jax.run.workdir import Workdir
from flatmatch_jax.system import clusters, distributed, sharding
from flatmatch_jax.training import load
from flatmatch_jax.types import UserError

STEPS = 12
CONFIG = (
  # Fixes labels, for which all images are scored; and has no strong views,
  # which are slow to compile.
  f'--config={processes.ROOT}/configs/digits.py:'
  'method=pseudo_label+flatmatch_fix,seed=1',
  '--config.recipe_args.pretrain_steps=2',
  '--config.recipe_args.num_fixed=60',
  f'--config.steps={STEPS}',
  '--config.model=wrn_10_1',  # Replaced by a smaller one.
  '--config.batch_size=8',
  '--config.unlabeled_batch_size=16',
  '--config.eval_batch_size=100',
  '--config.log_every=2',
  '--config.eval_every=4',
  '--config.checkpoint_every=3',
)


MAIN = str(processes.ROOT / 'tests' / 'tiny_main.py')


def command(workdir, *args):
  return [MAIN, *CONFIG, f'--workdir={workdir}', *args]


def signalled(workdir, step, name, number):
  """The command of a run in which a process gets a signal after a step."""
  return [MAIN, str(step), name, str(number), *command(workdir)[1:]]


@pytest.fixture(scope='module')
def env(tmp_path_factory):
  return processes.environment(tmp_path_factory.mktemp('processes'))


def train(count, workdir, env, codes=None, command=command):
  ended = processes.run(count, command(workdir), env)
  said = '\n'.join(process.output for process in ended)
  assert [e.returncode for e in ended] == (codes or [0] * count), said
  return ended


@pytest.fixture(scope='module')
def alone(env, tmp_path_factory):
  """The workdir of the run of one process."""
  workdir = tmp_path_factory.mktemp('alone') / 'run'
  train(1, workdir, env)
  return workdir


@pytest.fixture(scope='module')
def two(env, tmp_path_factory):
  """The workdir of the run of two processes, and what each said."""
  workdir = tmp_path_factory.mktemp('two') / 'run'
  return workdir, train(2, workdir, env)


def metrics(workdir):
  return Workdir(str(workdir)).metrics()


def assert_close(workdir, reference):
  """Equal but for rounding: sums over devices have another order."""
  rows, expected = metrics(workdir), metrics(reference)
  assert len(rows) == len(expected)
  for row, other in zip(rows, expected, strict=True):
    assert row.keys() == other.keys()
    for key, value in row.items():
      here, there = np.array((value, other[key]), float)  # None is NaN.
      np.testing.assert_allclose(here, there, 1e-4, 1e-6, err_msg=key)


def state_of(workdir, monkeypatch):
  """All numbers of the last checkpoint."""
  monkeypatch.setattr(models, 'create', tiny_main.create)
  state = load.load_run(Workdir(str(workdir))).state
  state = state.replace(rng=jax.random.key_data(state.rng))
  return jax.tree.map(np.asarray, state)


def test_two_processes_equal_one(two, alone):
  assert_close(two[0], alone)


def test_evaluation_counts_each_example_once(two, alone):
  # 360 test images in four batches of 100, of which a process has 50 rows.
  errors = [row['error'] for row in metrics(two[0]) if 'error' in row]
  assert errors == [r['error'] for r in metrics(alone) if 'error' in r]
  assert all(3.6 * e == pytest.approx(round(3.6 * e)) for e in errors)


def test_labels_are_fixed_as_by_one_process(two, alone):
  here, there = (
    json.loads((workdir / 'fixed.json').read_text())
    for workdir in (two[0], alone)
  )
  assert len(here['index']) == 60
  for name in ('index', 'label', 'accuracy'):
    assert here[name] == there[name]


def test_one_process_talks_and_writes_files(two, alone):
  workdir, (first, second) = two
  assert 'test error' in first.output
  assert all(line.startswith('[Gloo]') for line in second.output.splitlines())
  names = lambda folder: sorted(os.listdir(folder))
  assert names(workdir) == names(alone)
  assert names(workdir / 'checkpoints') == names(alone / 'checkpoints')
  result = json.loads((workdir / 'result.json').read_text())
  assert result['steps'] == STEPS


def test_run_goes_from_one_to_four_to_two_processes(
  env, alone, tmp_path, monkeypatch
):
  """Two of the runs end by a signal to one of their processes."""
  workdir = tmp_path / 'run'
  stop = lambda step: lambda w: signalled(w, step, 'SIGTERM', number=0)
  (one,) = train(1, workdir, env, [143], stop(4))
  assert 'step 4 is saved' in one.output
  # Ctrl-C to the last of the four is SIGTERM to the others; all stop after
  # the same step.
  stop = lambda w: signalled(w, 1, 'SIGINT', number=3)
  four = train(4, workdir, env, [143, 143, 143, 130], stop)
  at = int(re.search(r'step (\d+) is saved', four[0].output)[1])
  assert 'Resuming from step 4 ' in four[0].output
  assert 4 < at < STEPS
  first, _ = train(2, workdir, env)
  assert f'Resuming from step {at} ' in first.output
  assert_close(workdir, alone)
  states = [state_of(w, monkeypatch) for w in (workdir, alone)]
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-5), *states
  )


def test_killed_process_ends_the_other_and_nothing_is_lost(
  env, two, tmp_path, monkeypatch
):
  """Not even where the last checkpoint is torn as well."""
  workdir = tmp_path / 'run'
  kill = lambda w: signalled(w, 8, 'SIGKILL', number=1)
  first, _ = train(2, workdir, env, [1, -9], kill)
  assert 'error: lost another process' in first.output
  assert 'resumes from the last checkpoint' in first.output
  assert 'Traceback' not in first.output
  *_, previous, latest = runs.saved_steps(workdir)
  arrays = (workdir / 'checkpoints' / str(latest)).glob('state/**/d/*')
  for path in arrays:
    path.write_bytes(path.read_bytes()[:-1])
  first, _ = train(2, workdir, env)
  assert f'The checkpoint of step {latest} is damaged (' in first.output
  assert f'Resuming from step {previous} ' in first.output
  assert os.listdir(workdir / 'damaged') == [str(latest)]
  # Bit for bit: also the sums over processes have an order.
  for name in ('metrics.jsonl', 'fixed.json', 'split.json'):
    assert (workdir / name).read_bytes() == (two[0] / name).read_bytes()
  states = [state_of(w, monkeypatch) for w in (workdir, two[0])]
  jax.tree.map(np.testing.assert_array_equal, *states)


def test_run_in_a_bucket_stops_and_resumes_to_the_same_bits(
  env, two, tmp_path, monkeypatch
):
  """The processes share no disk, as on the machines of a pod."""
  url, stop = 'gs://bucket/run', lambda w: signalled(w, 4, 'SIGTERM', number=1)
  with gcs.serving(tmp_path) as bucket:
    # Paths in buckets need TensorFlow.
    env = env | bucket.environment | {'PYTHONPATH': str(processes.ROOT)}
    stopped, _ = train(2, url, env, [143, 143], stop)
    assert '.lock' not in bucket.contents('run')
    resumed, _ = train(2, url, env)
    here = bucket.download('run', tmp_path / 'run')
  at = re.search(r'step (\d+) is saved', stopped.output)[1]
  assert f'Resuming from step {at} of {STEPS}' in resumed.output
  for name in ('metrics.jsonl', 'fixed.json', 'split.json'):
    assert (here / name).read_bytes() == (two[0] / name).read_bytes()
  states = [state_of(w, monkeypatch) for w in (here, two[0])]
  jax.tree.map(np.testing.assert_array_equal, *states)


SLURM = {
  'SLURM_JOB_ID': '7',
  'SLURM_STEP_NODELIST': 'node[1-2]',
  'SLURM_NTASKS': '2',
  'SLURM_PROCID': '0',
  'SLURM_LOCALID': '0',
}

RESTORE = """
import pathlib
import shutil
import sys

import jax
import numpy as np

from flatmatch_jax.system import distributed, sharding
from flatmatch_jax.run.checkpoint import Checkpoints
from flatmatch_jax.types import UserError

distributed.connect()
print(f'process {jax.process_index()} of {jax.process_count()}')
folder, mesh = pathlib.Path(sys.argv[1]), sharding.make_mesh()
over_batch = sharding.over_batch(mesh)
whole = jax.jit(lambda x: x, out_shardings=sharding.replicated(mesh))
make = lambda step: np.random.default_rng(step).normal(size=(2, 3000))
place = lambda step: {'x': sharding.place(make(step), over_batch)}
sound = Checkpoints(folder / 'sound')
for step in (1, 2, 3):
  sound.save(step, place(step), {}, 4.0 - step)
sound.close()


def tear(*paths):
  for path in paths:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def hide(directory):
  if not distributed.is_first():  # As a disk that is slow to show names.
    Checkpoints.steps = lambda self: [2]


notes = lambda d, step: d / str(step) / 'notes' / 'metadata'
HURTS = {
  'nothing': lambda d: None,
  'notes': lambda d: tear(notes(d, 3)),
  'older notes': lambda d: tear(notes(d, 2)),
  'rows of process 1': lambda d: tear(
    *d.glob('3/state/ocdbt.process_1/d/*')
  ),
  'all': lambda d: tear(*(notes(d, step) for step in (2, 3))),
  'not shown': hide,
}
for name, hurt in HURTS.items():
  d = folder / name / 'checkpoints'
  if distributed.is_first():
    shutil.copytree(folder / 'sound', d)
  if distributed.is_first() or hurt is hide:
    hurt(d)
  distributed.wait_for_all(name)
  try:
    state, _ = Checkpoints(d).restore(place(0))
    x = np.asarray(whole(state['x']))
    same = [np.array_equal(x, make(s).astype(x.dtype)) for s in range(4)]
    step = same.index(True)
  except UserError as error:
    step = 'none' if 'only damaged' in str(error) else error
  aside = sorted(path.name for path in d.parent.glob('damaged/*'))
  distributed.wait_for_all(f'{name}, seen')
  print(f'{name}: {step}, aside {aside}', flush=True)
"""


def test_all_processes_agree_on_the_checkpoint_that_is_whole(env, tmp_path):
  """Also where only one of them reads what is torn.

  They find each other as a step that srun starts, but for the host's name.
  """
  slurm = SLURM | {
    'SLURM_STEP_NODELIST': 'localhost',
    'JAX_COORDINATOR_PORT': str(processes.free_port()),
  }
  of_slurm = lambda number: env | slurm | {'SLURM_PROCID': str(number)}
  ended = processes.run(2, ['-c', RESTORE, str(tmp_path)], of_slurm)
  first, second = (process.output for process in ended)
  found = [
    'nothing: 3, aside []',
    "notes: 2, aside ['3']",
    "older notes: 3, aside ['2']",
    "rows of process 1: 2, aside ['3']",
    'all: none, aside []',
    'not shown: 3, aside []',
  ]
  for number, output in enumerate((first, second)):
    assert f'process {number} of 2' in output
    lines = [line for line in output.splitlines() if ', aside ' in line]
    assert lines == found, output
  assert first.count(' is damaged (') == 3
  assert 'is damaged' not in second


def test_error_of_one_process_ends_all(env, tmp_path):
  wrong = lambda n: command(tmp_path / 'run', f'--config.batch_size={8 - n}')
  first, second = processes.run(2, wrong, env)
  assert (first.returncode, second.returncode) == (2, 2)
  line = 'config.batch_size=7 must be divisible by the 2 devices'
  assert f'error: {line}' in second.output
  assert f'error: process 1 failed: {line}' in first.output
  assert 'the nearest sizes are 6 and 8' in first.output
  assert 'Traceback' not in first.output + second.output
  assert not (tmp_path / 'run').exists()


def test_workdir_must_be_one_for_all(env, tmp_path):
  args = lambda number: command(tmp_path / str(number))
  ended = processes.run(2, args, env)
  assert [process.returncode for process in ended] == [2, 2]
  assert 'what process 0 writes is not seen by 1.' in ended[0].output
  assert not list(tmp_path.glob('*/*'))


def test_lonely_process_says_whom_it_waited_for(env, tmp_path):
  flags = ('--num_processes=2', '--process_id=0', '--connect_seconds=2')
  coordinator = f'localhost:{processes.free_port()}'
  args = command(tmp_path / 'run', *flags, f'--coordinator={coordinator}')
  (ended,) = processes.run(1, args, env)
  assert ended.returncode == 2
  assert f'within 2 s through {coordinator}' in ended.output


@pytest.mark.parametrize(
  ('flags', 'complaint'),
  [
    (('here:1', None, None), 'missing: --num_processes, --process_id'),
    ((None, 2, 0), 'missing: --coordinator'),
    (('here:1', 0, 0), '--num_processes=0 must be at least 1'),
    (('here:1', 2, 2), '--process_id=2 must lie from 0 to 1'),
    (('here:1', 2, -1), '--process_id=-1 must lie from 0 to 1'),
    (('here', 2, 0), '--coordinator=here must be HOST:PORT'),
    (('here:', 2, 0), '--coordinator=here: must be HOST:PORT'),
    (('here:99999', 2, 0), 'from 1 to 65535'),
    (('no.such.invalid:1', 2, 1), 'no such host'),
  ],
)
def test_wrong_flags_are_named(flags, complaint):
  with pytest.raises(UserError, match=re.escape(complaint)):
    distributed.connect(*flags)


@pytest.mark.parametrize('seconds', [0, -3])
def test_processes_must_wait_for_each_other(seconds):
  with pytest.raises(UserError, match=f'--connect_seconds={seconds} must be'):
    distributed.connect(seconds=seconds)


def test_port_in_use_is_named():
  with socket.create_server(('localhost', 0)) as taken:
    port = taken.getsockname()[1]
    with pytest.raises(UserError, match='process 0 cannot listen there'):
      distributed.connect(f'localhost:{port}', 2, 0)


POD = {'TPU_ML_PLATFORM': 'JAX', 'TPU_WORKER_HOSTNAMES': 'a,b'}
JOB = {'KUBERNETES_SERVICE_HOST': '10.0.0.1', 'JOB_COMPLETION_INDEX': '0'}


@pytest.mark.parametrize(
  ('environ', 'cluster'),
  [
    ({}, ''),
    (SLURM, 'Slurm'),
    (SLURM | {'SLURM_NTASKS': '1'}, ''),
    # An interactive shell in an allocation of many tasks.
    (SLURM | {'SLURM_STEP_NUM_TASKS': '1'}, ''),
    # A batch script, outside of srun.
    ({k: v for k, v in SLURM.items() if 'STEP' not in k}, ''),
    (POD, 'the TPU pod'),
    (POD | {'TPU_WORKER_HOSTNAMES': 'a'}, ''),
    (
      POD | {'TPU_WORKER_HOSTNAMES': 'a', 'MEGASCALE_NUM_SLICES': '2'},
      'the TPU pod',
    ),
    (POD | {'JAX_PLATFORMS': 'cpu'}, ''),
    # The compiler of TPUs, on a machine without any.
    ({'TPU_SKIP_MDS_QUERY': '1', 'TPU_WORKER_HOSTNAMES': 'localhost'}, ''),
    (JOB, 'Kubernetes'),
    ({'KUBERNETES_SERVICE_HOST': '10.0.0.1'}, ''),
  ],
)
def test_cluster_is_found_only_where_processes_are_several(environ, cluster):
  assert clusters.find_cluster(environ) == cluster


@pytest.mark.parametrize(('workers', 'cluster'), [(1, ''), (4, 'the TPU pod')])
def test_pod_is_found_by_its_metadata(workers, cluster, monkeypatch):
  endpoints = ','.join(f'id{n}:8470:10.0.0.{n}' for n in range(workers))

  class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
      asked = self.headers['Metadata-Flavor'] == 'Google'
      self.send_response(200 if asked else 403)
      self.end_headers()
      self.wfile.write(endpoints.encode())

    def log_message(self, *args):
      pass

  monkeypatch.setenv('http_proxy', 'http://127.0.0.1:9')  # Not asked.
  with http.server.HTTPServer(('127.0.0.1', 0), Handler) as server:
    address = f'http://127.0.0.1:{server.server_port}/'
    monkeypatch.setattr(clusters, '_WORKERS', address)
    thread = threading.Thread(target=server.handle_request)
    thread.start()
    assert clusters.find_cluster({'TPU_ML_PLATFORM': 'JAX'}) == cluster
    thread.join()


def test_streams_of_two_processes_equal_those_of_one(env, tmp_path):
  """Also what they classify; and each process decodes its own rows only."""
  tiny_imagenet.prepare(tmp_path)
  out = tmp_path / 'found.npz'
  script = str(processes.ROOT / 'tests' / 'streams.py')
  with_tensorflow = env | {'PYTHONPATH': str(processes.ROOT)}
  ended = processes.run(2, [script, str(tmp_path), str(out)], with_tensorflow)
  alone = sharding.make_mesh(devices=jax.devices()[:1])
  expected, read = streams.everything(tmp_path, alone)
  # Three batches of 4 + 8 rows, and 7 test images.
  assert read == (36, 7)
  for process, test_rows in zip(ended, (4, 3), strict=True):
    assert f'read 18 {test_rows}' in process.output, process.output
  with np.load(out) as arrays:
    found = [arrays[name] for name in arrays]
  for a, b in zip(expected, found, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-6)
  assert len(found) == 3 * 7 + 2
