"""A Python client for GenerationService.

    with Client("127.0.0.1:50051") as client:
        print(client.generate("ROMEO:", max_tokens=100).text)
        for delta in client.stream("ROMEO:", seed=1):
            print(delta.text, end="", flush=True)

Nothing here imports torch, and gRPC is imported when a client is made.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from serve.errors import RequestError, readable_errors
from serve.results import (
    Choice,
    Completion,
    Delta,
    Detokenization,
    Finish,
    ModelInfo,
    Scores,
    Tokenization,
    TokenScore,
)

if TYPE_CHECKING:
    from types import TracebackType

    import grpc
    from typing_extensions import Unpack

    from serve.wire import RequestSettings

__all__ = [
    "Choice",
    "Client",
    "Completion",
    "CompletionStream",
    "Delta",
    "Detokenization",
    "Finish",
    "ModelInfo",
    "RequestError",
    "Scores",
    "TokenScore",
    "Tokenization",
]

DEFAULT_TARGET = "127.0.0.1:50051"
DEFAULT_TIMEOUT = 300.0
LONGEST_TIMEOUT = 1e8
"""Three years; more than that is for ever."""

MAX_ANSWER_BYTES = 256 * 2**20
"""What the client takes in one message; gRPC's own limit of 4 MiB is less than a long text's scores
may have."""


class CompletionStream:
    """An iterator over the `Delta`s of a text that is being made.

    A context manager too: leaving it, or `cancel`, tells the server to stop.

    Attributes:
        request_id, model, prompt_tokens, seed: known once the first delta, or the end, has come.
        finishes: how the texts ended, by their choice.
        prompt_scores: how likely the tokens of the prompt were, if that was asked for.
    """

    def __init__(self, call: Any, target: str) -> None:
        self._call = call
        self._target = target
        self.request_id = ""
        self.model = ""
        self.prompt_tokens = 0
        self.seed = 0
        self.finishes: dict[int, Finish] = {}
        self.prompt_scores: list[TokenScore] = []

    @property
    def finish(self) -> Finish | None:
        """How the first text ended; None until then."""
        return self.finishes.get(0)

    def __iter__(self) -> Iterator[Delta]:
        return self

    def __next__(self) -> Delta:
        from serve import wire

        with readable_errors(self._target, connected=self.request_id != ""):
            for response in self._call:
                kind = response.WhichOneof("event")
                if kind == "prompt":
                    self.request_id = response.prompt.request_id
                    self.model = response.prompt.model
                    self.prompt_tokens = response.prompt.prompt_tokens
                    self.seed = response.prompt.seed
                    self.prompt_scores = [wire.score_of(s) for s in response.prompt.scores]
                elif kind == "delta":
                    return wire.delta_of(response.delta)
                elif kind == "finish":
                    self.finishes[response.finish.choice] = wire.finish_of(response.finish)
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
        options = [(f"grpc.{k}_reconnect_backoff_ms", value) for k, value in backoff.items()]
        options.append(("grpc.max_receive_message_length", MAX_ANSWER_BYTES))
        self._channel: grpc.Channel = grpc.insecure_channel(target, options=options)
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._channel)

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        model: str = "",
        timeout: float | None = None,
        **settings: Unpack[RequestSettings],
    ) -> Completion:
        """Make a text and return it whole.

        Args:
            prompt: text, or token ids; empty starts from end-of-text.
            model: fail unless this is the model served.
            timeout: seconds for this request instead of the client's.
            settings: the fields of `gpt.params.SamplingParams` and of `serve.wire.RequestSettings`;
                one that is left out, or None, has its default.
        """
        from serve import wire
        from serve.v1 import generation_pb2 as pb

        spec = wire.spec_message(prompt, settings, model)
        answer = self._call(self._stub.Generate, pb.GenerateRequest(spec=spec), timeout)
        return wire.completion_of(answer)

    def batch(
        self,
        requests: Iterable[Mapping[str, Any]],
        *,
        model: str = "",
        timeout: float | None = None,
    ) -> Iterator[tuple[int, Completion | RequestError]]:
        """Make the texts of many requests; each is handed out when it is done, with its index.

        Args:
            requests: for each the arguments of `generate` by name, `prompt` among them.
            model, timeout: as in `generate`; the timeout is for all together.
        """
        from serve import wire
        from serve.v1 import generation_pb2 as pb

        specs = []
        for index, settings in enumerate(requests):
            if "prompt" not in settings:
                raise TypeError(f"request {index} has no prompt")
            rest: Any = {name: value for name, value in settings.items() if name != "prompt"}
            specs.append(wire.spec_message(settings["prompt"], rest, model))
        call = self._stub.BatchGenerate(
            pb.BatchGenerateRequest(specs=specs), timeout=self._deadline(timeout)
        )
        with readable_errors(self.target):
            for response in call:
                if response.WhichOneof("outcome") == "completion":
                    yield response.index, wire.completion_of(response.completion)
                else:
                    yield response.index, wire.failure_of(response.failure)

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        model: str = "",
        timeout: float | None = None,
        **settings: Unpack[RequestSettings],
    ) -> CompletionStream:
        """Make a text and hand it out as it comes. The arguments are those of `generate`."""
        from serve import wire
        from serve.v1 import generation_pb2 as pb

        spec = wire.spec_message(prompt, settings, model)
        call = self._stub.GenerateStream(
            pb.GenerateStreamRequest(spec=spec), timeout=self._deadline(timeout)
        )
        return CompletionStream(call, self.target)

    def score(
        self,
        content: str | Sequence[int],
        *,
        top: int = 0,
        model: str = "",
        timeout: float | None = None,
    ) -> Scores:
        """How likely the model finds a text.

        Args:
            content: text, or token ids; at least one token, and no more than the context holds.
            top: how many of the most likely tokens are wanted at each place, 0 to 20.
            model, timeout: as in `generate`.
        """
        from serve import wire
        from serve.v1 import generation_pb2 as pb

        request = pb.ScoreRequest()
        wire.fill(request, {"top": top, "model": model}, content=content)
        answer = self._call(self._stub.Score, request, timeout)
        return Scores(
            scores=[wire.score_of(score) for score in answer.scores],
            total_nats=answer.total_nats,
            bits_per_byte=answer.bits_per_byte if answer.HasField("bits_per_byte") else None,
            byte_count=answer.byte_count,
            request_id=answer.request_id,
            model=answer.model,
            queue_seconds=answer.timing.queue_seconds,
            prefill_seconds=answer.timing.prefill_seconds,
        )

    def tokenize(
        self,
        text: str,
        *,
        special: bool = False,
        ids_only: bool = False,
        model: str = "",
        timeout: float | None = None,
    ) -> Tokenization:
        """Cut a text into the model's tokens.

        Args:
            text: at most 1 MiB of UTF-8.
            special: take the text of special tokens, as `<|endoftext|>`, as those tokens.
            ids_only: leave the tokens' bytes and places out.
            model, timeout: as in `generate`.
        """
        from serve import wire
        from serve.v1 import generation_pb2 as pb

        request = pb.TokenizeRequest()
        wire.fill(request, {"text": text, "special": special, "ids_only": ids_only, "model": model})
        answer = self._call(self._stub.Tokenize, request, timeout)
        return Tokenization(
            list(answer.ids), list(answer.pieces), list(answer.starts), answer.model
        )

    def detokenize(
        self, ids: Iterable[int], *, model: str = "", timeout: float | None = None
    ) -> Detokenization:
        """The text of tokens. The arguments are as in `generate`."""
        from serve import wire
        from serve.v1 import generation_pb2 as pb

        request = pb.DetokenizeRequest()
        wire.fill(request, {"ids": ids, "model": model})
        answer = self._call(self._stub.Detokenize, request, timeout)
        return Detokenization(answer.text, answer.data, answer.model)

    def list_models(self, *, timeout: float | None = None) -> list[ModelInfo]:
        """What models are served."""
        from serve import wire
        from serve.v1 import generation_pb2 as pb

        answer = self._call(self._stub.ListModels, pb.ListModelsRequest(), timeout)
        return [wire.model_of(model) for model in answer.models]

    def model(self, name: str = "", *, timeout: float | None = None) -> ModelInfo:
        """What is told of a model. Empty: of the one that is served."""
        from serve import wire
        from serve.v1 import generation_pb2 as pb

        request = pb.GetModelRequest()
        wire.fill(request, {"model": name})
        return wire.model_of(self._call(self._stub.GetModel, request, timeout))

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

    def _call(self, method: Any, request: Any, timeout: float | None) -> Any:
        with readable_errors(self.target):
            return method(request, timeout=self._deadline(timeout))

    def _deadline(self, timeout: float | None) -> float | None:
        seconds = self.timeout if timeout is None else timeout
        # What gRPC cannot add to its clock it takes for a time that is over.
        return None if seconds is None or seconds > LONGEST_TIMEOUT else seconds
