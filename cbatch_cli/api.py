"""The Python interface: `Engine` for prompts in memory, `run` for whole files."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceABC
from pathlib import Path
from typing import Any, Self

from cbatch_cli.assembly import LoadedEngine, load_engine, resolve_sampling
from cbatch_cli.config import DEMO_MODEL, EngineConfig, build_job_config
from cbatch_cli.data.prompt_columns import PromptColumns, PromptKind
from cbatch_cli.data.row import Row
from cbatch_cli.errors import RowError, RowErrorType, UsageError
from cbatch_cli.generation import TextGeneration
from cbatch_cli.metrics import RequestMetrics
from cbatch_cli.request import (
    FinishReason,
    Request,
    RequestKey,
    RequestOutput,
    SamplingParams,
)
from cbatch_cli.text.prompts import PromptEncoder

Prompt = str | SequenceABC[int] | SequenceABC[Mapping[str, Any]]
"""Text, token ids, or a conversation: a list of messages with `role` and `content`."""


class Engine:
    """A loaded model that answers prompts by continuous batching.

    Built by `from_pretrained`. One thread at a time may run `generate`; `submit` is for any.
    """

    def __init__(self, loaded: LoadedEngine) -> None:
        self._loaded = loaded
        self._generation = TextGeneration(loaded.client, loaded.tokenizer)
        self._encoders: dict[str, PromptEncoder] = {}
        self.default_params = resolve_sampling({}, loaded.generation_defaults)

    @classmethod
    def from_pretrained(
        cls, model: str = DEMO_MODEL, *, config: EngineConfig | None = None, **settings: Any
    ) -> Self:
        """Load `model`: a hub id, a folder, a `.gguf` file, or the packaged demo model.

        `settings` are the fields of `EngineConfig`, which may be given whole instead. Raises
        `ModelError` for a model that cannot be run correctly, `ValueError` for a bad setting.
        """
        config = config or EngineConfig(**settings)
        return cls(load_engine(model, config))

    def generate(
        self, prompts: Iterable[Prompt | Request], params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Answer `prompts`, pulled lazily on another thread, each yielded as it finishes.

        The n-th prompt has the key (n, 0); a `Request` brings its own key and params. A prompt that
        cannot be run comes back with an error. One that is left early gives up what is not
        finished. Without `params` the model's defaults apply.
        """
        if isinstance(prompts, str | Mapping):
            raise TypeError("prompts must be an iterable of prompts; put a single one into a list")
        refused: deque[RequestOutput] = deque()
        requests = self._requests(prompts, params or self.default_params, refused)
        for request, output in self._generation.generate(requests):
            while refused:
                yield refused.popleft()
            yield self._generation.finalize(request, output)
        yield from refused

    def submit(self, request: Request) -> None:
        """Queue one more request, thread-safe; the `generate` that runs, or the next, yields it."""
        self._generation.submit(request)

    def _requests(
        self,
        prompts: Iterable[Prompt | Request],
        params: SamplingParams,
        refused: deque[RequestOutput],
    ) -> Iterator[Request]:
        for index, prompt in enumerate(prompts):
            if isinstance(prompt, Request):
                yield prompt
                continue
            key = RequestKey(index)
            encoded = self._encode(prompt)
            if isinstance(encoded, RowError):
                refused.append(
                    RequestOutput(
                        key=key,
                        token_ids=(),
                        finish_reason=FinishReason.ERROR,
                        metrics=RequestMetrics(),
                        error=encoded,
                    )
                )
            else:
                yield Request(key=key, prompt_token_ids=encoded, params=params)

    def _encode(self, prompt: Prompt) -> tuple[int, ...] | RowError:
        if isinstance(prompt, bytes) or not isinstance(prompt, str | SequenceABC):
            message = f"a prompt must be text, ids or messages, not {type(prompt).__name__}"
            return RowError(RowErrorType.BAD_TYPE, message)
        if not isinstance(prompt, str) and all(isinstance(item, int) for item in prompt):
            return tuple(prompt)  # type: ignore[arg-type]
        kind: PromptKind = "text" if isinstance(prompt, str) else "messages"
        encoder = self._encoders.get(kind)
        if encoder is None:
            try:
                encoder = PromptEncoder(
                    tokenizer=self._loaded.tokenizer,
                    prompt=PromptColumns(kind=kind, column="prompt"),
                    defaults=self.default_params,
                )
            except UsageError as error:  # there is no chat template
                return RowError(RowErrorType.UNSUPPORTED_OPTION, str(error))
            self._encoders[kind] = encoder
        (encoded,) = encoder.encode([Row(index=0, columns={"prompt": prompt})])
        return encoded if isinstance(encoded, RowError) else encoded.token_ids


def run(inputs: str | Path | SequenceABC[str | Path], **options: Any) -> dict[str, Any]:
    """Run a whole file, as `cbatch run` does, and return the summary.

    `options` are the long names of the command line with underscores, and the environment's
    `CBATCH_*` applies too. Raises `CBatchError`; failed rows are counted in the summary.
    """
    from cbatch_cli.job import run_job

    names = [inputs] if isinstance(inputs, str | Path) else inputs
    config = build_job_config({"inputs": tuple(map(str, names)), **options})
    return run_job(config)
