"""Runs in a bucket: gs://bucket/…, of a server on this machine."""

import contextlib
import hashlib
import json
import math
import os
import subprocess
import sys
import threading
import time

from clu import metric_writers
import conftest
import gcs
import numpy as np
from PIL import Image
import pytest
import runs

from flatmatch_jax import analyze, evaluate, predict, sweep
from flatmatch_jax.export import __main__ as export
from flatmatch_jax.report import __main__ as report
from flatmatch_jax.run.checkpoint import Checkpoints
from flatmatch_jax.run.workdir import Workdir, saved_steps
from flatmatch_jax.system import buckets, cli, files
from flatmatch_jax.training import loop
from flatmatch_jax.types import UserError

CONFIG = conftest.make_config()
# A process that trains as the tests of this file do.
TRAIN = """
import sys
sys.path.insert(0, sys.argv[1])
import conftest, tiny_main
from flatmatch_jax import models
from flatmatch_jax.run import progress
from flatmatch_jax.system import cli
from flatmatch_jax.training import loop
models.create = tiny_main.create
progress._tensorboard_writers = lambda workdirs: [None] * len(workdirs)
with cli.errors_as_lines():
  loop.train_and_evaluate(conftest.make_config(), sys.argv[2])
"""


def start(url):
  """A process that trains, its stderr to be read."""
  return subprocess.Popen(
    [sys.executable, '-c', TRAIN, runs.ROOT / 'tests', url],
    env=os.environ
    | {'PYTHONPATH': str(runs.ROOT), 'TF_CPP_MIN_LOG_LEVEL': '3'},
    stderr=subprocess.PIPE,
    text=True,
  )


@pytest.fixture(scope='module')
def server(tmp_path_factory):
  with (
    gcs.serving(tmp_path_factory.mktemp('gcs')) as server,
    pytest.MonkeyPatch.context() as patch,
  ):
    for name, value in server.environment.items():
      patch.setenv(name, value)
    soon = {'max_retries': 3, 'initial_delay': '10ms', 'max_delay': '50ms'}
    patch.setattr(buckets, '_RETRIES', soon)
    yield server


@pytest.fixture
def bucket(server):
  server.requests()
  yield server
  server.heal()
  server.drop()
  server.heal()


@pytest.fixture
def path(bucket):
  return files.to_path('gs://bucket/run/x')


@pytest.fixture(scope='module')
def finished(tiny_network, tmp_path_factory):
  """A run in a folder, and its last state."""
  del tiny_network
  folder = tmp_path_factory.mktemp('finished')
  return folder, loop.train_and_evaluate(CONFIG, str(folder))


def assert_same_run(bucket, finished, tmp_path):
  here = bucket.download('run', tmp_path / 'run')
  runs.assert_same_run(here, *finished, CONFIG.steps)
  return here


def test_run_in_a_bucket_equals_one_in_a_folder(bucket, finished, tmp_path):
  loop.train_and_evaluate(CONFIG, 'gs://bucket/run')
  here = assert_same_run(bucket, finished, tmp_path)
  names = lambda folder: {p.name for p in folder.iterdir()}
  assert names(here) == names(finished[0])  # And the lease is released.
  for name in ('config.json', 'split.json', 'dataset.json', 'versions.json'):
    assert (here / name).read_bytes() == (finished[0] / name).read_bytes()
  bucket.requests()
  loop.train_and_evaluate(CONFIG, 'gs://bucket/run')
  asked = bucket.requests()
  assert not [x for x in asked if not x.startswith('GET')]  # Finished before.


