from __future__ import annotations

import struct

import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from gpt.training.tensorboard import TensorBoard
from tests.training.small import fit


def events(folder):
    """The events in a folder's files, the files in order of their names."""
    found = []
    for file in sorted(folder.glob("events.out.tfevents.*")):
        data = file.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            found.append(Event.FromString(data[12 : 12 + length]))
            data = data[16 + length :]
    return found


def scalars(folder):
    return {
        (event.step, value.tag): value.simple_value
        for event in events(folder)
        for value in event.summary.value
    }


def test_a_run_s_numbers_are_there_by_the_steps_done(tmp_path, corpus):
    folder = tmp_path / "tensorboard"
    fit(tmp_path, corpus, 4, logger=TensorBoard(folder), val_check_interval=2)
    found = scalars(folder)
    assert {step for step, name in found if name == "train/loss"} == {1, 2, 3, 4}
    assert {step for step, name in found if name == "val/loss"} == {2, 4}
    assert found[1, "train/loss"] == pytest.approx(5.5, abs=0.5)
    assert not any(name == "epoch" for _, name in found)


def test_nothing_is_touched_before_there_are_numbers(tmp_path):
    old = tmp_path / "events.out.tfevents.1.old"
    old.write_bytes(b"")
    TensorBoard(tmp_path).finalize("failed")
    assert list(tmp_path.iterdir()) == [old]
    logger = TensorBoard(tmp_path)
    logger.log_metrics({"a": 1.0}, 0)
    logger.finalize("success")
    assert not old.exists()
    assert scalars(tmp_path) == {(1, "a"): 1.0}


def test_a_resumed_run_adds_a_file_that_hides_what_is_done_again(tmp_path):
    old = tmp_path / "events.out.tfevents.1.old"
    old.write_bytes(b"")
    logger = TensorBoard(tmp_path, keep=5)
    logger.log_metrics({"a": 1.0}, 6)
    logger.finalize("success")
    assert old.exists()
    starts = [event.step for event in events(tmp_path)
              if event.session_log.status == SessionLog.START]  # fmt: skip
    assert starts == [6]


def test_samples_are_shown_as_they_stand(tmp_path):
    logger = TensorBoard(tmp_path)
    logger.log_text("samples", "# king\n*queen*", 5)
    logger.finalize("success")
    [(event, value)] = [(event, v) for event in events(tmp_path) for v in event.summary.value]
    assert event.step == 5
    assert value.tensor.string_val == [b"    # king\n    *queen*"]


def test_a_place_that_cannot_be_written_is_one_line_and_no_end(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    logger = TensorBoard(tmp_path / "file" / "below")
    for step in range(3):
        logger.log_metrics({"a": 1.0}, step)
    logger.finalize("success")
    assert capsys.readouterr().err.count("cannot write for TensorBoard") == 1
