"""Faults: buckets that hang, fail and refuse, and runs killed while saving."""

import contextlib
import json
import subprocess
import sys
import time

import gcs
import lab as lab_lib
import runs

URL = 'gs://bucket/run'


@contextlib.contextmanager
def bucket_of(lab, name):
  folder = lab.folder / name
  folder.mkdir()
  with gcs.serving(folder / 'server') as bucket:
    yield bucket, folder


def start(lab, bucket):
  """A run in the bucket, as a process; its stderr to be read."""
  env = runs.environment(lab.folder, tensorflow=True) | bucket.environment
  return subprocess.Popen(
    [sys.executable, *map(str, lab.command(URL))],
    cwd=lab.folder,
    # TensorFlow tries again as often as it does by default.
    env=env
    | {'TF_CPP_MIN_LOG_LEVEL': '3', 'GCS_RETRY_CONFIG_MAX_RETRIES': '10'},
    stdout=subprocess.DEVNULL,
    stderr=subprocess.PIPE,
    text=True,
  )


def run(lab, bucket):
  with start(lab, bucket) as process:
    _, stderr = process.communicate(timeout=600)
  return process.returncode, stderr


def assert_refused(found, *words):
  """In the last line: TensorStore and TensorFlow may log others before."""
  code, stderr = found
  assert 'Traceback' not in stderr, stderr
  lines = stderr.splitlines(keepends=True)
  lab_lib.assert_refused((code, ''.join(lines[-1:])), *words)


def finish(lab, bucket, folder):
  code, stderr = run(lab, bucket)
  assert code == 0, stderr
  here = bucket.download('run', folder / 'run')
  runs.assert_same_run(here, lab.finished, lab.state, lab.steps)


def expire(bucket):
  """What waiting for two minutes would do."""
  lease = json.loads(bucket.contents('run')['.lock'])
  lease['expires'] = time.time() - 1
  bucket.put('run/.lock', json.dumps(lease).encode())


def kills(lab):
  """Each in another part of another checkpoint."""
  places = (r'checkpoints/\d+/state/', r'/notes/metadata', r'\d/commit_success')
  with bucket_of(lab, 'bucket-kills') as (bucket, folder):
    for place in places:
      bucket.fail('stall', method='POST', path=place)
      with start(lab, bucket) as process:
        bucket.wait_for(place, process)
        process.kill()
      bucket.heal()
      assert_refused(
        run(lab, bucket),
        f'in use by process {process.pid} on ',
        'its lease expires at',
      )
      expire(bucket)
    finish(lab, bucket, folder)
  return len(places), 'refused until the lease expires; then the same bits'


def storms(lab):
  """While a run trains, everything fails for some requests."""
  whats = (503, 429, 'reset', 'lost')
  with bucket_of(lab, 'bucket-storms') as (bucket, folder):
    for number, what in enumerate(whats, 1):
      # Each at a checkpoint of its own; the metrics meet all in a row.
      bucket.fail(what, path=f'checkpoints/{3 * number}/.*state', times=2)
      bucket.fail(what, path='metrics.jsonl', times=1)
    finish(lab, bucket, folder)
  return len(whats), 'nothing: requests are made again'


def refusals(lab):
  with bucket_of(lab, 'bucket-refusals') as (bucket, folder):
    bucket.drop()
    assert_refused(run(lab, bucket), 'no such bucket', URL)
    bucket.heal()
    for status, words in ((403, 'permission denied'), (429, 'a quota')):
      # After some checkpoints.
      bucket.fail(status, method='POST', path=r'/[2-9]\d/commit_success')
      assert_refused(run(lab, bucket), f'error: Cannot write {URL}', words)
      bucket.heal()
    finish(lab, bucket, folder)
  return 3, 'a line, the checkpoint before whole; then the same bits'
