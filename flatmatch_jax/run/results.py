"""What came out of a run: the numbers of result.json, errors in percent."""

import statistics

from flatmatch_jax.run.workdir import Workdir

_MEDIAN = 20  # Evaluations, as in published code.


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
        f'{key}_median20': statistics.median(values[-_MEDIAN:]),
        f'{key}_best': min(values),
        'evaluations': len(values),
      }
  both = [row for row in rows if {'error', 'val_error'} <= row.keys()]
  if both:  # Chosen without looking at the test set; of equals the last.
    chosen = min(reversed(both), key=lambda row: row['val_error'])
    found |= {'error_selected': chosen['error']}
  return found


def shown(result: dict, key: str) -> dict[str, float]:
  """The errors of a result that people see, by what they are called.

  The median of fewer than 20 evaluations would be that of the whole run.
  """
  names = {'last': 'last', 'best': 'best'}
  if result.get('evaluations', 0) >= _MEDIAN:
    names = names | {'median20': f'median of the last {_MEDIAN}'}
  return {
    name: result[f'{key}_{end}']
    for end, name in names.items()
    if f'{key}_{end}' in result
  }


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
  for key, name in (('error', 'test'), ('val_error', 'validation')):
    if found := shown(result, key):
      errors = (f'{error:.2f}% {end}' for end, error in found.items())
      text += f'{name} error {", ".join(errors)}, '
  if 'error_selected' in result:
    text += (
      f'test error {result["error_selected"]:.2f}% where validation is best, '
    )
  if not selection('error_last' in result, 'val_error_last' in result):
    text += 'no error was measured, '
  return f'{text}in {result["seconds"]:.0f} s. See {files.path}.'
