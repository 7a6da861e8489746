"""Where the processes of a run are, by flags or by the cluster they run in."""

import contextlib
import re
import socket
import urllib.request

from flatmatch_jax.types import UserError

# A TPU machine's own description, by which JAX finds the others.
_WORKERS = (
  'http://metadata.google.internal/computeMetadata/v1/instance/attributes/'
  'worker-network-endpoints'
)


def check_flags(coordinator, num_processes, process_id) -> None:
  """Raises UserError where flags for processes started by hand are wrong."""
  names = '--coordinator', '--num_processes', '--process_id'
  given = zip(names, (coordinator, num_processes, process_id), strict=True)
  if missing := [name for name, value in given if value is None]:
    raise UserError(
      f'{", ".join(names)} go together; missing: {", ".join(missing)}.'
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


def is_here(coordinator: str) -> bool:
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
  tasks = environ.get('SLURM_STEP_NUM_TASKS', environ.get('SLURM_NTASKS', '1'))
  if 'SLURM_STEP_NODELIST' in environ and int(tasks) > 1:
    return 'Slurm'
  # Set by `import jax` where there are TPU chips and libtpu.
  chips = 'TPU_ML_PLATFORM' in environ
  wanted = 'tpu' in environ.get('JAX_PLATFORMS', 'tpu')
  if chips and wanted and _tpu_workers(environ) > 1:
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
  if 'TPU_SKIP_MDS_QUERY' not in environ:
    request = urllib.request.Request(
      _WORKERS, headers={'Metadata-Flavor': 'Google'}
    )
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with (
      contextlib.suppress(OSError),  # Not one of Google's machines.
      direct.open(request, timeout=5) as answer,
    ):
      return slices * len(answer.read().split(b','))
  return slices
