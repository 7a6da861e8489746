"""Processes that train as one: how they meet, and wait for each other.

Each runs the same program on its own devices; arrays are global. Process 0
talks and writes files, all write checkpoints into the one workdir.
"""

import contextlib
import os
import pathlib
import sys
import threading

import jax

# The store of texts that JAX's processes share has no public name.
from jax._src import distributed as jax_distributed
from jax.experimental import multihost_utils
import jax.numpy as jnp
import numpy as np

from flatmatch_jax.system import clusters, files, sharding
from flatmatch_jax.types import UserError

_DAY = 24 * 60 * 60 * 1000  # Milliseconds.


def connect(
  coordinator: str | None = None,
  num_processes: int | None = None,
  process_id: int | None = None,
  seconds: int = 300,
) -> None:
  """Joins the other processes, before any device is touched.

  Without arguments only where a cluster of several processes is found: a TPU
  pod, a step of Slurm, an indexed job of Kubernetes.
  """
  if seconds < 1:
    raise UserError(
      f'--connect_seconds={seconds} must be at least 1: so long the processes '
      'wait for each other; leave it out for 300.'
    )
  given = (coordinator, num_processes, process_id)
  arguments: dict = {}
  cluster = ''
  if any(value is not None for value in given):
    if num_processes == 1 and process_id in (None, 0):
      return
    clusters.check_flags(coordinator, num_processes, process_id)
    arguments = {
      'coordinator_address': coordinator,
      'num_processes': num_processes,
      'process_id': process_id,
      'cluster_detection_method': 'deactivate',
    }
    if process_id == 0 and clusters.is_here(str(coordinator)):
      # JAX would listen to all the world.
      arguments['coordinator_bind_address'] = coordinator
  elif not (cluster := clusters.find_cluster(os.environ)):
    return
  _initialize(
    arguments, coordinator or f'the coordinator of {cluster}', seconds
  )


def _initialize(arguments, coordinator, seconds):
  """Connects or ends the process: JAX itself would abort, with a stack."""
  # It would swallow every SIGTERM from now on; see `watch_for_stop`.
  jax.config.update('jax_enable_preemption_service', False)

  def give_up():
    print(
      f'error: No connection of all processes within {seconds} s through '
      f'{coordinator}. Check that as many processes as were told have started, '
      'each with its own --process_id; that they name the same coordinator, '
      'the machine of process 0; and that its port is open between the '
      'machines.',
      file=sys.stderr,
      flush=True,
    )
    os._exit(2)

  timer = threading.Timer(seconds, give_up)
  timer.daemon = True
  timer.start()
  try:
    jax.distributed.initialize(**arguments, initialization_timeout=seconds + 60)
    mesh = sharding.make_mesh()  # Here all meet.
    ones = np.ones(mesh.size, np.float32)
    # To compute together for the first time fails, on CPUs, if one process
    # comes 30 s after another.
    jax.jit(jnp.sum)(sharding.place(ones, sharding.over_batch(mesh)))
  except (RuntimeError, ValueError, OSError, KeyError) as error:
    raise UserError(
      f'The processes of {coordinator} cannot be joined: '
      f'{" ".join(str(error).split())} Give --coordinator, --num_processes and '
      '--process_id; or --num_processes=1 for a run of this process alone.'
    ) from error
  finally:
    timer.cancel()


def is_first() -> bool:
  """Whether this process talks and writes the files that one must write."""
  return not jax.distributed.is_initialized() or jax.process_index() == 0


def several() -> bool:
  return jax.distributed.is_initialized() and jax.process_count() > 1


def wait_for_all(where: str) -> None:
  """Returns when all processes have come here; `where` names it, once only."""
  if several():
    client().wait_at_barrier(f'flatmatch_jax/{where}', _DAY)


def everywhere(true: bool) -> bool:
  """Whether it holds in all processes; each waits here for the others."""
  if not several():
    return true
  return bool(multihost_utils.process_allgather(np.array(true)).all())


def of_the_first(numbers: list[int]) -> list[int]:
  """The numbers that process 0 gives, in all processes."""
  if not several():
    return numbers
  count = int(multihost_utils.broadcast_one_to_all(np.array(len(numbers))))
  given = np.resize(np.array([*numbers, 0], np.int32), count)
  return multihost_utils.broadcast_one_to_all(given).tolist()


@contextlib.contextmanager
def first_goes_ahead(where: str):
  """Process 0 does the block's work before the others: they find its files."""
  if not is_first():
    wait_for_all(where)
  yield
  if is_first():
    wait_for_all(where)


def check_shared(folder: pathlib.Path) -> None:
  """Raises UserError unless all processes see the same `folder`."""
  if not several():
    return
  wait_for_all('start')
  token = multihost_utils.broadcast_one_to_all(
    np.frombuffer(os.urandom(4), np.uint32)
  )
  sign = folder / f'.seen-by-all-{int(token[0]):08x}'
  if is_first():
    try:
      files.make_folder(folder, parents=True)
      with files.replacing(sign):
        pass
    except OSError as error:
      raise UserError(
        f'Cannot write into --workdir {folder}: {error.strerror}.'
      ) from None
  wait_for_all('sign')
  seen = multihost_utils.process_allgather(np.array(sign.exists()))
  if is_first():
    sign.unlink()
  if not seen.all():
    blind = ', '.join(map(str, np.flatnonzero(~seen)))
    raise UserError(
      f'--workdir {folder} is not one folder for all processes: what process 0 '
      f'writes is not seen by {blind}. Name a folder on a disk that all '
      'machines share, such as NFS, or in a bucket.'
    )


def watch_for_stop() -> None:
  """From now on SIGTERM to one process is a request to all."""
  jax.config.update('jax_enable_preemption_service', True)
  if jax_distributed.global_state.preemption_sync_manager is None:
    jax_distributed.global_state.initialize_preemption_sync_manager()


def client():
  """JAX's connection to the store that all processes share."""
  return jax_distributed.global_state.client
