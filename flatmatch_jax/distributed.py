"""Processes that train as one: how they meet, agree, wait and end together.

Each runs the same program on its own devices; arrays are global. Process 0
talks and writes files, all write checkpoints into the one workdir.
"""

import atexit
import contextlib
import os
import pathlib
import re
import socket
import sys
import threading
import time
import traceback

import jax

# The store of texts that JAX's processes share has no public name.
from jax._src import distributed as jax_distributed
from jax.experimental import multihost_utils
import jax.numpy as jnp
import numpy as np

from flatmatch_jax import sharding
from flatmatch_jax.types import UserError

_FAILED = 'flatmatch_jax/failed'  # Of which process, with which exit code, why.
_DAY = 24 * 60 * 60 * 1000  # Milliseconds.
_LINGER = 5  # Seconds for which the dying wait until all have heard of it.


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
  given = (coordinator, num_processes, process_id)
  arguments: dict = {}
  cluster = ''
  if any(value is not None for value in given):
    if num_processes == 1 and process_id in (None, 0):
      return
    _check(coordinator, num_processes, process_id)
    arguments = {
      'coordinator_address': coordinator,
      'num_processes': num_processes,
      'process_id': process_id,
      'cluster_detection_method': 'deactivate',
    }
    if process_id == 0 and _is_here(str(coordinator)):
      # JAX would listen to all the world.
      arguments['coordinator_bind_address'] = coordinator
  elif not (cluster := find_cluster(os.environ)):
    return
  _initialize(
    arguments, coordinator or f'the coordinator of {cluster}', seconds
  )


def _check(coordinator, num_processes, process_id):
  if None in (coordinator, num_processes, process_id):
    raise UserError(
      '--coordinator, --num_processes and --process_id go together; missing: '
      + ', '.join(
        name
        for name, value in (
          ('--coordinator', coordinator),
          ('--num_processes', num_processes),
          ('--process_id', process_id),
        )
        if value is None
      )
      + '.'
    )
  if num_processes < 1:
    raise UserError(f'--num_processes={num_processes} must be at least 1.')
  if not 0 <= process_id < num_processes:
    raise UserError(
      f'--process_id={process_id} must lie from 0 to {num_processes - 1}, '
      f'since --num_processes={num_processes}.'
    )
  match = re.fullmatch(r'(\[[^]]+\]|[^:\s]+):(\d+)', coordinator)
  if not match or not 1 <= int(match[2]) <= 65535:
    raise UserError(
      f'--coordinator={coordinator} must be HOST:PORT, such as 10.0.0.2:1234: '
      'where process 0 runs, and a port free there from 1 to 65535.'
    )
  try:
    socket.getaddrinfo(match[1].strip('[]'), int(match[2]))
  except OSError as error:
    raise UserError(
      f'--coordinator={coordinator}: no such host ({error.strerror}); name the '
      'machine of process 0.'
    ) from None
  if process_id == 0:
    with socket.socket() as probe:
      probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
      try:
        probe.bind(('', int(match[2])))
      except OSError as error:
        raise UserError(
          f'--coordinator={coordinator}: process 0 cannot listen there '
          f'({error.strerror}); choose another port, in all processes.'
        ) from None


def _is_here(coordinator: str) -> bool:
  """Whether the address is this machine's own, not of a gate before it."""
  host = coordinator.rpartition(':')[0].strip('[]')
  family, kind, _, _, address = socket.getaddrinfo(
    host, 0, type=socket.SOCK_STREAM
  )[0]
  if str(address[0]).startswith('127.') and not host.startswith(
    ('127.', 'local')
  ):
    return False  # Many machines give their own name to the loopback.
  with socket.socket(family, kind) as probe:
    try:
      probe.bind(address)
    except OSError:
      return False
  return True


def find_cluster(environ) -> str:
  """The cluster that this process is one of several of; '' if there is none.

  JAX would also try where there is one process, and stop where it fails.
  """
  if 'tpu' not in environ.get('JAX_PLATFORMS', 'tpu'):
    tpu = False
  else:
    # Set by `import jax` where there are TPU chips and libtpu.
    tpu = 'TPU_ML_PLATFORM' in environ
  tasks = environ.get('SLURM_STEP_NUM_TASKS', environ.get('SLURM_NTASKS', '1'))
  if 'SLURM_STEP_NODELIST' in environ and int(tasks) > 1:
    return 'Slurm'
  if tpu and _tpu_workers(environ) > 1:
    return 'the TPU pod'
  indexed = 'JOB_COMPLETION_INDEX' in environ
  if indexed and 'KUBERNETES_SERVICE_HOST' in environ:
    return 'Kubernetes'
  return ''


