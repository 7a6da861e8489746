"""What came out of a run: the numbers of result.json, errors in percent."""

import statistics

from flatmatch_jax.run.workdir import Workdir
from flatmatch_jax.system import messages


def selection(num_test: int, num_val: int) -> str:
  """The metric by which the best checkpoint is chosen; '' if there is none.

  Without validation images it is the test error, as published code bases do.
  """
  if num_val:
    return 'val_error'
  return 'error' if num_test else ''


def history(rows: list[dict], key: str) -> list[float]:
  return [row[key] for row in rows if key in row]


def errors(rows: list[dict]) -> dict[str, float]:
  """Last, median and best, of the rows of metrics.jsonl, in percent."""
  found: dict[str, float] = {}
  for key in ('error', 'val_error'):
    if values := history(rows, key):
      found |= {
        f'{key}_last': values[-1],
        f'{key}_median20': statistics.median(values[-20:]),
        f'{key}_best': min(values),
        'evaluations': len(values),
      }
  both = [row for row in rows if {'error', 'val_error'} <= row.keys()]
  if both:  # Chosen without looking at the test set; of equals the last.
    chosen = min(reversed(both), key=lambda row: row['val_error'])
    found |= {'error_selected': chosen['error']}
  return found


def in_median(result: dict) -> int:
  """Of how many evaluations the median of a result is: at most 20."""
  return min(result.get('evaluations', 20), 20)


def summarize(
  config, files, num_labeled, skipped, warnings, seconds, speed
) -> dict:
  """The content of result.json; errors of the averaged weights, in percent."""
  return {
    'dataset': config.dataset,
    'method': config.method,
    'labels': num_labeled,
    'seed': config.seed,
    'split_seed': config.split_seed,
    'steps': config.steps,
    'skipped_steps': skipped,
    'warnings': warnings,
    **errors(files.metrics()),
    'seconds': round(seconds, 1),
    'images_per_second': round(speed, 1),
  }


def describe(files: Workdir) -> str:
  result = files.read('result.json')
  text = '{method} on {dataset} with {labels} labels: '.format(**result)
  count = messages.count(in_median(result), 'evaluation')
  for key, name in (('error', 'test'), ('val_error', 'validation')):
    if f'{key}_last' in result:
      text += (
        f'{name} error {result[f"{key}_last"]:.2f}% last, '
        f'{result[f"{key}_median20"]:.2f}% median of the last {count}, '
        f'{result[f"{key}_best"]:.2f}% best, '
      )
  if 'error_selected' in result:
    text += (
      f'test error {result["error_selected"]:.2f}% where validation is best, '
    )
  if not selection('error_last' in result, 'val_error_last' in result):
    text += 'no error was measured, '
  return f'{text}in {result["seconds"]:.0f} s. See {files.path}.'
