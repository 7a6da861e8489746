"""Runs in a bucket: gs://bucket/…, of a server on this machine."""

import pytest

import gcs
from conftest import make_config
from flatmatch_jax.training import loop


@pytest.fixture(scope='module')
def server(tmp_path_factory):
  with (
    gcs.serving(tmp_path_factory.mktemp('gcs')) as server,
    pytest.MonkeyPatch.context() as patch,
  ):
    for name, value in server.environment.items():
      patch.setenv(name, value)
    yield server


@pytest.fixture
def bucket(server):
  yield server
  server.drop()
  server.heal()


@pytest.mark.usefixtures('tiny_network', 'compiled')
def test_run_in_a_bucket_has_the_bits_of_one_in_a_folder(bucket, tmp_path):
  loop.train_and_evaluate(make_config(), str(tmp_path / 'run'))
  loop.train_and_evaluate(make_config(), 'gs://bucket/run')
  found = bucket.contents('run')
  for k, v in found.items(): print(k, len(v))
  here = (tmp_path / 'run' / 'metrics.jsonl').read_bytes()
  assert found['metrics.jsonl'] == here
  print(len(bucket.requests()))