def _tpu_workers(environ) -> int:
  """Of how many machines a TPU slice consists."""
  slices = int(environ.get('MEGASCALE_NUM_SLICES') or 1)
  for name in ('TPU_PROCESS_ADDRESSES', 'TPU_WORKER_HOSTNAMES'):
    if name in environ:
      return slices * len(environ[name].split(','))
  if 'TPU_SKIP_MDS_QUERY' in environ:
    return slices
  from jax._src.clusters import GceTpuCluster

  try:  # Asks the server of the machine's metadata, as JAX will.
    if GceTpuCluster.is_env_present():
      return GceTpuCluster.get_process_count()
  except Exception:  # Not a machine of Google's.
    return slices
  return slices


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
  _start_watching()


def is_first() -> bool:
  """Whether this process talks and writes the files that one must write."""
  return not jax.distributed.is_initialized() or jax.process_index() == 0


def several() -> bool:
  return jax.distributed.is_initialized() and jax.process_count() > 1


def wait_for_all(where: str) -> None:
  """Returns when all processes have come here; `where` names it, once only."""
  if several():
    _client().wait_at_barrier(f'flatmatch_jax/{where}', _DAY)


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
    folder.mkdir(parents=True, exist_ok=True)
    sign.touch()
  wait_for_all('sign')
  seen = multihost_utils.process_allgather(np.array(sign.exists()))
  if is_first():
    sign.unlink()
  if not seen.all():
    blind = ', '.join(map(str, np.flatnonzero(~seen)))
    raise UserError(
      f'--workdir {folder} is not one folder for all processes: what process 0 '
      f'writes is not seen by {blind}. Name a folder on a disk that all '
      'machines share, such as NFS.'
    )


def watch_for_stop() -> None:
  """From now on SIGTERM to one process is a request to all."""
  jax.config.update('jax_enable_preemption_service', True)
  if jax_distributed.global_state.preemption_sync_manager is None:
    jax_distributed.global_state.initialize_preemption_sync_manager()


@contextlib.contextmanager
def ending_together():
  """Ends all processes when one fails in the block; all say why.

  At once, and from the inside of what the block is part of: to clean up may
  take the others, who wait for this process.
  """
  try:
    yield
  except SystemExit:  # Agreed upon.
    raise
  except BaseException as error:
    if not several():
      raise
    code, text = _describe(error)
    print(f'error: {text}', file=sys.stderr, flush=True)
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # Another was first.
      _client().key_value_set(_FAILED, f'{jax.process_index()} {code} {text}')
    time.sleep(2 * _LINGER)  # `_watch` ends this process too.
    os._exit(code)


def _describe(error) -> tuple[int, str]:
  """The exit code, and a line for people."""
  if isinstance(error, UserError):
    return 2, str(error)
  if isinstance(error, KeyboardInterrupt):
    return 130, 'stopped by Ctrl-C.'
  first = ' '.join(str(error).split())
  if 'Gloo' in first or 'NCCL' in first or 'oordination service' in first:
    return 1, (
      f'lost another process ({first[:200]}). The same command, started for '
      'all processes, goes on from the last checkpoint.'
    )
  traceback.print_exception(error)
  return 1, f'{type(error).__name__}: {first}'


def _start_watching():
  """Ends this process when another one has failed."""
  ended = threading.Event()
  thread = threading.Thread(target=_watch, args=[ended], daemon=True)
  thread.start()

  def stop():
    ended.set()
    thread.join()

  atexit.register(stop)  # Python must not end while it is inside of JAX.


def _watch(ended):
  told = None
  while told is None:
    if ended.wait(1.0):
      return
    # Not there, or not to be reached: then JAX says so.
    with contextlib.suppress(jax.errors.JaxRuntimeError):
      told = _client().key_value_try_get(_FAILED)
  process, code, text = told.split(' ', 2)
  if int(process) != jax.process_index():
    print(f'error: process {process} failed: {text}', file=sys.stderr)
  # Process 0 keeps the store in which the others read it.
  with contextlib.suppress(jax.errors.JaxRuntimeError):
    _client().wait_at_barrier('flatmatch_jax/end', 1000 * _LINGER)
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(int(code))


def _client():
  return jax_distributed.global_state.client
