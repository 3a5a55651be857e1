"""A Python client for GenerationService, and the `antiphon generate` command.

    with Client("127.0.0.1:50051") as client:
        print(client.generate("ROMEO:", max_tokens=100).text)
        for delta in client.stream("ROMEO:", seed=1):
            print(delta.text, end="", flush=True)

Nothing here imports torch, and gRPC is imported when a client is made.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from gpt.sample import add_sampling_arguments, read_prompt, sampling_params
from serve.results import (
    Completion,
    Delta,
    Finish,
    ModelInfo,
    RequestError,
    finish_of,
    readable_errors,
)

if TYPE_CHECKING:
    from types import TracebackType

    import grpc

    from serve.v1 import generation_pb2 as pb

__all__ = [
    "Client",
    "Completion",
    "CompletionStream",
    "Delta",
    "Finish",
    "ModelInfo",
    "RequestError",
]

DEFAULT_TARGET = "127.0.0.1:50051"
DEFAULT_TIMEOUT = 300.0

EXAMPLES = """\
examples:
  antiphon generate --prompt "ROMEO:"
  antiphon generate --target 10.0.0.7:50051 --prompt "ROMEO:" --temperature 0.8 --seed 1
  antiphon generate --prompt "To be" --stop "." --max-tokens 100 --no-stream
  echo "Once more" | antiphon generate --prompt -
