"""A short soak; `make soak` runs the long one, and judges times and memory as well."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve.v1 import generation_pb2 as pb
from tests.integration.soak import Soak
from tests.integration.soak_client import Job, text_after

pytestmark = pytest.mark.integration


def test_no_text_is_wrong_and_no_page_is_lost_with_clients_that_cancel_err_and_die(
    tmp_path: Path,
) -> None:
    soak = Soak(requests=500, processes=2, streams=64, per_client=100, seed=0, folder=tmp_path)
    soak.run()
    assert soak.faults == []
    assert soak.counts.total() == 500
    assert all(soak.counts[kind] > 0 for kind in ("whole", "cancelled", "invalid", "killed"))
    assert soak.peak > 32, "they were many at once"
    assert soak.health


def test_the_soak_sees_a_text_that_is_not_its_prompts() -> None:
    job, other = Job.of(0, 1), Job.of(0, 2)
    text, reason = text_after(job.prompt, job.max_tokens)
    mixed, _ = text_after(other.prompt, job.max_tokens)
    assert job.wrong(text, reason) == ""
    assert job.wrong(text[:1], None) == ""
    assert job.wrong(text[:1], pb.FINISH_REASON_LENGTH) or len(text) < 2
    assert job.wrong(mixed, reason)
    assert job.wrong("?", None)
