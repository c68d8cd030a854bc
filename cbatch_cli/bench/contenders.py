"""Ways to answer a workload: our engine with either scheduler, and transformers' `generate`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

from cbatch_cli.assembly import LoadedModel
from cbatch_cli.config import EngineConfig
from cbatch_cli.engine.stats import EngineStats
from cbatch_cli.errors import EngineError, UsageError
from cbatch_cli.generation import TextGeneration
from cbatch_cli.request import Request


class Contender(Protocol):
    """One way to answer a workload."""

    name: str

    def run(self, requests: Sequence[Request]) -> dict[str, Any]:
        """Answer all requests; what that took, by the names of a job's summary."""
        ...


class EngineContender:
    """Our engine with the scheduler that `config` names."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig) -> None:
        self.name: str = config.scheduler
        self._loaded = loaded
        self._config = config

    def run(self, requests: Sequence[Request]) -> dict[str, Any]:
        """Answer all requests with a new engine."""
        try:
            stats = self._answer(requests)
        finally:
            self._loaded.release_engine()
        shares = {name: _share(spent_s, stats.wall_s) for name, spent_s in stats.phases_s.items()}
        shares["other"] = max(0.0, round(1.0 - sum(shares.values()), 4))
        return {"wall_s": round(stats.wall_s, 4), **stats.summary(), "phase_shares": shares}

    def _answer(self, requests: Sequence[Request]) -> EngineStats:
        engine = self._loaded.build_engine(self._config)
        generation = TextGeneration(engine.client, engine.tokenizer)
        # All are queued before the first step, so that the schedule is the same in every run.
        for request in requests:
            generation.submit(request)
        for request, output in generation.generate(()):
            if output.error is not None:
                raise EngineError(f"row {request.key.row} of the workload: {output.error.message}")
        return engine.client.stats


class GenerateContender:
    """transformers' `generate` on the rows as they come, `batch_size` at a time."""

    name = "generate"

    def __init__(self, loaded: LoadedModel, *, batch_size: int) -> None:
        self._eos_token_ids = loaded.model.eos_token_ids
        self._generator = loaded.padded_generator()
        self._batch_size = batch_size

    def run(self, requests: Sequence[Request]) -> dict[str, Any]:
        """Answer all requests; a step counts as full while no row of its batch has ended."""
        ignore_eos = requests[0].params.ignore_eos
        eos_token_ids = frozenset() if ignore_eos else self._eos_token_ids
        num_steps = num_output_tokens = 0
        start = time.monotonic()
        for first in range(0, len(requests), self._batch_size):
            batch = requests[first : first + self._batch_size]
            answers = self._generator.generate(
                [request.prompt_token_ids for request in batch],
                max_new_tokens=max(request.params.max_tokens for request in batch),
                eos_token_ids=eos_token_ids,
            )
            num_steps += max(map(len, answers))
            num_output_tokens += sum(
                _answer_len(answer[: request.params.max_tokens], eos_token_ids)
                for request, answer in zip(batch, answers, strict=True)
            )
        wall_s = time.monotonic() - start
        num_prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
        return {
            "wall_s": round(wall_s, 4),
            "prompt_tokens": num_prompt_tokens,
            "output_tokens": num_output_tokens,
            "output_tokens_per_s": round(num_output_tokens / wall_s, 4),
            "total_tokens_per_s": round((num_prompt_tokens + num_output_tokens) / wall_s, 4),
            "steps": num_steps,
            "step_occupancy": round(num_output_tokens / num_steps / self._batch_size, 4),
        }


def require_comparable(requests: Sequence[Request]) -> None:
    """Raise `UsageError` for a row whose answer `GenerateContender` would end elsewhere."""
    ignore_eos = requests[0].params.ignore_eos
    for request in requests:
        params = request.params
        ends = (params.stop, params.stop_token_ids, params.min_tokens)
        if not params.is_greedy or any(ends) or params.ignore_eos is not ignore_eos:
            raise UsageError(
                f"row {request.key.row} of the workload cannot be compared with generate: rows "
                "must be greedy, without stop, stop_token_ids and min_tokens, and all or none of "
                "them must ignore EOS"
            )


def _answer_len(token_ids: Sequence[int], eos_token_ids: frozenset[int]) -> int:
    """Tokens up to the first EOS, which counts."""
    ends = (index + 1 for index, token_id in enumerate(token_ids) if token_id in eos_token_ids)
    return next(ends, len(token_ids))


def _share(part: float, whole: float) -> float:
    return round(part / whole, 4) if whole else 0.0