"""


class CompletionStream:
    """An iterator over the `Delta`s of a text that is being made.

    A context manager too: leaving it, or `cancel`, tells the server to stop.

    Attributes:
        request_id, model, prompt_tokens, seed: known once the first delta, or the end, has come.
        finish: how the text ended; None until then.
    """

    def __init__(self, call: Any, target: str) -> None:
        self._call = call
        self._target = target
        self.request_id = ""
        self.model = ""
        self.prompt_tokens = 0
        self.seed = 0
        self.finish: Finish | None = None

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        with readable_errors(self._target, connected=self.request_id != ""):
            for response in self._call:
                kind = response.WhichOneof("event")
                if kind == "prompt":
                    self.request_id = response.prompt.request_id
                    self.model = response.prompt.model
                    self.prompt_tokens = response.prompt.prompt_tokens
                    self.seed = response.prompt.seed
                elif kind == "delta":
                    return Delta(response.delta.text, list(response.delta.token_ids))
                elif kind == "finish":
                    self.finish = finish_of(response.finish)
        raise StopIteration

    def cancel(self) -> None:
        """Tell the server to stop. Harmless when the text is over."""
        self._call.cancel()

    def __enter__(self) -> CompletionStream:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()


class Client:
    """Talks to one server. Threads may share it.

    Args:
        target: `host:port`.
        timeout: seconds that a whole request may take unless it says otherwise; None: any time.

    Raises (from its methods):
        RequestError: see there.
    """

    def __init__(
        self, target: str = DEFAULT_TARGET, *, timeout: float | None = DEFAULT_TIMEOUT
    ) -> None:
        import grpc

        from serve.v1 import generation_pb2_grpc

        self.target = target
        self.timeout = timeout
        # A server that is being started should be found soon after it is there.
        backoff = {"initial": 100, "min": 100, "max": 5000}
        self._channel: grpc.Channel = grpc.insecure_channel(
            target,
            options=[(f"grpc.{k}_reconnect_backoff_ms", value) for k, value in backoff.items()],
        )
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._channel)

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        seed: int | None = None,
        model: str = "",
        timeout: float | None = None,
    ) -> Completion:
        """Make a text and return it whole.

        Args:
            prompt: text, or token ids; empty starts from end-of-text.
            temperature, top_k, top_p, max_tokens, stop, seed: as in `gpt.params.SamplingParams`;
                None leaves the server's default.
            model: fail unless this is the model served.
            timeout: seconds for this request instead of the client's.
        """
        from serve.v1 import generation_pb2 as pb

        spec = _spec(prompt, temperature, top_k, top_p, max_tokens, stop, seed, model)
        with readable_errors(self.target):
            response = self._stub.Generate(
                pb.GenerateRequest(spec=spec), timeout=self._deadline(timeout)
            )
        choice = response.choices[0]
        return Completion(
            choice.text,
            list(choice.token_ids),
            finish_of(choice.finish),
            response.prompt.request_id,
            response.prompt.model,
        )

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        seed: int | None = None,
        model: str = "",
        timeout: float | None = None,
    ) -> CompletionStream:
        """Make a text and hand it out as it comes. The arguments are those of `generate`."""
        from serve.v1 import generation_pb2 as pb

        spec = _spec(prompt, temperature, top_k, top_p, max_tokens, stop, seed, model)
        call = self._stub.GenerateStream(
            pb.GenerateStreamRequest(spec=spec), timeout=self._deadline(timeout)
        )
        return CompletionStream(call, self.target)

    def model(self) -> ModelInfo:
        """What model is served."""
        from serve.v1 import generation_pb2 as pb

        with readable_errors(self.target):
            found = self._stub.GetModel(pb.GetModelRequest(), timeout=self._deadline(None))
        return ModelInfo(
            name=found.name,
            block_size=found.block_size,
            vocab_size=found.vocab_size,
            parameter_count=found.parameter_count,
            dtype=found.dtype,
            architecture={
                field.name: getattr(found.architecture, field.name)
                for field in found.architecture.DESCRIPTOR.fields
            },
            tokenizer_kind=found.tokenizer.kind,
            tokenizer_fingerprint=found.tokenizer.fingerprint,
        )

    def await_ready(self, timeout: float) -> None:
        """Wait until the server says that it is serving.

        Raises:
            RequestError: it did not within `timeout` seconds; the message says what it said last.
        """
        from grpc_health.v1 import health_pb2, health_pb2_grpc

        health = health_pb2_grpc.HealthStub(self._channel)
        end = time.monotonic() + timeout
        seen = "it did not answer"
        while (left := end - time.monotonic()) > 0:
            with contextlib.suppress(RequestError), readable_errors(self.target):
                answer = health.Check(
                    health_pb2.HealthCheckRequest(), timeout=left, wait_for_ready=True
                )
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
                seen = "it is not serving yet"
            time.sleep(min(0.05, max(0.0, left)))
        raise RequestError(
            f"{self.target} was not ready within {timeout:g} s: {seen}", code="DEADLINE_EXCEEDED"
        )

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _deadline(self, timeout: float | None) -> float | None:
        return self.timeout if timeout is None else timeout


def _spec(
    prompt: str | Sequence[int],
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    max_tokens: int | None,
    stop: Sequence[str],
    seed: int | None,
    model: str,
) -> pb.GenerationSpec:
    """Raises RequestError for what the wire cannot even carry (a negative count, half a character);
    what it can is for the server to judge."""
    from serve.v1 import generation_pb2 as pb

    spec = pb.GenerationSpec()
    given = {
        "temperature": temperature, "top_k": top_k, "top_p": top_p,
        "max_tokens": max_tokens, "seed": seed, "model": model,
    }  # fmt: skip
    violations = []
    for field, value in given.items():
        try:
            if value is not None:
                setattr(spec, field, value)
        except (ValueError, TypeError) as error:
            violations.append((f"spec.{field}", f"{value!r} cannot be sent: {error}"))
    try:
        spec.stop.extend(stop)
    except (ValueError, TypeError) as error:
        violations.append(("spec.stop", f"cannot be sent: {error}"))
    try:
        if isinstance(prompt, str):
            spec.text = prompt
        else:
            spec.token_ids.SetInParent()
            spec.token_ids.ids.extend(prompt)
    except (ValueError, TypeError) as error:
        field = "text" if isinstance(prompt, str) else "token_ids"
        violations.append((f"spec.{field}", f"cannot be sent: {error}"))
    if violations:
        message = "; ".join(f"{field}: {text}" for field, text in violations)
        raise RequestError(message, code="INVALID_ARGUMENT", violations=violations)
    return spec


def main(argv: list[str], prog: str = "antiphon generate") -> int:
    """Ask a server for text and print it as it comes, after its prompt, like `antiphon sample`.

    Raises:
        UserError: settings out of range, the server refused or cannot be reached.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Ask a running server (`antiphon serve`) for text and print it as it is made.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--target",
        default=DEFAULT_TARGET,
        metavar="HOST:PORT",
        help=f"the server (default: {DEFAULT_TARGET})",
    )
    parser.add_argument(
        "--prompt",
        metavar="TEXT",
        help="text to continue; - reads it from standard input (default: start a new document)",
    )
    add_sampling_arguments(parser)
    parser.add_argument(
        "--no-stream", action="store_true", help="print the text when it is complete"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=DEFAULT_TIMEOUT,
        metavar="S",
        help=f"seconds that it may take (default: {DEFAULT_TIMEOUT:g})",
    )
    args = parser.parse_args(argv)
    if not args.timeout > 0:
        parser.error(f"--timeout is {args.timeout:g}, but must be above 0")
    if not re.fullmatch(r"[^/]+:\d{1,5}", args.target):  # gRPC would try port 443 at once
        parser.error(f"--target is {args.target!r}, but must be HOST:PORT, as localhost:50051")
    params = sampling_params(args)
    prompt = read_prompt(args.prompt)
    with (
        Client(args.target, timeout=args.timeout) as client,
        client.stream(
            prompt,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            max_tokens=params.max_tokens,
            stop=params.stop,
            seed=params.seed,
        ) as stream,
    ):
        pieces = (delta.text for delta in stream)
        first = next(pieces, "")  # an error comes before anything is printed
        sys.stdout.write(prompt)
        if args.no_stream:
            sys.stdout.write(first + "".join(pieces))
        else:
            sys.stdout.write(first)
            sys.stdout.flush()
            for text in pieces:
                sys.stdout.write(text)
                sys.stdout.flush()
        sys.stdout.write("\n")
        sys.stdout.flush()
        end = stream.finish
    if end and end.reason == "length" and end.completion_tokens < (params.max_tokens or 0):
        print(
            f"note: the model's context was full before --max-tokens {params.max_tokens} was "
            "reached",
            file=sys.stderr,
        )
    return 0