def test_killed_while_saving_damaged_and_resumed(
  bucket, finished, tmp_path, capsys
):
  # A file of the checkpoint of step 4 that never arrives.
  bucket.fail('stall', method='POST', path='checkpoints/4/state/.*manifest')
  with start('gs://bucket/run') as process:
    bucket.wait_for('name=run/checkpoints/4/state', process)
    with pytest.raises(UserError) as error:  # Two at once.
      loop.train_and_evaluate(CONFIG, 'gs://bucket/run')
    process.kill()
  bucket.heal()
  with pytest.raises(UserError) as again:  # Nobody knows that it is dead.
    loop.train_and_evaluate(CONFIG, 'gs://bucket/run')
  for message in (str(error.value), str(again.value)):
    assert f'in use by process {process.pid} on ' in message
    assert 'its lease expires at ' in message
  lease = json.loads(bucket.contents('run')['.lock'])
  expired = lease | {'expires': time.time() - 1}
  bucket.put('run/.lock', json.dumps(expired).encode())
  assert any('checkpoints/4/' in name for name in bucket.contents('run'))
  # Those of later steps too, if it came so far before it was killed.
  assert Workdir('gs://bucket/run').metrics()[-1]['step'] >= 4
  # And the one before is damaged.
  bucket.put('run/checkpoints/3/notes/metadata', b'{')
  capsys.readouterr()
  loop.train_and_evaluate(CONFIG, 'gs://bucket/run')
  said = capsys.readouterr().err
  assert 'kept as gs://bucket/run/damaged/3' in said
  assert 'Resuming from step 2 of 6' in said
  here = assert_same_run(bucket, finished, tmp_path)
  assert (here / 'damaged' / '3' / 'notes' / 'metadata').read_bytes() == b'{'


def test_refused_while_saving(bucket, finished, tmp_path, capsys):
  bucket.fail(
    403,
    method='POST',
    path='checkpoints/4/commit_success',
    text='no storage.objects.create',
  )
  with start('gs://bucket/run') as process:
    _, stderr = process.communicate(timeout=300)
  assert process.returncode == 2, stderr
  line = stderr.splitlines()[-1]
  assert line.startswith('error: Cannot write gs://bucket/run/checkpoints: ')
  assert 'permission denied' in line
  assert '(403: no storage.objects.create)' in line
  assert 'the same command resumes' in line
  assert 'Traceback' not in stderr
  bucket.heal()
  loop.train_and_evaluate(CONFIG, 'gs://bucket/run')
  assert 'Resuming from step 3 of 6' in capsys.readouterr().err
  assert_same_run(bucket, finished, tmp_path)


@pytest.mark.parametrize('folder', ['', 'state/'])
def test_refused_folder_of_a_checkpoint_is_one_line_soon(folder, bucket):
  # TensorFlow remembers for seconds what there was in the other test.
  place = f'gs://bucket/soon{len(folder)}'
  saved = Checkpoints(files.to_path(place))
  save = lambda step: saved.save(step, {'x': np.arange(3)}, {}, None)
  save(1)
  saved.wait()
  bucket.fail(403, method='POST', path=f'/2/{folder}&')
  began = time.monotonic()
  with pytest.raises(UserError, match=f'write {place}: permission denied'):
    save(2)
  assert time.monotonic() - began < 60
  assert saved.steps() == [1]
  bucket.heal()
  save(2)
  saved.close()
  assert saved.steps() == [1, 2]


@pytest.mark.parametrize(
  ('fault', 'said'),
  [
    (401, 'not logged in'),
    (403, 'permission denied'),
    (503, 'the storage does not answer (503: backendError of the test server)'),
    ('reset', 'the storage cannot be reached'),
    ('gone', 'there is no such bucket'),
  ],
)
def test_bucket_that_refuses_is_one_line(fault, said, bucket, finished, capsys):
  if fault == 'gone':
    bucket.drop()
  else:  # TensorFlow would take its time to try again.
    bucket.fail(fault, path='' if fault == 403 else 'tensorstore=')
  with pytest.raises(SystemExit), cli.errors_as_lines():
    loop.train_and_evaluate(CONFIG, 'gs://bucket/run')
  stderr = capsys.readouterr().err
  assert stderr.startswith('error: ')
  assert 'gs://bucket/run' in stderr
  assert said in stderr
  assert stderr.count('\n') == 1
  bucket.heal()
  assert not bucket.contents()


