"""Every way cbatch can fail.

    CBatchError                 exit code 1
    |-- UsageError              2   an option, a file or a column is wrong
    |   `-- ModelError          2   the model cannot be found, read or run correctly
    |-- ResumeMismatchError     3   the output belongs to a different job
    |-- OutputError             5   writing the answers failed
    |-- EngineError             6   the engine or its device failed
    |   `-- DeviceMemoryError   6   a step did not fit into the device's memory
    |-- OutputLockedError       7   another run is writing this output
    |-- TooManyErrorsError      8   stopped by --on-error fail, --max-errors or the first-rows guard
    `-- RunInterruptedError     128 + the signal's number; the same command resumes

A row that fails is not an exception: it becomes a `RowError` in the output.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class CBatchError(Exception):
    """Base of all errors that end a run; `exit_code` is the status of the process."""

    exit_code: int = 1


class UsageError(CBatchError):
    """An option, a file, a column or a combination of them cannot be used."""

    exit_code = 2


class ModelError(UsageError):
    """The model cannot be found, cannot be read, or would give wrong answers here."""


class ResumeMismatchError(CBatchError):
    """The work directory holds a job with other inputs, model or sampling."""

    exit_code = 3


class OutputError(CBatchError):
    """The answers or the journal could not be written."""

    exit_code = 5


class EngineError(CBatchError):
    """The engine or its device failed in a way that no single row explains."""

    exit_code = 6


class DeviceMemoryError(EngineError):
    """A step did not fit into the device's memory; the engine retries with a smaller one."""


class OutputLockedError(CBatchError):
    """Another process is writing this output."""

    exit_code = 7


class TooManyErrorsError(CBatchError):
    """A limit on failed rows stopped the run; what is done is kept."""

    exit_code = 8


class RunInterruptedError(CBatchError):
    """A signal stopped the run in good order; what is done is kept."""

    def __init__(self, message: str, *, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


class RowErrorType(StrEnum):
    """The closed list of reasons for which a row has no answer."""

    INVALID_JSON = "invalid_json"
    MISSING_PROMPT = "missing_prompt"
    BAD_TYPE = "bad_type"
    EMPTY_PROMPT = "empty_prompt"
    TEMPLATE_ERROR = "template_error"
    PROMPT_TOO_LONG = "prompt_too_long"
    GRAMMAR_ERROR = "grammar_error"
    UNSUPPORTED_OPTION = "unsupported_option"
    INVALID_OPTION = "invalid_option"
    OUT_OF_MEMORY = "out_of_memory"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    ENGINE_ERROR = "engine_error"


RETRYABLE = frozenset(
    {
        RowErrorType.OUT_OF_MEMORY,
        RowErrorType.TIMEOUT,
        RowErrorType.CANCELLED,
        RowErrorType.ENGINE_ERROR,
    }
)


@dataclass(frozen=True, slots=True)
class RowError:
    """Why one row has no answer. The message never holds text of the prompt."""

    type: RowErrorType
    message: str

    @property
    def retryable(self) -> bool:
        """Whether the same row could succeed in another run without being changed."""
        return self.type in RETRYABLE


class RowFailedError(Exception):
    """Carries a `RowError` from where it is found to where the row is recorded."""

    def __init__(self, type: RowErrorType, message: str) -> None:
        super().__init__(message)
        self.error = RowError(type, message)
