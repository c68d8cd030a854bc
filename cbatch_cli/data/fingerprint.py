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

_LEFT_OPEN: Mapping[str, Any] = {
    "dtype": "auto",
    "kv_cache_dtype": "auto",
    "deterministic": None,
    "max_model_len": None,
}
"""Settings that a job may leave to the model and the machine, with the value that does."""
_ALWAYS_SETTLED = ("resolved sampling", "resolved dtype")


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


def as_begun(
    fingerprint: Mapping[str, Any],
    earlier: Mapping[str, Any],
    settled: Mapping[str, Any],
    *,
    is_done: bool,
) -> tuple[dict[str, Any], list[str]]:
    """`fingerprint` as the `earlier` run put it, where it only says what that one `settled`.

    A setting that is left open now and was given then is taken for the same until the model is
    loaded: its name is in the list returned. Of a job that is done no model is loaded, and it
    differs, but for a promise that was kept without being asked for.
    """
    same, undecided = dict(fingerprint), list[str]()
    for name, left_open in _LEFT_OPEN.items():
        now, resolved = fingerprint.get(name), settled.get(f"resolved {name}")
        if now == earlier.get(name) or resolved is None:
            continue
        if now == left_open and not is_done:
            undecided.append(name)
        elif now != resolved and not (name == "deterministic" and now is None and resolved):
            continue
        same[name] = earlier.get(name)
    return same, undecided


def require_same_settled(
    settled: Mapping[str, Any],
    earlier: Mapping[str, Any],
    undecided: Sequence[str],
    *,
    output: str,
) -> None:
    """Raise `ResumeMismatchError` if a model has settled something else than before.

    `undecided` are the settings that `as_begun` could not compare.
    """
    names = [*_ALWAYS_SETTLED, *(f"resolved {name}" for name in undecided)]
    now, then = ({name: run.get(name) for name in names} for run in (settled, earlier))
    require_same(now, then, output=output)


def differences(run: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """What two shards that are done differ in, as their work directories tell."""
    ours, theirs = run["fingerprint"], other["fingerprint"]
    different = []
    for name in (ours.keys() | theirs.keys()) - {"shard"}:
        if ours.get(name) != theirs.get(name):
            resolved = [one["settled"].get(f"resolved {name}") for one in (run, other)]
            if name not in _LEFT_OPEN or None in resolved or resolved[0] != resolved[1]:
                different.append(name)
    different += [
        name for name in _ALWAYS_SETTLED if run["settled"].get(name) != other["settled"].get(name)
    ]
    return sorted(different)


def _read_edge(stream: Any) -> bytes:
    """Up to `EDGE_BYTES` from where the stream is."""
    parts: list[bytes] = []
    missing = EDGE_BYTES
    while missing and (part := stream.read(missing)):
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)