def upload(bucket, finished, name):
  """As if the run had been in the bucket."""
  for file in sorted(finished[0].rglob('*')):
    if file.is_file():
      bucket.put(f'{name}/{file.relative_to(finished[0])}', file.read_bytes())
  for step in runs.saved_steps(finished[0]):
    bucket.put(f'{name}/checkpoints/{step}/commit_success.txt', b'')


def test_commands_take_a_bucket(bucket, finished, tmp_path, call):
  def said(*args):
    code, stdout, stderr = call(*args)
    assert code == 0, stderr
    return stdout

  folder, url = str(finished[0]), 'gs://bucket/run'
  upload(bucket, finished, 'run')
  image, out = tmp_path / 'image.png', 'gs://bucket/run/predictions.csv'
  Image.fromarray(np.zeros((8, 8), np.uint8)).save(image)
  assert said(evaluate, '--workdir', url) == said(evaluate, '--workdir', folder)
  here = said(predict, '--workdir', folder, image)
  said(predict, '--workdir', url, image, '--out', out)
  exported = 'gs://bucket/run/model.safetensors'
  said(export, '--workdir', url, '--out', exported)
  said(analyze, '--workdir', url, '--what', 'convergence')
  made = said(report, '--workdir', url)
  assert made == 'The report is in gs://bucket/run/report.html\n'
  found = bucket.contents('run')
  assert found['predictions.csv'].decode().split() == here.split()
  assert (
    found['evaluation.json'] == (finished[0] / 'evaluation.json').read_bytes()
  )
  model = hashlib.sha256(found['model.safetensors']).hexdigest()
  assert json.loads(found['model.safetensors.json'])['sha256'] == model
  assert found['analysis/convergence.png'].startswith(b'\x89PNG')
  assert b'Convergence' in found['report.html']
  upload(bucket, finished, 'others/a')
  upload(bucket, finished, 'others/b')
  said(report, '--workdir', 'gs://bucket/others')
  table = bucket.contents('others')['report.csv'].decode()
  assert table.count('pseudo_label') == 1  # Two runs of one setting.


@pytest.mark.usefixtures('tiny_network')
def test_sweep_in_a_bucket(bucket):
  config = conftest.make_config('supervised', steps=2, probe_every=0)
  sweep.sweep(config, 'gs://bucket/sweep', {'seeds': [0, 1]}, at_once=1)
  found = bucket.contents('sweep')
  assert {'seeds=0/result.json', 'seeds=1/result.json'} <= found.keys()
  assert not any(name.endswith('.lock') for name in found)
  asked = bucket.requests()
  members = sweep.sweep(config, 'gs://bucket/sweep', {'seeds': [0, 1]})
  assert not sweep.stopped(members)
  assert asked
  assert not any('checkpoints' in line for line in bucket.requests())


def test_checkpoint_that_cannot_be_read_now_is_not_damaged(bucket, finished):
  upload(bucket, finished, 'run')
  bucket.put('run/result.json', None)
  before = bucket.contents()
  bucket.fail(503, path='/6/notes/metadata')
  with pytest.raises(UserError, match=r'Cannot read .*503.*Nothing was'):
    loop.train_and_evaluate(CONFIG, 'gs://bucket/run')
  bucket.heal()
  assert bucket.contents('run/checkpoints') == {
    name.removeprefix('run/checkpoints/'): content
    for name, content in before.items()
    if name.startswith('run/checkpoints/')
  }


# Objects.


@pytest.mark.parametrize('fault', [429, 503, 'reset', 'lost', 'stall'])
def test_put_is_tried_again(fault, bucket, path):
  bucket.fail(fault, method='POST', times=1 if fault == 'stall' else 2)
  content = os.urandom(2**20)
  with files.replacing(path) as file:
    file.write(content)
  assert bucket.contents('run') == {'x': content}
  assert files.read_bytes(path, 2**20) == content


def test_object_is_whole_or_the_old_one(bucket, path):
  with files.replacing(path, mode='w', encoding='utf-8') as file:
    file.write('ä')
  with (
    contextlib.suppress(KeyboardInterrupt),
    files.replacing(path) as file,
  ):
    file.write(b'half')
    raise KeyboardInterrupt
  bucket.fail(429, text='quota exceeded')
  with (
    pytest.raises(UserError, match=r'a quota .*\(429: quota exceeded\)'),
    files.writing(path),
    files.replacing(path) as file,
  ):
    file.write(b'new')
  assert bucket.contents('run') == {'x': 'ä'.encode()}


