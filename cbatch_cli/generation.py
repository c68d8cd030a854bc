"""Text around an engine that sees ids only: stop strings while it runs, the answer at its end."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterable, Mapping
from typing import TYPE_CHECKING

from cbatch_cli.engine.client import EngineClient
from cbatch_cli.request import FinishReason, Request, RequestKey, RequestOutput
from cbatch_cli.text.detokenizer import Detokenizer
from cbatch_cli.text.stop_strings import StopStringWatcher, finalize

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TextGeneration:
    """Requests in, each with its output out, in the order in which they finish.

    `generate` runs on one thread; `finalize` may run on another.
    """

    def __init__(self, client: EngineClient, tokenizer: PreTrainedTokenizerBase) -> None:
        self._client = client
        self._detokenizer = Detokenizer(tokenizer)
        self._watcher = StopStringWatcher(self._detokenizer)
        self._requests: dict[RequestKey, Request] = {}
        self._call: object | None = None
        """Stands for the `generate` that runs."""
        client.token_listener = self._on_tokens

    def generate(
        self, requests: Iterable[Request]
    ) -> Generator[tuple[Request, RequestOutput], None, None]:
        """Run `requests`, pulled lazily on another thread; outputs hold ids, not yet text.

        Whoever stops early gives up what is not finished. Raises `RuntimeError` while another call
        has not ended.
        """
        if self._call is not None:
            raise RuntimeError(
                "another generate of this engine has not ended: exhaust it, close it, or use submit"
            )
        self._call = call = object()
        followed = map(lambda request: self._follow(request, call), requests)
        try:
            for output in self._client.generate(followed):
                self._watcher.discard(output.key)
                yield self._requests.pop(output.key), output
        except BaseException:
            # The engine has dropped them all.
            for key in list(self._requests):
                del self._requests[key]
                self._watcher.discard(key)
            raise
        finally:
            self._call = None

    def submit(self, request: Request) -> None:
        """Queue one more request for the `generate` that runs, or for the next; thread-safe."""
        self._client.submit(self._follow(request, self._call))

    def finalize(self, request: Request, output: RequestOutput) -> RequestOutput:
        """The output with its text, stop string and surplus ids cut off."""
        if output.error is not None or output.finish_reason is FinishReason.CANCELLED:
            return output
        finished = finalize(
            self._detokenizer,
            request.prompt_token_ids,
            output.token_ids,
            request.params,
            output.finish_reason,
        )
        return dataclasses.replace(
            output,
            text=finished.text,
            token_ids=output.token_ids[: finished.num_tokens],
            finish_reason=finished.finish_reason,
            metrics=dataclasses.replace(output.metrics, completion_tokens=finished.num_tokens),
        )

    def _follow(self, request: Request, call: object | None) -> Request:
        if call is not self._call:
            return request  # of a source that was slow, for a call that was left: goes nowhere
        if request.key in self._requests:
            raise ValueError(f"a request with key {tuple(request.key)} is in the engine already")
        self._requests[request.key] = request
        self._watcher.add(
            request.key, request.prompt_token_ids, request.params, request.resumed_token_ids
        )
        return request

    def _on_tokens(self, token_ids: Mapping[RequestKey, tuple[int, ...]]) -> None:
        for key, new_token_ids in token_ids.items():
            keep_n = self._watcher.feed(key, new_token_ids)
            if keep_n is not None:
                self._client.finish(key, keep_n, FinishReason.STOP_SEQUENCE)
