"""What a job's answers depend on, so that a resumed run can tell that it is the same job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from cbatch_cli.data.input_files import InputFile
from cbatch_cli.data.json_text import dump_json
from cbatch_cli.errors import ResumeMismatchError, UsageError

EDGE_BYTES = 2**20
"""Read from the start and from the end of each input file."""


def file_identity(file: InputFile) -> dict[str, Any]:
    """Size and edges of a file: they change with its content, wherever it lies.

    Raises `UsageError` if it cannot be read.
    """
    digest = blake2b(digest_size=16)
    try:
        size = file.size()
        with file.open() as stream:
            digest.update(_read_edge(stream))
            if size is not None and size > EDGE_BYTES and stream.seekable():
                stream.seek(max(EDGE_BYTES, size - EDGE_BYTES))
                digest.update(_read_edge(stream))
    except OSError as error:
        raise UsageError(f"cannot read {file.name}: {error}") from error
    return {"size": size, "edges": digest.hexdigest()}


def file_place(file: InputFile) -> dict[str, Any]:
    """Path, size and time of a file: while they stay, what was read of it is not read again."""
    if file.is_remote:
        return {"location": file.location, "mtime_ns": None}
    try:
        return {"location": file.location, "mtime_ns": file.modified_ns()}
    except OSError as error:
        raise UsageError(f"cannot read {file.name}: {error}") from error


def inputs_identity(files: Sequence[InputFile]) -> list[dict[str, Any]]:
    """`file_identity` of every file, in order."""
    return [file_identity(file) for file in files]


def inputs_digest(identities: Sequence[Mapping[str, Any]]) -> str:
    """What `inputs_identity` gives, in one short text."""
    return blake2b(dump_json(identities), digest_size=16).hexdigest()


def inputs_places(files: Sequence[InputFile]) -> list[dict[str, Any]]:
    """`file_place` of every file, in order."""
    return [file_place(file) for file in files]


def require_same(
    fingerprint: Mapping[str, Any], earlier: Mapping[str, Any], *, output: str
) -> None:
    """Raise `ResumeMismatchError`, naming the fields that differ and the ways out, if any do."""
    names = sorted(fingerprint.keys() | earlier.keys())
    different = [name for name in names if fingerprint.get(name) != earlier.get(name)]
    if different:
        raise ResumeMismatchError(
            f"{output} was begun by a different job: {', '.join(different)} changed since; run it "
            "as it was to resume, start over with --overwrite, or choose another output with -o"
        )


def _read_edge(stream: Any) -> bytes:
    """Up to `EDGE_BYTES` from where the stream is."""
    parts: list[bytes] = []
    missing = EDGE_BYTES
    while missing and (part := stream.read(missing)):
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)