def test_events_of_tensorboard_are_put_whole(bucket):
  workdir = Workdir('gs://bucket/run')
  with workdir.lock():
    writer = metric_writers.SummaryWriter(str(workdir.events))
    for step in (1, 2):
      writer.write_scalars(step, {'loss': 0.5})
      writer.flush()
      workdir.sync_metrics()
      (file,) = workdir.events.iterdir()
      found = bucket.contents('run/tensorboard')
      assert found == {file.name: file.read_bytes()}
    writer.close()
  assert '.lock' not in bucket.contents('run')


def test_checkpoints_that_cannot_be_listed_are_one_line(bucket):
  bucket.fail(403)
  with pytest.raises(UserError, match=r'Cannot read gs://bucket/run/check'):
    saved_steps(Workdir('gs://bucket/run').checkpoints)


# Leases.


def test_one_of_many_starts_at_once(bucket, path):
  found, refused = [], []

  def start(number):
    try:
      found.append(buckets.Lease(path, f'process {number} on here'))
    except UserError as error:
      refused.append(str(error))

  threads = [threading.Thread(target=start, args=[n]) for n in range(8)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  (lease,) = found
  assert len(refused) == 7
  assert all('is in use by process ' in line for line in refused)
  lease.release()
  assert not bucket.contents()
  buckets.Lease(path, 'next').release()


def test_lease_whose_answer_was_lost_is_held(bucket, path):
  bucket.fail('lost', method='POST', times=1)
  lease = buckets.Lease(path, 'process 1 on here')
  with pytest.raises(UserError, match='in use by process 1 on here'):
    buckets.Lease(path, 'process 2 on here')
  lease.release()
  assert not bucket.contents()


def test_lease_is_renewed(bucket, path, monkeypatch):
  monkeypatch.setattr(buckets, '_RENEW', 0.01)
  lease = buckets.Lease(path, 'first')
  before = bucket.contents()
  while bucket.contents() == before:
    time.sleep(0.01)
  lease.check()
  lease.release()
  assert not bucket.contents()


def test_lease_whose_renewal_was_not_answered_is_held(bucket, path):
  lease = buckets.Lease(path, 'first')
  bucket.fail('lost', method='POST')
  with pytest.raises(ValueError, match='retry attempts failed'):
    lease._renew()
  bucket.heal()
  lease._renewed = -math.inf
  lease.check()
  lease.release()
  assert not bucket.contents()


@pytest.mark.parametrize(
  'pause',
  [
    lambda lease: setattr(lease, '_renewed', -math.inf),
    # In suspend only the one clock goes on.
    lambda lease: setattr(lease, '_expires', 0),
    lambda lease: lease._renew(),  # As its thread finds.
  ],
  ids=['stopped', 'suspended', 'found'],
)
def test_paused_process_finds_its_lease_taken(bucket, path, pause):
  paused = buckets.Lease(path, 'paused')
  expired = json.loads(bucket.contents('run')['x']) | {'expires': 0}
  bucket.put('run/x', json.dumps(expired).encode())
  taken = buckets.Lease(path, 'second')
  pause(paused)
  there = bucket.contents()
  with pytest.raises(UserError, match='was taken by another process'):
    paused.check()
  paused.release()
  assert bucket.contents() == there
  taken.check()
  taken.release()


# Names.


@pytest.mark.parametrize(
  ('name', 'said'),
  [('s3://bucket/run', 'only gs://'), ('gs:///run', 'names no bucket')],
)
def test_other_places_are_refused(name, said):
  with pytest.raises(UserError, match=said):
    Workdir(name)


def test_missing_package_is_named(monkeypatch):
  monkeypatch.setattr(buckets.importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(UserError, match=r'pip install .*gcs'):
    Workdir('gs://bucket/run')
