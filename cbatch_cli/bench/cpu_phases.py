"""Where the time of a run goes, and how near each part comes to what the machine allows."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from cbatch_cli.bench.cpu_ceilings import Ceilings
from cbatch_cli.bench.suite import Measurement
from cbatch_cli.bench.timed_kernels import ATTENTION, Call

Phase = Literal["linears", "head", "attention", "elementwise"]
_WITH_ROOFLINE: tuple[Phase, ...] = ("linears", "head", "attention")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfiledRun:
    """A run whose calls were noted one by one. Times are in seconds."""

    calls: Sequence[Call]
    wall_s: float
    sampling_s: float
    vocab_size: int

    def calls_of(self, phase: Phase) -> list[Call]:
        """Those that belong to a phase."""
        return [call for call in self.calls if phase_of(call, self.vocab_size) == phase]

    @property
    def other_s(self) -> float:
        """What is neither in a kernel nor in sampling: Python, and torch's operations."""
        return self.wall_s - self.sampling_s - sum(call.seconds for call in self.calls)


def phase_of(call: Call, vocab_size: int) -> Phase:
    """A product as wide as the vocabulary is the head's."""
    if call.kernel == ATTENTION:
        return "attention"
    if not call.work.num_columns:
        return "elementwise"
    return "head" if call.work.num_columns == vocab_size else "linears"


def least_s(calls: Iterable[Call], ceilings: Ceilings) -> float:
    """The time of calls at the ceilings: in each step what takes longer, computing or reading."""
    computing, reading = defaultdict[int, float](float), defaultdict[int, float](float)
    for call in calls:
        computing[call.step] += call.work.flops / ceilings.flops(call.work.precision)
        reading[call.step] += call.work.num_bytes / ceilings.read_bytes
    return sum(max(seconds, reading[step]) for step, seconds in computing.items())


def as_one_pass(calls: Iterable[Call]) -> Iterator[Call]:
    """The work of a pass whose last layer computes only the rows that sample."""
    for call in calls:
        yield call if call.sampled is None else dataclasses.replace(call, work=call.sampled)


def in_float32(calls: Iterable[Call]) -> Iterator[Call]:
    """The same work with every logit computed in float32, as other engines do."""
    for call in calls:
        if call.work.precision != "float32":
            float32_bytes = 4 * call.work.depth * call.work.num_columns
            num_bytes = float32_bytes if call.work.num_bytes else 0
            work = dataclasses.replace(call.work, precision="float32", num_bytes=num_bytes)
            call = dataclasses.replace(call, work=work)
        yield call


def phase_measurements(run: ProfiledRun, ceilings: Ceilings) -> Iterator[Measurement]:
    """Shares of the wall time, which add up to 1; rates, and shares of the roofline."""
    for phase in (*_WITH_ROOFLINE, "elementwise"):
        calls = run.calls_of(phase)
        seconds = sum(call.seconds for call in calls)
        yield Measurement(name=phase, value=seconds / run.wall_s, unit="%", note=f"{seconds:.2f} s")
        if phase in _WITH_ROOFLINE and seconds:
            rate = sum(call.work.flops for call in calls) / seconds
            read = sum(call.work.num_bytes for call in calls) / seconds
            yield Measurement(name=f"{phase}, rate", value=rate / 1e9, unit="GFLOP/s")
            yield Measurement(name=f"{phase}, reading", value=read / 1e9, unit="GB/s")
            yield Measurement(
                name=f"{phase}, of the roofline", value=least_s(calls, ceilings) / seconds, unit="%"
            )
    for name, seconds in (("sampling", run.sampling_s), ("Python and the rest", run.other_s)):
        yield Measurement(name=name, value=seconds / run.wall_s, unit="%", note=f"{seconds:.2f} s")


def roofline_measurements(
    calls: Sequence[Call], ceilings: Ceilings, *, wall_s: float, is_float32: bool
) -> Iterator[Measurement]:
    """The least time of all products and attention beside `wall_s`, the time of a run of them."""
    least = least_s(calls, ceilings)
    yield Measurement(name="least time", value=least, unit="s")
    yield Measurement(name="share of the roofline", value=least / wall_s, unit="%")
    if is_float32 and any(call.work.precision != "float32" for call in calls):
        least = least_s(in_float32(calls), ceilings)
        note = "no 8-bit product bounds them first"
        yield Measurement(name="least time, all logits in float32", value=least, unit="s")
        yield Measurement(name="share of that roofline", value=least / wall_s, unit="%", note=note)
