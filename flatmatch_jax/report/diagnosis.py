"""What is wrong with a run, and what may help."""

from typing import NamedTuple

from flatmatch_jax.report.page import Html, alarm, tag
from flatmatch_jax.report.runs import RunFiles
from flatmatch_jax.run import reference, watch


class Finding(NamedTuple):
  """One thing that is wrong."""

  text: str
  remedy: str
  failed: bool  # Else it is a warning, and the numbers may be sound.


def diagnose(run: RunFiles, pixels_error: float | None = None) -> list[Finding]:
  """Of a finished run. `pixels_error` is that of logistic regression."""
  if not run.finished:
    return []
  found = []
  error = run.result.get('error_last', run.result.get('val_error_last'))
  names = run.dataset.get('class_names', ())
  collapsed = watch.remedies(run.config, unused=False)
  if error is not None and names and error >= 100 - 100 / len(names):
    found.append(
      Finding(
        f'The error of {error:.2f}% is no better than guessing one of '
        f'{len(names)} classes.',
        collapsed,
        failed=True,
      )
    )
  elif error is not None and pixels_error is not None and error > pixels_error:
    found.append(
      Finding(
        f'The error of {error:.2f}% is above the {pixels_error:.2f}% of '
        'logistic regression on thumbnails of the same labeled images.',
        'Train for more steps, check the labels at the end of this page, and '
        'compare with method=supervised; where left and right matter, add '
        '--config.flip=false.',
        failed=True,
      )
    )
  bands = reference.find(run.config, run.dataset.get('fingerprint', ''))
  band = bands.get(run.step)
  if error is not None and band and error > band.high:
    found.append(
      Finding(
        f'The error of {error:.2f}% is above the {band.low:.2f} to '
        f'{band.high:.2f}% that earlier runs let expect.',
        'Compare metrics.jsonl and versions.json with a run that went well.',
        failed=True,
      )
    )
  for text in run.result.get('warnings', ()):
    found.append(
      Finding(f'{text[:1].upper()}{text[1:]}.', collapsed, failed=False)
    )
  return found


def status(run: RunFiles, found: list[Finding]) -> Html:
  """Whether the run is done, in the colour of how it went."""
  text, kind = run.status, ' unfinished'
  if run.finished:
    kind = ''
    if found:
      text, kind = 'finished, with warnings', ' unfinished'
    if any(finding.failed for finding in found):
      text, kind = 'finished, but went wrong', ' failed'
  return tag('span', text, class_=f'status{kind}')


def section(found: list[Finding]) -> Html:
  """What was found, and each remedy once; '' if nothing was."""
  failed = any(finding.failed for finding in found)
  return alarm(
    'What went wrong' if failed else 'What looks wrong',
    [finding.text for finding in found],
    dict.fromkeys(finding.remedy for finding in found),
    failed,
  )
