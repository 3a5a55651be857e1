"""New models under load, for a while; `make reloads` goes on for a thousand, and judges memory."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch

from gpt.checkpoint import PAYLOAD_KEY, WEIGHTS_PREFIX, checkpoint_payload
from gpt.config import GPTConfig
from gpt.model import GPT
from gpt.tokenizer import Tokenizer
from serve.client import Client, Completion, RequestError
from serve.folders import BEST, Found, ModelSource
from tests.integration.reloads import SERVER, Reloads
from tests.integration.serving import PATIENCE, REAL, ServerProcess
from tests.integration.soak_client import text_after
from tests.serve.served import eventually

pytestmark = pytest.mark.integration


def test_no_text_is_wrong_and_no_page_is_lost_while_models_are_replaced(tmp_path: Path) -> None:
    reloads = Reloads(reloads=12, streams=8, seed=0, folder=tmp_path)
    reloads.run()
    assert reloads.faults == []
    assert all(reloads.counts[kind] > 0 for kind in ("stream", "whole", "batch"))
    assert reloads.crossed > 0, "a stream began on one model and ended under another"


def test_what_cannot_be_served_leaves_the_old_one_and_what_does_not_end_is_cut_off(
    tmp_path: Path,
) -> None:
    reloads = Reloads(reloads=0, streams=0, seed=0, folder=tmp_path)
    first = reloads.write({"shift": 0, "pause": 0.03})
    with ServerProcess(SERVER, reloads.model, "--retire-seconds", "0") as server:
        server.await_ready()
        with Client(server.target, timeout=PATIENCE) as client:

            def look() -> None:
                server.process.send_signal(signal.SIGHUP)

            look()
            server.await_log(f"nothing new, it stays at version {first}")
            reloads.write({})
            look()
            line = server.await_log(f"version {first} serves on")
            assert "ERROR" in line
            assert "has no shift" in line
            assert client.model().version == first
            assert client.generate("x", max_tokens=2).model_version == first
            stream = client.stream("x", max_tokens=100, ignore_end_of_text=True)
            next(stream)
            second = reloads.write({"shift": 1})
            look()
            with pytest.raises(RequestError, match="replaced by a newer one") as cut:
                list(stream)
            assert cut.value.code == "UNAVAILABLE"
            assert client.model().version == second
            assert stream.model_version == first, "what made it, not what is served by now"
            assert client.generate("x", max_tokens=2).model_version == second
            [(_, batched)] = client.batch([{"prompt": "x", "max_tokens": 2}])
            assert isinstance(batched, Completion)
            assert batched.model_version == second
        server.process.terminate()
        assert server.wait() == 0


def put_best(run: Path, seed: int) -> str:
    """A checkpoint as a run keeps its best; its version."""
    tokenizer = Tokenizer.bytes()
    torch.manual_seed(seed)
    model = GPT(GPTConfig.preset("nano", vocab_size=tokenizer.n_vocab, init_std=0.3))
    payload = checkpoint_payload(model.config, tokenizer, name="novel")
    state = {f"{WEIGHTS_PREFIX}{key}": value for key, value in model.state_dict().items()}
    torch.save({PAYLOAD_KEY: payload, "state_dict": state}, run / "new.ckpt")
    os.replace(run / "new.ckpt", run / BEST)
    return Found.at(ModelSource(run, watched=True)).version()


def test_a_run_is_followed_from_before_its_first_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / BEST).parent.mkdir(parents=True)
    with ServerProcess((*REAL, "--watch"), run) as server:
        server.await_log("waiting for the first checkpoint")
        first = put_best(run, 1)
        assert server.await_ready() == f"serving novel on {server.target}"
        with Client(server.target, timeout=PATIENCE) as client:
            made = client.generate("x", temperature=0, max_tokens=8)
            assert client.model().version == first
            with open(run / BEST, "r+b") as file:  # no way to replace it, but nothing may break
                file.truncate(100)
            server.await_log(f"version {first} serves on")
            same = client.generate("x", temperature=0, max_tokens=8)
            assert same.choices[0].token_ids == made.choices[0].token_ids
            second = put_best(run, 2)
            eventually(lambda: client.model().version == second, PATIENCE)
            assert client.model().name == "novel"
            other = client.generate("x", temperature=0, max_tokens=8)
            assert other.choices[0].token_ids != made.choices[0].token_ids
        server.process.terminate()
        assert server.wait() == 0


def test_the_reloads_see_a_text_of_another_version(tmp_path: Path) -> None:
    reloads = Reloads(reloads=0, streams=0, seed=0, folder=tmp_path)
    reloads.versions = {"one": 1, "two": 2}
    prompt = [1, 2, 3]
    text, reason = text_after(prompt, 8, 1)
    reloads._check(prompt, 8, "one", text, reason)
    assert reloads.faults == []
    reloads._check(prompt, 8, "two", text, reason)
    reloads._check(prompt, 8, "none", text, reason)
    assert len(reloads.faults) == 2
    assert json.dumps(reloads.figures())
