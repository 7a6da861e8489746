"""The file of numbers that TensorBoard draws, written without TensorFlow."""

import os
import pathlib
import socket
import time


class Events:
  """Adds rows to a new file in a folder; each is there at once."""

  def __init__(self, folder: pathlib.Path):
    # Not before a run needs them.
    from tensorboard.compat.proto import event_pb2, summary_pb2
    from tensorboard.summary.writer import record_writer

    self._event, self._summary = event_pb2.Event, summary_pb2.Summary
    folder.mkdir(parents=True, exist_ok=True)
    # TensorBoard reads files in the order of their names.
    name = f'{time.time():.6f}.{socket.gethostname()}.{os.getpid()}'
    path = folder / f'events.out.tfevents.{name}'
    self._file = record_writer.RecordWriter(path.open('xb'))
    self._add(file_version='brain.Event:2')

  def write(self, step: int, scalars: dict[str, float]) -> None:
    value = self._summary.Value
    values = [value(tag=k, simple_value=v) for k, v in scalars.items()]
    self._add(step=step, summary=self._summary(value=values))

  def close(self) -> None:
    self._file.close()

  def _add(self, **content):
    event = self._event(wall_time=time.time(), **content)
    self._file.write(event.SerializeToString())
    self._file.flush()
