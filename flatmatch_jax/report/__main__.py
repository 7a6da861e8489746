"""A run as one page to look at, or several side by side.

  python -m flatmatch_jax.report --workdir DIR [DIR ...] [--out FILE]

A folder that is no run stands for the runs in it, such as those of a sweep.
The page needs no other file and no network. Of one run: curves, predictions,
examples and configuration, in DIR/report.html. Of several: a table of means
over seeds and curves, in report.html in the folder that they lie in, with the
table as .csv and .tex beside it.
"""

import pathlib

from flatmatch_jax.report import comparison, export, predictions, runs, single
from flatmatch_jax.system import cli, files, messages
from flatmatch_jax.types import UserError


def main():
  parser = cli.Parser(
    prog='python -m flatmatch_jax.report', description='A page about runs.'
  )
  parser.add_argument(
    '--workdir', required=True, nargs='+', help='folders of runs'
  )
  parser.add_argument('--out', help='HTML file; by default report.html there')
  parser.add_argument('--data_dir', help='folder of the data, if it has moved')
  args = parser.parse_args()
  # One named twice, as by runs/* and runs/a, counts once.
  named = [run for path in args.workdir for run in runs.members(path)]
  paths = {files.to_path(path).resolve(): path for path in named}
  found = [runs.read(path) for path in paths.values()]
  out = files.to_path(args.out or default_out(found))
  if out.suffix != '.html':
    raise UserError(f'--out {out} must be a file that ends in .html.')
  files.check_target('--out', str(out))
  if len(found) == 1:
    written, also = {out: one_page(found[0], args.data_dir)}, ''
  else:
    if args.data_dir:
      raise UserError(
        f'--data_dir {args.data_dir} is for the report of one --workdir; of '
        'several no images are shown.'
      )
    written = several(found, out)
    also = f', its table also in {out.stem}.csv and .tex'
  for path, text in written.items():
    with files.replacing(path, mode='w', encoding='utf-8') as file:
      file.write(text)
  print(f'The report is in {out}{also}')


def default_out(found: list[runs.RunFiles]) -> pathlib.Path:
  """In the run's folder, or in the one that the runs' folders lie in."""
  paths = [run.files.path for run in found]
  if len(paths) == 1:
    return paths[0] / 'report.html'
  parents = [path.parent for path in paths]
  return files.common_folder(parents) / 'report.html'


def one_page(run: runs.RunFiles, data_dir: str | None) -> str:
  """The page of a run; what cannot be had is told there and on the screen."""
  found, advice, reason = predictions.look(run.files, data_dir)
  if reason:
    messages.say(f'No predictions in the report: {reason}')
  if data_dir:  # Commands name the folder as it is now.
    run = run._replace(config=run.config | {'data_dir': data_dir})
  return single.render(run, found, reason, advice)


def several(found: list[runs.RunFiles], out: pathlib.Path) -> dict:
  """The page of several runs, and its table in two formats, by their files."""
  groups = comparison.group(found)
  tables = {
    out.with_suffix('.csv'): export.as_csv(groups),
    out.with_suffix('.tex'): export.as_latex(groups),
  }
  named = {path.name: text for path, text in tables.items()}
  return tables | {out: comparison.render(groups, named)}


if __name__ == '__main__':
  with cli.errors_as_lines():
    main()
