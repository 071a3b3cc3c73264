"""Where the time of a request goes at a router: stages, log lines with their trace, and spans."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from quire.cluster import tracing
from quire.cluster.bodies import InstanceReady, SequenceJob
from quire.cluster.members import Health, Member
from quire.cluster.messages import Attempt, Cancel, Failed, FirstTokenInfo, HandedOver, Token
from quire.cluster.router import Router
from quire.cluster.stages import BOUNDS, STAGES, Stages, StageTimes
from quire.cluster.tracing import TraceContext, Tracer, TraceSpan, read_traceparent, trace_of
from quire.engine.outputs import CompletionOutput
from tests.clusters import LIMITS

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Tracers(Tracer):
    """Keeps what it should export."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def record(self, *told: Any) -> None:
        self.told.append(told)


class Harness:
    """A router with two instances that a test speaks for."""

    def __init__(self, tries: int = 3) -> None:
        self.clock, self.tracer = Clock(), Tracers()
        self.sent: list[tuple[str, Any]] = []
        self.answers: list[Any] = []
        self.router = Router(
            lambda to, message: self.sent.append((to, message)), timeout=60, tries=tries, clock=self.clock,
            tracer=self.tracer,
        )  # fmt: skip
        for role in ("prefill", "decode"):
            ready = InstanceReady(f"{role}-0.1", "", 64, 8, LIMITS, 1e-3, 1e-2)
            self.router.members[ready.instance] = Member(ready.instance, f"{role}-0", role, Health.SERVING, ready)
        trace = TraceContext(TRACE, PARENT)
        job = SequenceJob("chatcmpl-1", list(range(100)), {}, {}, 0, trace=trace.trace_id)
        self.request = self.router.begin(job, self.answers.append, trace)

    def after(self, seconds: float, message: Any) -> None:
        self.clock.now += seconds
        self.router.handle(message)

    @property
    def attempt(self) -> Attempt:
        return self.request.state.attempt

    def token(self, position: int, is_last: bool = False, seconds: float | None = None) -> Token:
        first = None if seconds is None else FirstTokenInfo(None, 0, {}, None, None, seconds)
        return Token(self.attempt, CompletionOutput(0, "x", [7], None), position, is_last, first)


@pytest.fixture(autouse=True)
def level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "quire")


def test_the_time_of_a_request_is_divided_into_its_stages(caplog: pytest.LogCaptureFixture) -> None:
    harness = Harness()
    harness.after(3.0, harness.token(0, seconds=1.25))
    harness.after(0.5, HandedOver(harness.attempt))
    harness.after(0.25, HandedOver(harness.attempt))  # told twice
    harness.after(1.75, harness.token(1))
    harness.after(2.0, harness.token(2, is_last=True))
    (found,) = harness.router.times.last
    assert found == Stages(queue=1.75, prefill=1.25, transfer=0.5, decode=4.0)
    begun, taken, ended = (record.getMessage() for record in caplog.records)
    name = f"request chatcmpl-1 of trace {TRACE}, attempt 1"
    assert begun == f"{name}: prefill-0.1 computes 100 rows, decode-0.1 decodes"
    assert taken == f"{name}: decode-0.1 has the cache of prefill-0.1"
    times = "queue 1.750 s, prefill 1.250 s, transfer 0.500 s, decode 4.000 s"
    assert ended == f"{name} on prefill-0.1 and decode-0.1: ended after 3 tokens ({times})"
    ((trace, whole, spans, facts, error),) = harness.tracer.told
    assert trace == TraceContext(TRACE, PARENT) and error == "" and whole == TraceSpan("request", 100.0, 107.5, "")
    assert [each.instance for each in spans] == ["prefill-0.1"] * 2 + ["decode-0.1"] * 2
    assert [each.ended for each in spans] == [101.75, 103.0, 103.5, 107.5]
    assert facts["quire.tokens"] == 3 and facts["quire.attempts"] == 1


def test_a_failed_attempt_is_in_the_queue_of_the_next_one_and_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    harness = Harness(tries=2)

    async def scenario() -> None:
        harness.after(2.0, Failed(harness.attempt, "no room"))
        harness.router.tick()
        harness.after(1.0, harness.token(0, is_last=True, seconds=0.25))

    asyncio.run(scenario())
    (found,) = harness.router.times.last
    assert found == Stages(queue=2.75, prefill=0.25, transfer=0.0, decode=0.0)
    (warning,) = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert f"trace {TRACE}, attempt 1 on prefill-0.1 and decode-0.1: no room; 0 tokens" in warning.getMessage()


def test_a_request_that_failed_is_a_span_with_an_error_and_no_stage(caplog: pytest.LogCaptureFixture) -> None:
    harness = Harness(tries=1)
    harness.after(2.0, Failed(harness.attempt, "no room"))
    assert not harness.router.times.last and isinstance(harness.answers[-1], Exception)
    (trace, _, spans, _, error) = harness.tracer.told[0]
    assert trace.trace_id == TRACE and spans == [] and "no room" in error
    last = caplog.records[-1]
    assert last.levelno == logging.WARNING and TRACE in last.getMessage() and "no token" in last.getMessage()


