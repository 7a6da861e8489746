"""When does cross-sharpness help? Digits at several ρ: docs/results.md.

  python benchmarks/rho.py [--seeds 20] [--labels 10,20,40] [--out runs/rho]

Sweeps FlatMatch and FlatMatch-e, which change FreeMatch, and FlatMatch over
FixMatch; each run is paired with the plain method's on the same split. A run
that is finished in --out is not repeated. Each sweep that ends goes into
docs/results/rho.json, and into the table of docs/results.md.
"""

import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import pages, study_report
from configs import digits
from flatmatch_jax import sweep
from flatmatch_jax.system import cli, files

RHOS = (0.05, 0.2, 0.5, 1.0)
BASES = {
  'flatmatch': 'freematch',
  'flatmatch_e': 'freematch',
  'fixmatch+flatmatch': 'fixmatch',
}
MARKS = '<!-- rho -->', '<!-- end of rho -->'
RECORDS = ROOT / 'docs' / 'results' / 'rho.json'


def train(method: str, labels: int, seeds: int, out: pathlib.Path) -> list:
  """A row of last errors, by seed, for each ρ; plain methods have none."""
  config = digits.get_config(f'method={method},labels={labels}')
  config.eval_every = config.checkpoint_every = config.steps
  settings: dict[str, list] = {'seeds': list(range(seeds))}
  if method in BASES:
    settings['recipe_args.rho'] = list(RHOS)
  members = sweep.sweep(config, str(out / f'{method}-{labels}'), settings)
  rows: dict = {}
  for member in members:
    rho = member.settings.get('recipe_args.rho')
    result = member.files.read('result.json')
    rows.setdefault(rho, []).append(result['error_last'])
  return [
    {'method': method, 'labels': labels, 'rho': rho, 'errors': errors}
    for rho, errors in rows.items()
  ]


def table(rows: list[dict]) -> str:
  """Markdown: the plain methods' errors, and what each ρ adds to them."""
  errors = {(r['method'], r['labels'], r['rho']): r['errors'] for r in rows}
  lines = [
    '| labels | method | seeds | error % of the plain method | '
    + ' | '.join(f'ρ = {rho}' for rho in RHOS)
    + ' |',
    '|---' * (4 + len(RHOS)) + '|',
  ]
  for labels in sorted({row['labels'] for row in rows}):
    for method, base in BASES.items():
      plain = errors.get((base, labels, None))
      if plain is None or (method, labels, RHOS[0]) not in errors:
        continue
      gains = []
      for rho in RHOS:
        pairs = zip(errors[method, labels, rho], plain, strict=True)
        gains.append(study_report.difference([a - b for a, b in pairs]))
      lines.append(
        f'| {labels} | {method} | {len(plain)} | '
        f'{base} {study_report.spread(plain)} | {" | ".join(gains)} |'
      )
  return '\n'.join(lines)


def main():
  parser = cli.Parser(description=__doc__.splitlines()[0])
  parser.add_argument('--seeds', type=int, default=20)
  parser.add_argument('--labels', default='10,20,40')
  parser.add_argument('--out', default='runs/rho')
  args = parser.parse_args()
  page = ROOT / 'docs' / 'results.md'
  pages.check_marks(page, MARKS)
  rows = []
  for labels in map(int, args.labels.split(',')):
    for method in ('freematch', 'flatmatch', 'fixmatch', *list(BASES)[1:]):
      rows += train(method, labels, args.seeds, pathlib.Path(args.out))
      with files.replacing(RECORDS, 'w') as file:
        file.write('[\n' + ',\n'.join(map(json.dumps, rows)) + '\n]\n')
      pages.put_between(page, MARKS, table(rows))


if __name__ == '__main__':
  with cli.errors_as_lines():
    main()
