"""Hostile inputs, each in a process of its own: it neither dies, nor hangs, nor eats the memory."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.crash.fork_server import ForkServer, Outcome, Run
from tests.crash.store import read_rows

MAX_ADDED_BYTES = 700 * 2**20
FINE = {0, 2}
"""Exit codes: every row has an answer or an error, or the input is refused."""

GOOD = b'{"prompt": "good"}\n'
DEEP = 100_000
# Each with the number of rows that it is.
CORPUS: dict[str, tuple[bytes, int]] = {
    "nested arrays": (b'{"prompt": ' + b"[" * DEEP + b"]" * DEEP + b"}\n", 1),
    "nested objects": (b'{"a":' * DEEP + b"1" + b"}" * DEEP + b"\n", 1),
    "nested without end": (b'{"a":[' * DEEP + b"\n", 1),
    "nested as deep as allowed": (b'{"prompt":"a","b":' + b"[" * 199 + b"]" * 199 + b"}\n", 1),
    "lone surrogates": (b'{"prompt": "\\ud800"}\n{"prompt": "a", "\\udfff": 1}\n', 2),
    "surrogate bytes": (b'{"prompt": "\xed\xa0\x80"}\n', 1),
    "NUL bytes": (bytes(5000) + b"\n" + b'{"prompt": "a\x00b"}\n{"prompt": "a\\u0000b"}\n', 3),
    "only NUL": (bytes(100_000), 1),
    "huge numbers": (
        b'{"prompt": "a", "n": 1' + b"0" * 400 + b"}\n"
        b'{"prompt": "a", "n": 1e400}\n{"prompt": "a", "n": -1e-400}\n'
        b'{"prompt": "a", "n": ' + b"9" * 100_000 + b"}\n",
        4,
    ),
    "duplicate keys": (b'{"prompt": "a", "prompt": "b", "prompt": 5}\n', 1),
    "byte order marks": (b"\xef\xbb\xbf" * 3 + GOOD + b"\xef\xbb\xbf" + GOOD, 2),
    "truncated UTF-8": (b'{"prompt": "\xe2\x82"}\n{"prompt": "\xf0\x9f"}\n\xff\xfe\xfd\n', 3),
    "overlong UTF-8": (b'{"prompt": "\xc0\x80"}\n', 1),
    "line ends": (b'{"prompt": "a"}\r\n\r{"prompt": "b"}\n\n\n\x0b\n{"prompt": "c"}', 3),
    "other line ends": ('{"prompt": "a"}\u2028{"prompt": "b"}\u0085\n'.encode(), 1),
    "no JSON": (b"\n".join([b"null", b"1", b'"a"', b"[]", b"{", b"}", b"NaN", b"'", b"{]"]), 9),
    "non-finite": (b'{"prompt": "a", "x": NaN, "y": -Infinity, "z": Infinity}\n', 1),
    "wrong types": (
        b'{"prompt": {}}\n{"prompt": []}\n{"prompt": 1e5}\n{"prompt": true}\n'
        b'{"prompt": "a", "sampling_params": "x"}\n{"prompt": "a", "sampling_params": [1]}\n'
        b'{"prompt": "a", "sampling_params": {"max_tokens": 1e999}}\n'
        b'{"prompt": "a", "sampling_params": {"stop": [[[]]]}}\n'
        b'{"prompt": "a", "sampling_params": {"seed": 99999999999999999999999}}\n',
        9,
    ),
    "many columns": (
        json.dumps({"prompt": "a", **{f"column {i}": i for i in range(5000)}}).encode() + b"\n",
        1,
    ),
    "names of ours": (
        b'{"prompt": "a", "row_index": 5, "metrics": {}, "error": 1, "cbatch_extra": 2, '
        b'"cbatch_cbatch_error": 3, "completion": [], "": 4, "PROMPT": 5, "a.b": {"c": 6}}\n',
        1,
    ),
    "changing types": (
        b"".join(
            b'{"prompt": "a", "x": %s}\n' % value
            for value in (b"1", b'"a"', b"[1]", b'{"a": 1}', b"null", b"1.5", b"[[{}]]", b"true")
        ),
        8,
    ),
    "long line": (b'{"prompt": "a", "pad": "' + b"x" * 20_000_000 + b'"}\n', 1),
    "long line of garbage": (b"x" * 20_000_000 + b"\n", 1),
    "long prompt": (b'{"prompt": "' + b"y " * 5_000_000 + b'"}\n', 1),
    "many brackets": (b'{"prompt": "a", "x": "' + b"[" * 3_000_000 + b'"}\n', 1),
    "many escapes": (b'{"prompt": "a", "x": "' + b"\\u00e9" * 1_000_000 + b'"}\n', 1),
}


@pytest.fixture(scope="module")
def endings(tally: Callable[[str], None]) -> Iterator[Counter[str]]:
    counter: Counter[str] = Counter()
    yield counter
    tally(f"fuzz: {counter.total()} cases, {dict(counter)}")


def run_on(
    server: ForkServer, folder: Path, source: Path, endings: Counter[str], kind: str
) -> Outcome:
    """Answer what is in `source`; it must end well, in bounded time and memory."""
    options = {
        "inputs": [str(source)],
        "output": str(folder / "out.parquet"),
        "max_tokens": 2,
        "max_errors": "100%",
        "overwrite": True,
    }
    outcome = server.run(Run(folder=str(folder), options=options))
    endings[f"{kind}: exit code {outcome.exit_code}"] += 1
    return outcome


def check(outcome: Outcome, folder: Path) -> None:
    errors = (folder / "errors.txt").read_text(errors="replace")[-2000:]
    assert not outcome.is_hung, errors
    assert outcome.exit_code in FINE, errors


@pytest.mark.parametrize("name", CORPUS)
@pytest.mark.parametrize("is_first", [True, False], ids=["first", "later"])
def test_the_corpus(
    server: ForkServer, tmp_path: Path, endings: Counter[str], name: str, is_first: bool
) -> None:
    data, num_rows = CORPUS[name]
    if not data.endswith(b"\n"):
        data += b"\n"
    # A good row tells the columns; behind the first rows nothing is known of what comes.
    num_good = 1 if is_first else 1100
    source = tmp_path / "in.jsonl"
    source.write_bytes(data + GOOD if is_first else GOOD * num_good + data)
    idle = server.run(Run(folder=str(tmp_path), options={"inputs": ["/absent"]}))
    outcome = run_on(server, tmp_path, source, endings, "corpus")
    check(outcome, tmp_path)
    assert outcome.peak_bytes - idle.peak_bytes < MAX_ADDED_BYTES
    if name == "long line of garbage" and is_first:
        assert outcome.exit_code == 2, "the columns cannot be told from it"
        return
    assert outcome.exit_code == 0, (tmp_path / "errors.txt").read_text()
    rows = read_rows(tmp_path / "out.parquet")
    is_taken = name == "names of ours" and is_first
    indices = [row["cbatch_row_index" if is_taken else "row_index"] for row in rows]
    assert indices == list(range(num_good + num_rows))


def test_utf16_is_refused(server: ForkServer, tmp_path: Path, endings: Counter[str]) -> None:
    source = tmp_path / "in.jsonl"
    for encoding in ("utf-16", "utf-16-le", "utf-16-be", "utf-32"):
        source.write_bytes((GOOD.decode() * 9).encode(encoding))
        outcome = run_on(server, tmp_path, source, endings, "UTF-16")
        check(outcome, tmp_path)


@pytest.mark.slow
def test_a_line_of_200_megabytes(server: ForkServer, tmp_path: Path, endings: Counter[str]) -> None:
    source = tmp_path / "in.jsonl"
    for prefix in (b'{"prompt": "', b"[", b'{"a":'):
        repeats = 200_000_000 // len(prefix)
        source.write_bytes(GOOD + prefix * repeats + b"\n" + GOOD)
        idle = server.run(Run(folder=str(tmp_path), options={"inputs": ["/absent"]}))
        outcome = run_on(server, tmp_path, source, endings, "200 MB line")
        check(outcome, tmp_path)
        assert outcome.exit_code == 0 and len(read_rows(tmp_path / "out.parquet")) == 3
        assert outcome.peak_bytes - idle.peak_bytes < MAX_ADDED_BYTES


pieces = st.sampled_from(
    [b"{", b"}", b"[", b"]", b'"', b":", b",", b"\\", b"\\u", b"d83d", b"\n", b"\r", b"\x00"]
    + [b'"prompt"', b'"a"', b"null", b"1e9", b"-", b"\xff", b"\xef\xbb\xbf", GOOD, b"\xe2\x80"]
)
hostile = st.lists(pieces | st.binary(max_size=4), max_size=60).map(b"".join)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(first=hostile, later=hostile)
def test_bytes_that_look_like_json(
    server: ForkServer, tmp_path: Path, endings: Counter[str], first: bytes, later: bytes
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(first + b"\n" + GOOD + later)
    outcome = run_on(server, tmp_path, source, endings, "hypothesis")
    check(outcome, tmp_path)
    if outcome.exit_code == 0:
        assert "good" in {row["prompt"] for row in read_rows(tmp_path / "out.parquet")}


def _damage(data: bytes, rng: random.Random) -> bytes:
    match rng.randrange(4):
        case 0:
            return data[: rng.randrange(len(data))]
        case 1:  # the footer, which says where all else is
            size = int.from_bytes(data[-8:-4], "little") + 8
            at = len(data) - 1 - rng.randrange(size)
        case 2:
            start = rng.randrange(len(data))
            return data[:start] + rng.randbytes(rng.randint(1, 64)) + data[start:]
        case _:
            at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]


def _parquet(path: Path) -> bytes:
    rows: list[dict[str, Any]] = [
        {
            "prompt": f"prompt {i}",
            "tags": [str(i)] * (i % 4),
            "nested": {"a": i, "b": [{"c": i / 3}]},
            "flag": i % 2 == 0,
            "data": bytes([i]) * i,
        }
        for i in range(60)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=25, write_page_checksum=True)
    return path.read_bytes()


def _fuzz_parquet(
    server: ForkServer, folder: Path, endings: Counter[str], *, num_cases: int, seed: int
) -> None:
    rng = random.Random(seed)
    source = folder / "in.parquet"
    whole = _parquet(source)
    crashes = []
    for number in range(num_cases):
        source.write_bytes(_damage(whole, rng))
        outcome = run_on(server, folder, source, endings, "Parquet")
        if outcome.exit_code not in FINE or outcome.is_hung:
            crashes.append((number, outcome))
            source.rename(folder / f"crash-{number}.parquet")
    errors = (folder / "errors.txt").read_text(errors="replace")[-2000:]
    assert not crashes, f"{crashes} {errors}"


def test_damaged_parquet(server: ForkServer, tmp_path: Path, endings: Counter[str]) -> None:
    _fuzz_parquet(server, tmp_path, endings, num_cases=150, seed=1)


@pytest.mark.crash_long
def test_much_damaged_parquet(server: ForkServer, tmp_path: Path, endings: Counter[str]) -> None:
    _fuzz_parquet(server, tmp_path, endings, num_cases=1000, seed=2)