def test_an_aborted_request_has_no_stages(caplog: pytest.LogCaptureFixture) -> None:
    harness = Harness()
    harness.after(1.0, harness.token(0, seconds=0.5))
    harness.router.abort(harness.request)
    assert not harness.router.times.last and harness.tracer.told[0][-1] == "aborted"
    assert "aborted after 1 tokens" in caplog.records[-1].getMessage()


def test_a_source_has_a_part_until_its_receiver_has_the_cache() -> None:
    harness = Harness()
    harness.after(1.0, harness.token(0, seconds=0.5))
    assert harness.router.num_attempts("prefill-0.1") == harness.router.num_attempts("decode-0.1") == 1
    harness.after(1.0, HandedOver(harness.attempt))
    assert (harness.router.num_attempts("prefill-0.1"), harness.router.num_attempts("decode-0.1")) == (0, 1)
    harness.after(1.0, harness.token(1, is_last=True))
    assert harness.router.num_attempts("decode-0.1") == 0


def test_a_router_that_closes_ends_every_request_with_an_error() -> None:
    harness = Harness()
    error = RuntimeError("closed")
    harness.router.close(error)
    assert harness.answers == [error] and harness.request.is_over and not harness.router.num_waiting
    assert not [each for each in harness.sent if isinstance(each[1], Cancel)], "nobody is left to tell"


def test_stages_are_counted_up_to_each_bound() -> None:
    times = StageTimes()
    assert times.quantiles() == {name: {} for name in STAGES}
    for seconds in (0.001, 0.002, 0.3, 1000.0):
        times.add(Stages(seconds, 0.0, 0.0, 0.0))
    found = times.histograms()["queue"]
    assert dict(zip((*BOUNDS, "inf"), found["counts"], strict=True)) == {
        each: 1 if each < 0.0025 else 2 if each < 0.5 else 3 for each in BOUNDS
    } | {"inf": 4}
    assert found["sum"] == 1000.303
    assert times.quantiles()["queue"] == {"p50": 0.3, "p90": 1000.0, "p99": 1000.0}


# ---- traces ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "header",
    [
        None, "", "00", f"00-{TRACE}-{PARENT}", f"00-{TRACE}-{PARENT}-01-more", f"ff-{TRACE}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01", f"00-{TRACE}-{'0' * 16}-01", f"00-{TRACE.upper()}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-1\n",
    ],
)  # fmt: skip
def test_a_malformed_header_is_as_none(header: str | None) -> None:
    assert read_traceparent(header) is None


def test_a_header_has_the_trace_and_whether_it_is_sampled() -> None:
    assert read_traceparent(f" 00-{TRACE}-{PARENT}-01 ") == TraceContext(TRACE, PARENT, True)
    assert read_traceparent(f"00-{TRACE}-{PARENT}-00") == TraceContext(TRACE, PARENT, False)
    assert read_traceparent(f"01-{TRACE}-{PARENT}-03-later") == TraceContext(TRACE, PARENT, True)


def test_without_a_header_the_trace_is_in_the_request_id() -> None:
    assert trace_of(f"chatcmpl-{TRACE}-0") == TraceContext(TRACE)
    assert len(trace_of("request-3").trace_id) == 32
    job = SequenceJob(f"chatcmpl-{TRACE}-0", [], {}, {}, 0, trace=TRACE)
    assert job.described(2) == f"request chatcmpl-{TRACE}-0, attempt 2", "not twice"


def test_spans_are_exported_with_the_trace_of_the_client_or_of_the_request() -> None:
    pytest.importorskip(
        "opentelemetry.sdk", reason="opentelemetry-sdk is not installed: pip install -c constraints.txt '.[trace]'"
    )
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    found = Tracer(SimpleSpanProcessor(exporter))
    stages = [TraceSpan("queue", 1.0, 2.0, "prefill-0.1"), TraceSpan("decode", 2.0, 4.5, "decode-0.1")]
    whole = TraceSpan("request", 1.0, 4.5, "")
    found.record(TraceContext(TRACE, PARENT), whole, stages, {"quire.tokens": 3})
    found.record(TraceContext("1" * 32), whole, stages[:1], {}, "no instance")
    found.record(TraceContext("2" * 32, PARENT, is_sampled=False), whole, stages, {})
    queue, decode, root, own_queue, own = exporter.get_finished_spans()
    assert [each.name for each in (queue, decode, root)] == ["queue", "decode", "request"]
    assert all(each.context.trace_id == int(TRACE, 16) for each in (queue, decode, root))
    assert root.parent.span_id == int(PARENT, 16) and queue.parent.span_id == root.context.span_id
    assert decode.end_time - decode.start_time == 2_500_000_000 and root.attributes["quire.tokens"] == 3
    assert decode.attributes["quire.instance"] == "decode-0.1" and decode.resource.attributes["service.name"] == "quire"
    assert own.parent is None and own.context.trace_id == own_queue.context.trace_id == int("1" * 32, 16)
    assert own.status.description == "no instance" and root.status.is_ok
    found.close()


def test_spans_are_exported_only_if_an_endpoint_is_set(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv(tracing.ENDPOINT, raising=False)
    assert tracing.tracer() is None and not caplog.records
    monkeypatch.setenv(tracing.ENDPOINT, "http://127.0.0.1:9")
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    assert tracing.tracer() is None
    assert "pip install -c constraints.txt '.[trace]'" in caplog.records[0].getMessage()
