"""An engine and a tokenizer without torch or transformers, for tests of files and processes.

A token is a byte. The answer to a prompt is a function of the prompt and of what was resumed.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

from cbatch_cli.assembly import EngineLoader, LoadedEngine, Log, print_nothing
from cbatch_cli.config import EngineConfig
from cbatch_cli.engine.client import ModelRunner
from cbatch_cli.engine.core import EngineCore
from cbatch_cli.engine.stats import EngineStats
from cbatch_cli.engine.step import SchedulerOutput, StepOutput
from tests.fakes import make_scheduler

MAX_MODEL_LEN = 4096
MAX_NUM_SEQS = 8


class NullTokenizer:
    """UTF-8 bytes as ids."""

    name_or_path = "null"
    chat_template = None
    all_special_ids: tuple[int, ...] = ()
    added_tokens_decoder: dict[int, Any] = {}
    special_tokens_map: dict[str, str] = {}

    def __call__(self, texts: list[str], **options: object) -> dict[str, list[list[int]]]:
        return {"input_ids": [list(text.encode()) for text in texts]}

    def decode(self, token_ids: Sequence[int], **options: object) -> str:
        return bytes(token_ids).decode(errors="replace")


class NullRunner:
    """Samples lower-case letters that depend on row and position alone."""

    def execute(self, step: SchedulerOutput, stats: EngineStats) -> StepOutput:
        token_ids = {
            s.key: (null_token(s.key.row, s.start + s.num_tokens),)
            for s in step.scheduled
            if s.samples
        }
        return StepOutput(step_id=step.step_id, token_ids=token_ids)


def null_token(row: int, position: int) -> int:
    """The id that a row has at a position beyond its prompt."""
    return ord("a") + zlib.crc32(f"{row}:{position}".encode()) % 26


def null_answer(row: int, prompt: str, max_tokens: int) -> str:
    """What the engine answers."""
    start = len(prompt.encode())
    return bytes(null_token(row, start + i) for i in range(max_tokens)).decode()


def load_null_engine(
    model: str,
    config: EngineConfig,
    log: Log = print_nothing,
    *,
    runner: ModelRunner | None = None,
) -> LoadedEngine:
    """In place of `cbatch_cli.assembly.load_engine`; `runner` is a `NullRunner` unless given."""
    scheduler = make_scheduler(
        num_blocks=1024,
        block_size=16,
        max_num_seqs=config.max_num_seqs or MAX_NUM_SEQS,
        max_num_batched_tokens=config.max_num_batched_tokens or 4096,
        max_model_len=MAX_MODEL_LEN,
        prefix_caching=False,
    )
    return LoadedEngine(
        client=EngineCore(scheduler=scheduler, runner=runner or NullRunner()),
        tokenizer=NullTokenizer(),  # type: ignore[arg-type]
        generation_defaults={},
        description={"model": model, "commit": None, "max_model_len": MAX_MODEL_LEN},
        load_s=0.0,
    )


NULL_LOADER = EngineLoader(identify=lambda model: f"null {model}", load=load_null_engine)
