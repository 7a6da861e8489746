"""What came out of a run: the numbers of result.json, errors in percent."""

import statistics

from flatmatch_jax.workdir import Workdir


def test_errors(files: Workdir) -> list[float]:
  return [row['error'] for row in files.metrics() if 'error' in row]


def summarize(config, files, labeled, seconds, speed) -> dict:
  """The content of result.json; errors of the averaged weights, in percent."""
  errors = test_errors(files)
  return {
    'dataset': config.dataset,
    'method': config.method,
    'labels': len(labeled),
    'seed': config.seed,
    'split_seed': config.split_seed,
    'steps': config.steps,
    'error_last': errors[-1],
    'error_median20': statistics.median(errors[-20:]),
    'error_best': min(errors),
    'seconds': round(seconds, 1),
    'images_per_second': round(speed, 1),
  }


def describe(files: Workdir) -> str:
  result = files.read('result.json')
  return (
    f'{result["method"]} on {result["dataset"]} with {result["labels"]} '
    f'labels: test error {result["error_last"]:.2f}% last, '
    f'{result["error_median20"]:.2f}% median of the last 20 evaluations, '
    f'{result["error_best"]:.2f}% best, in {result["seconds"]:.0f} s. '
    f'See {files.path}.'
  )
