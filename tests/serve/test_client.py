"""The client's errors, and the `antiphon generate` command."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import sys
from collections.abc import Callable

import pytest

from gpt.errors import PromptError, SamplingError, UserError
from gpt.generate import generate
from gpt.params import SamplingParams
from gpt.tokenizer import Tokenizer
from gpt.transcript import Transcript, table
from serve.async_client import AsyncClient
from serve.client import Client, RequestError
from serve.generate import main
from tests.serve.scripted import ANY, ScriptedModel
from tests.serve.served import Served

BYTES = Tokenizer.bytes()
NOBODY = "127.0.0.1:1"
Serve = Callable[..., Served]


def test_a_server_that_is_not_there_is_one_line_that_names_it() -> None:
    with Client(NOBODY) as client:
        for call in (client.model, lambda: client.generate("x"), lambda: list(client.stream("x"))):
            with pytest.raises(RequestError, match=f"no server can be reached at {NOBODY}") as it:
                call()
            assert isinstance(it.value, UserError)
            assert it.value.code == "UNAVAILABLE"
            assert "\n" not in str(it.value)
        with pytest.raises(RequestError, match="not ready within 1 s: no server can be reached"):
            client.await_ready(1)


def test_the_model_describes_itself(serve: Serve) -> None:
    model = serve(ScriptedModel.of(BYTES, [])).client.model()
    assert (model.name, model.block_size, model.vocab_size) == ("scripted", 64, 257)
    assert (model.tokenizer_kind, model.tokenizer_fingerprint) == ("bytes", BYTES.fingerprint)
    assert model.dtype == "float32"
    assert model.architecture["n_layer"] == 1
    assert model.architecture["pattern"] == "causal"


def test_every_answer_tells_the_version_that_made_it(serve: Serve) -> None:
    served = serve(ScriptedModel.of(BYTES, list(b"ab")))
    served.engine.version = "609bc27092b10189"

    stream = served.client.stream("x")
    assert "".join(delta.text for delta in stream) == "ab"
    told = [stream.model_version, served.client.generate("x").model_version]
    assert [*told, served.client.model().version] == ["609bc27092b10189"] * 3


def test_the_client_for_asyncio_is_told_it_too_from_the_first_delta_on(serve: Serve) -> None:
    served = serve(ScriptedModel.of(BYTES, list(b"ab")))
    served.engine.version = "609bc27092b10189"

    async def ask() -> list[str]:
        async with AsyncClient(served.server.target, timeout=30) as client:
            stream = client.stream("x")
            told = [stream.model_version]
            text = ""
            async for delta in stream:
                text += delta.text
                told.append(stream.model_version)
            assert text == "ab"
            told.append((await client.generate("x")).model_version)
            return [*told, (await client.model()).version]

    before, *told = asyncio.run(ask())
    assert before == ""
    assert set(told) == {"609bc27092b10189"}


def test_the_command_streams_prompt_and_text(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    served = serve(ScriptedModel.of(BYTES, list("ď, hear me.".encode())))
    at = ["--target", served.server.target]
    assert main([*at, "--prompt", "F"], "antiphon generate") == 0
    assert capsys.readouterr().out == "Fď, hear me.\n"
    assert main([*at, "--prompt", "F", "--stop", "me", "--no-stream"], "antiphon generate") == 0
    assert capsys.readouterr().out == "Fď, hear \n"


def test_the_command_honours_its_settings(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    served = serve(ScriptedModel(BYTES.n_vocab, lambda *_: ANY))

    def out(*flags: str) -> str:
        flags = ("--target", served.server.target, "--prompt", "", *flags)
        assert main(list(flags), "antiphon generate") == 0
        return capsys.readouterr().out

    assert out("--temperature", "0", "--max-tokens", "3") == "\0\0\0\n"
    assert out("--top-k", "1", "--max-tokens", "2") == "\0\0\n"
    assert out("--top-p", "1e-9", "--max-tokens", "2") == "\0\0\n"
    seeded = ("--seed", "0", "--max-tokens", "20")
    assert out(*seeded) == out(*seeded) != out("--seed", "1", "--max-tokens", "20")


def local(served: Served, prompt: str, **settings: object) -> Transcript:
    """What the local sampler makes of the served model."""
    params = SamplingParams(**settings)
    found = Transcript(prompt, params, max(1, len(prompt)))
    for piece in generate(served.model, BYTES, prompt, params):
        found.add(piece)
    return found


NOISY = {"seed": 3, "max_tokens": 9, "temperature": 1.5, "logprobs": 2}
NOISY_FLAGS = ["--seed", "3", "--max-tokens", "9", "--temperature", "1.5", "--logprobs", "2"]


def test_the_command_s_json_is_the_sampler_s(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    served = serve(ScriptedModel(BYTES.n_vocab, lambda *_: ANY))
    at = ["--target", served.server.target, "--prompt", "ab"]
    assert main([*at, *NOISY_FLAGS, "--json"]) == 0
    [line] = capsys.readouterr().out.splitlines()
    record = json.loads(line)
    told = {key: record.pop(key) for key in ("model", "model_version", "request_id", "timing")}
    assert told["model"] == "scripted"
    assert set(told["timing"]) == {"queue_seconds", "prefill_seconds", "decode_seconds"}
    assert record == local(served, "ab", **NOISY).record(BYTES)
    assert record["logprobs"][0]["logprob"] < 0
    assert main([*at, "--json", "--stop", "b", "--temperature", "0", "--max-tokens", "3"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert "logprobs" not in record
    assert record["usage"] == {"prompt_tokens": 2, "completion_tokens": 3}


def test_the_command_s_table_is_the_sampler_s(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    served = serve(ScriptedModel.of(BYTES, list("ď!".encode())))
    flags = ["--target", served.server.target, "--prompt", "F", "--logprobs", "3"]
    assert main(flags) == 0
    expected = table(local(served, "F", seed=0, logprobs=3).made, BYTES)
    assert capsys.readouterr().out == "Fď!\n" + expected
    assert "<|endoftext|>" in expected


def test_the_command_says_when_the_context_was_full(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    served = serve(ScriptedModel(BYTES.n_vocab, lambda *_: ord("a"), block_size=4))
    flags = ["--target", served.server.target, "--prompt", "xy", "--max-tokens"]
    assert main([*flags, "3"], "antiphon generate") == 0
    assert capsys.readouterr() == ("xyaaa\n", "")
    assert main([*flags, "4"], "antiphon generate") == 0
    out, err = capsys.readouterr()
    assert out == "xyaaa\n"
    assert "context was full before --max-tokens 4" in err


@pytest.mark.parametrize("seconds", ["inf", "1e300", "1e8"])
def test_a_very_long_time_limit_is_none(
    serve: Serve, capsys: pytest.CaptureFixture[str], seconds: str
) -> None:
    served = serve(ScriptedModel.of(BYTES, list(b"!")))
    assert main(["--target", served.server.target, "--prompt", "F", "--timeout", seconds]) == 0
    assert capsys.readouterr().out == "F!\n"


def test_the_command_reads_its_prompt_from_a_pipe(
    serve: Serve, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve(ScriptedModel.of(BYTES, []))
    monkeypatch.setattr(sys, "stdin", io.StringIO("Once more"))
    assert main(["--target", served.server.target, "--prompt", "-"], "antiphon generate") == 0
    assert capsys.readouterr().out == "Once more\n"


def test_a_piped_prompt_that_is_no_text_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff"), "utf-8"))
    with pytest.raises(PromptError, match="not utf-8 text"):
        main(["--target", NOBODY, "--prompt", "-"])


def test_the_command_prints_nothing_but_the_error_when_it_is_refused(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    served = serve(ScriptedModel.of(BYTES, [], block_size=4))
    with pytest.raises(RequestError, match="context holds 4"):
        main(["--target", served.server.target, "--prompt", "too long"], "antiphon generate")
    with pytest.raises(SamplingError, match="temperature"):
        main(["--target", NOBODY, "--temperature", "nan"], "antiphon generate")
    with pytest.raises(SystemExit) as usage:
        main(["--timeout", "nan"], "antiphon generate")
    assert usage.value.code == 2
    assert capsys.readouterr().out == ""


def test_asking_for_help_imports_neither_torch_nor_grpc() -> None:
    for module in ("serve.generate", "serve.server"):
        code = (
            f"import sys, {module} as m\n"
            "try: m.main(['--help'], 'antiphon x')\n"
            "except SystemExit as end: assert end.code == 0\n"
            "assert not {'torch', 'grpc', 'tiktoken', 'lightning'} & set(sys.modules)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "examples:" in done.stdout


@pytest.mark.parametrize("target", ["localhost", "http://localhost:50051", "localhost:", ":50051x"])
def test_a_target_without_a_port_is_a_usage_error(
    target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--target", target, "--prompt", "x"])
    assert caught.value.code == 2
    assert "must be HOST:PORT" in capsys.readouterr().err
