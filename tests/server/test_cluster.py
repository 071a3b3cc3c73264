"""/v1/cluster, `quire cluster`, and the metrics of instances, against an engine that has them on paper."""

import asyncio
import copy
import json
from typing import get_args, get_type_hints

import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.cli import main
from quire.cluster.members import ROLES, Health
from quire.cluster.stages import Stages, StageTimes
from quire.errors import ConfigError, EngineStoppedError, InstancesFailedError, ModelError, RequestError
from quire.server import shapes
from quire.server.cluster_schema import RoleRequest
from tests.cli.test_tree import served
from tests.server.fake_engine import FakeEngine
from tests.server.harness import TEXT, RawCall, application, client, error_of, events
from tests.server.test_shapes import check

pytestmark = pytest.mark.anyio

LOAD = {
    "instance": "prefill-0.1", "prompt_rows": 512, "num_running": 2, "num_waiting": 3, "num_held": 4,
    "free_bytes": 1 << 29, "total_bytes": 1 << 30, "stats": None,
}  # fmt: skip
READY = {
    "place": "prefill-0", "name": "prefill-0.1", "role": "prefill", "health": "serving", "pid": 17, "cores": [0, 1],
    "attempts": 5, "prompt_rows": 256, "seconds_per_row": 0.0005, "batch": 8, "seconds_per_step": 0.0125,
    "cache_bytes": 1 << 30, "load": LOAD,
}  # fmt: skip
DOWN = {
    "place": "decode-0", "name": "", "role": "decode", "health": "down", "pid": None, "cores": [], "attempts": 0,
    "prompt_rows": None, "seconds_per_row": None, "batch": None, "seconds_per_step": None, "cache_bytes": None,
    "load": None,
}  # fmt: skip


class FakeOperations:
    """Two instances, one of which is down.

    done    what was asked of them
    gate    a drain, restart or switch ends once it is set
    error   which it then raises
    placed  the placement, the switch and replanning
    """

    def __init__(self):
        self.done, self.gate, self.error = [], asyncio.Event(), None
        self.turn = asyncio.Lock()  # as a cluster's operations have one
        self.gate.set()
        self.times = StageTimes()
        self.times.add(Stages(0.2, 0.5, 0.004, 2.0))
        self.instances = [copy.deepcopy(READY), copy.deepcopy(DOWN)]
        self.placed = {"placement": None, "switch": None, "replanning": None}

    def state(self):
        return {
            "instances": self.instances,
            "counts": {"attempts": 7, "again": 1},
            "stages": self.times.quantiles(),
            **self.placed,
        }

    async def drain(self, place, *, restart=True):
        await self._do("drain", place, restart)

    async def restart(self):
        await self._do("restart")

    async def _do(self, *what):
        async with self.turn:
            self.done.append(("begins", *what))
            await self.gate.wait()
            if self.error is not None:
                raise self.error
            self.done.append(what)

    async def switch(self, placement, *, may_pause=False):
        await self._do("place", *((each.role, each.count, each.options) for each in placement.instances), may_pause)

    def set_role(self, place, role):
        self.done.append(("role", place, role))


PLACEMENT = {
    "version": 1,
    "instances": [{"role": "mixed", "count": 2, "tp": 1, "pp": 1, "options": {"cache.memory": "1GiB"}}],
    "predicted": {"rate": 3.5, "cost": 2.0, "unit": "GPU", "rate_per_unit": 1.75, "attainment": 0.95},
}  # fmt: skip
PLACED = {"name": "plan.json", "rate": 3.5, "cost": 2.0, "unit": "GPU", "attainment": 0.95}
UNDER_WAY = {"to": "plan.json", "num_all": 5, "num_done": 2, "now": "end prefill-0", "error": ""}


def engine():
    found = FakeEngine()
    found.operations = FakeOperations()
    found.moved = {
        "cluster": {**found.operations.state(), "histograms": found.operations.times.histograms()},
    }
    return found


# ---- endpoints -------------------------------------------------------------------------------------------------------


async def test_the_state_of_instances_has_its_shape():
    async with client(engine()) as http:
        found = (await http.get("/v1/cluster")).json()
    check(shapes.ClusterInfo, found)
    ready, down = found["instances"]
    assert ready["saturating_rows"] == 256 and ready["load"]["queued_rows"] == 512
    assert down["health"] == "down" and down["load"] is None
    assert found["stages"]["queue"] == {"p50": 0.2, "p90": 0.2, "p99": 0.2}


def test_the_document_knows_every_health_and_every_role():
    hints = get_type_hints(shapes.InstanceInfo)
    assert get_args(hints["health"]) == tuple(each.value for each in Health)
    assert get_args(hints["role"]) == ROLES
    assert RoleRequest.model_json_schema()["properties"]["role"]["enum"] == list(ROLES)


CHANGES = [
    ("drain", {"instance": "prefill-0"}, ("drain", "prefill-0", True)),
    ("drain", {"instance": "prefill-0", "restart": False}, ("drain", "prefill-0", False)),
    ("drain", {"instance": "decode-0", "restart": None}, ("drain", "decode-0", True)),
    ("restart", {}, ("restart",)),
    ("role", {"instance": "prefill-0", "role": "mixed"}, ("role", "prefill-0", "mixed")),
    ("placement", PLACEMENT, ("place", ("mixed", 2, {"cache.memory": "1GiB"}), False)),
    ("placement?pause=true", PLACEMENT, ("place", ("mixed", 2, {"cache.memory": "1GiB"}), True)),
]


@pytest.mark.parametrize(("action", "body", "done"), CHANGES)
async def test_an_operator_changes_instances(action, body, done):
    async with client(fake := engine()) as http:
        answer = await http.post(f"/v1/cluster/{action}", json=body)
        assert answer.status_code == 200, answer.text
        check(shapes.ClusterInfo, answer.json())
    assert fake.operations.done[-1] == done


@pytest.mark.parametrize(("action", "body", "done"), CHANGES)
async def test_one_engine_has_no_instances(action, body, done):
    async with client() as http:
        for answer in (await http.get("/v1/cluster"), await http.post(f"/v1/cluster/{action}", json=body)):
            assert answer.status_code == 404 and error_of(answer)["code"] == "no_cluster"


async def test_what_is_not_there_or_not_possible_is_refused_by_name():
    async with client(fake := engine()) as http:
        for action, body, status, code, param in (
            ("drain", {"instance": "prefill-9"}, 404, "instance_not_found", "instance"),
            ("role", {"instance": "prefill-9", "role": "mixed"}, 404, "instance_not_found", "instance"),
            ("role", {"instance": "prefill-0", "role": "king"}, 400, "unsupported_value", "role"),
            ("role", {"instance": "prefill-0"}, 400, "missing_required_parameter", "role"),
            ("drain", {}, 400, "missing_required_parameter", "instance"),
            ("drain", {"instance": "p" * 65}, 400, "invalid_type", "instance"),
            ("restart", {"instance": "prefill-0"}, 400, "unknown_parameter", "instance"),
            ("placement", {}, 400, "missing_required_parameter", "version"),
            ("placement", PLACEMENT | {"instance": "prefill-0"}, 400, "unknown_parameter", "instance"),
            ("placement", PLACEMENT | {"version": 2}, 400, "invalid_value", None),
            ("placement", PLACEMENT | {"instances": [{"role": "king", "count": 1}]}, 400, "invalid_value", None),
            ("placement?pause=maybe", PLACEMENT, 400, "invalid_value", "pause"),
            ("placement?wait=true", PLACEMENT, 400, "unknown_parameter", "wait"),
        ):
            answer = await http.post(f"/v1/cluster/{action}", json=body)
            error = error_of(answer)
            assert answer.status_code == status and error["param"] == param, answer.text
            assert error["code"] in (code, "invalid_value"), answer.text
        assert fake.operations.done == []
        text = await http.post("/v1/cluster/restart", content="{}", headers={"content-type": "text/plain"})
        assert text.status_code == 400, "a page in a browser could send it"
        fake.operations.error = RequestError("it is the only one", "restart")
        answer = await http.post("/v1/cluster/drain", json={"instance": "prefill-0", "restart": False})
        assert answer.status_code == 400 and error_of(answer)["param"] == "restart"
        fake.operations.error = ModelError("instance prefill-0.2 did not start")
        for action, body in (("restart", {}), ("placement", PLACEMENT)):
            answer = await http.post(f"/v1/cluster/{action}", json=body)
            assert answer.status_code == 503 and error_of(answer)["code"] == "instance_failed"
        fake.operations.error = ConfigError("the placement needs a pause")
        answer = await http.post("/v1/cluster/placement", json=PLACEMENT)
        assert answer.status_code == 400 and error_of(answer)["message"] == "the placement needs a pause"


async def test_on_a_public_server_without_keys_instances_are_shown_and_not_changed():
    async with client(fake := engine(), allow_public=True, host="0.0.0.0") as http:
        assert (await http.get("/v1/cluster")).status_code == 200
        for action, body, _ in CHANGES:
            answer = await http.post(f"/v1/cluster/{action}", json=body)
            assert answer.status_code == 403 and error_of(answer)["code"] == "operators_only"
    assert fake.operations.done == []


async def test_a_drain_goes_on_without_its_client_and_the_next_one_waits():
    app = application(fake := engine())
    operations = fake.operations
    operations.gate.clear()
    first = RawCall(app, "/v1/cluster/drain", {"instance": "prefill-0"})
    while not operations.done:
        await asyncio.sleep(0.001)
    second = RawCall(app, "/v1/cluster/drain", {"instance": "decode-0"})
    first.leave()
    await first.task
    assert first.status is None and operations.done == [("begins", "drain", "prefill-0", True)]
    operations.gate.set()
    await asyncio.wait_for(second.task, 5)
    assert second.status == 200
    assert operations.done[1:3] == [("drain", "prefill-0", True), ("begins", "drain", "decode-0", True)]


async def test_a_second_switch_is_refused_until_the_first_one_has_ended():
    app = application(fake := engine())
    operations = fake.operations
    operations.gate.clear()
    drain = RawCall(app, "/v1/cluster/drain", {"instance": "prefill-0"})
    while not operations.done:
        await asyncio.sleep(0.001)
    first = RawCall(app, "/v1/cluster/placement", PLACEMENT)
    for _ in range(20):
        await asyncio.sleep(0.001)
    for path, body in (("placement", PLACEMENT), ("role", {"instance": "prefill-0", "role": "mixed"})):
        refused = RawCall(app, f"/v1/cluster/{path}", body)
        await refused.task
        assert refused.status == 409 and json.loads(refused.body)["error"]["code"] == "switch_under_way"
    first.leave()
    await first.task
    operations.gate.set()
    await asyncio.wait_for(drain.task, 5)
    while operations.done[-1][0] != "place":
        await asyncio.sleep(0.001)
    operations.error = ModelError("an instance did not start")
    for _ in range(2):
        failed = RawCall(app, "/v1/cluster/placement", PLACEMENT)
        await failed.task
        assert failed.status == 503, "nothing is under way after a failure"


# ---- errors ----------------------------------------------------------------------------------------------------------


class FailingEngine(FakeEngine):
    """Every request fails with `error` after `num_tokens`."""

    def __init__(self, error, num_tokens=0):
        super().__init__()
        self.error, self.num_tokens = error, num_tokens

    async def _generate(self, ids, params, request_id):
        count = 0
        async for item in super()._generate(ids, params, request_id):
            if count == self.num_tokens:
                raise self.error
            count += 1
            yield item


FAILED = InstancesFailedError("the request failed after 4 attempts: decode-0.1 is down")
STOPPED = EngineStoppedError("the cluster is closed")


@pytest.mark.parametrize(
    ("error", "draining", "code", "message"),
    [
        (FAILED, False, "instances_failed", str(FAILED)),
        (STOPPED, False, "not_ready", "the engine is not running"),
        (STOPPED, True, "shutting_down", "the server is shutting down"),
    ],
)
async def test_failed_instances_and_a_closed_cluster_are_503(error, draining, code, message):
    app = application(failing := FailingEngine(error))
    calls = [RawCall(app, "/v1/completions", TEXT | {"stream": stream}) for stream in (False, True)]
    while failing.started < 2:
        await asyncio.sleep(0)
    app.state.service.draining = draining
    for call in calls:
        await call.task
        found = json.loads(call.body)["error"]
        assert (call.status, found["code"], found["message"]) == (503, code, message)
    assert app.state.service.num_cut_off == 2 * draining


async def test_in_a_stream_that_has_begun_the_failure_is_its_last_event():
    async with client(FailingEngine(FAILED, num_tokens=2)) as http:
        text = (await http.post("/v1/completions", json=TEXT | {"stream": True})).text
    assert "[DONE]" not in text
    *tokens, last = [json.loads(part.removeprefix("data: ")) for part in text.split("\n\n") if part]
    assert len(tokens) == 2 and last["error"]["code"] == "instances_failed"
    assert last["error"]["message"] == str(FAILED)


# ---- metrics ---------------------------------------------------------------------------------------------------------


async def test_metrics_tell_what_instances_do_and_how_long_stages_take():
    async with client() as http:
        assert "quire_instance" not in (await http.get("/metrics")).text
    async with client(engine()) as http:
        text = (await http.get("/metrics")).text
    values = {
        (sample.name, *(sample.labels[name] for name in sorted(sample.labels, reverse=True))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    for name, value in (
        ("up", 1), ("attempts", 5), ("requests_running", 2), ("requests_waiting", 3), ("requests_held", 4),
        ("prompt_rows_queued", 512), ("cache_free_bytes", 1 << 29), ("cache_capacity_bytes", 1 << 30),
    ):  # fmt: skip
        assert values[f"quire_instance_{name}", "prefill-0"] == value, name
    assert values["quire_instance_up", "decode-0"] == 0
    assert ("quire_instance_requests_running", "decode-0") not in values
    assert values["quire_instance_role", "decode", "decode-0"] == 1
    assert values["quire_cluster_attempts_total",] == 7 and values["quire_cluster_failed_attempts_total",] == 1
    assert values["quire_cluster_requests_failed_total",] == 0
    for stage, seconds in (("queue", 0.2), ("prefill", 0.5), ("transfer", 0.004), ("decode", 2.0)):
        assert values["quire_stage_seconds_sum", stage] == seconds
        assert values["quire_stage_seconds_count", stage] == 1
        assert values["quire_stage_seconds_bucket", stage, "+Inf"] == 1
    assert values["quire_stage_seconds_bucket", "prefill", "0.5"] == 1
    assert values["quire_stage_seconds_bucket", "prefill", "0.25"] == 0


# ---- traces ----------------------------------------------------------------------------------------------------------

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


async def test_the_trace_of_a_client_reaches_the_engine_and_no_other_request():
    from quire.cluster.tracing import trace_of

    seen = []

    class Tracing(FakeEngine):
        async def _generate(self, ids, params, request_id):
            seen.append((trace_of(request_id), request_id))
            async for item in super()._generate(ids, params, request_id):
                yield item

    headers = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
    async with client(Tracing()) as http:
        body = {"prompt": ["a", "b"], "max_tokens": 2}
        await http.post("/v1/completions", json=body, headers=headers)
        streamed = await http.post("/v1/completions", json=body | {"stream": True}, headers=headers)
        assert events(streamed.text)
        await http.post("/v1/completions", json=body)
    assert [each.trace_id for each, _ in seen[:4]] == [TRACE] * 4
    assert all(each.parent == "00f067aa0ba902b7" for each, _ in seen[:4])
    own = {each.trace_id for each, _ in seen[4:]}
    assert len(own) == 1 and all(own.copy().pop() in name for _, name in seen[4:]), "an id of the server's own"


# ---- quire cluster ---------------------------------------------------------------------------------------------------


async def cluster(*words):
    return await asyncio.to_thread(main, ["cluster", *words])


async def test_the_status_is_a_table_of_instances_and_one_of_stages(capsys):
    async with served(engine()) as url:
        for address in (url, f"{url}/v1/cluster", f"{url}/v1/"):
            assert await cluster("status", "--url", address) == 0
            lines = [line.split() for line in capsys.readouterr().out.splitlines()]
            assert lines[0] == "instance role health pid L_m batch running waiting held cache free of attempts".split()
            assert lines[1] == "prefill-0 prefill serving 17 256 8 2 3 4 512MiB 1GiB 5".split()
            assert lines[2] == "decode-0 decode down - - - - - - - - 0".split()
            assert ["stage", "p50", "p90", "p99"] in lines
            assert "transfer 4.0 ms 4.0 ms 4.0 ms".split() in lines and "decode 2.00 s 2.00 s 2.00 s".split() in lines
            assert lines[-1] == "attempts 7, again 1".split()
        assert await cluster("status", "--url", url, "--json") == 0
        check(shapes.ClusterInfo, json.loads(capsys.readouterr().out))


async def test_the_status_tells_the_placement_and_a_switch(capsys):
    async with served(fake := engine()) as url:
        quiet = {"phase": "quiet", "reason": "", "searches": 3, "switches": 1, "failed": 0}
        changed = quiet | {"phase": "suspect", "reason": "prompt tokens 200 -> 2e+03"}
        for placed, switch, plan, lines in (
            (PLACED, None, quiet, [
                "placement plan.json: 3.5 requests/s predicted on 2 GPUs, 95.0% within the latency targets",
                "replanning quiet (searches 3, switches 1, failed 0)",
            ]),
            (None, UNDER_WAY, None, [
                "a switch to plan.json is under way: 2 of 5 actions are done, now: end prefill-0"
            ]),
            (None, UNDER_WAY | {"now": "", "error": "it ended after 2 of 5"}, changed, [
                "it ended after 2 of 5",
                "replanning suspect: prompt tokens 200 -> 2e+03 (searches 3, switches 1, failed 0)",
            ]),
            (None, None, None, []),
        ):  # fmt: skip
            fake.operations.placed = {"placement": placed, "switch": switch, "replanning": plan}
            assert await cluster("status", "--url", url) == 0
            out = capsys.readouterr().out.splitlines()
            told = ("plan.json", "it ended", "replanning")
            assert [line for line in out if any(each in line for each in told)] == lines
            assert await cluster("status", "--url", url, "--json") == 0
            check(shapes.ClusterInfo, json.loads(capsys.readouterr().out))


async def test_the_command_sends_a_file_of_instances(capsys, tmp_path):
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(PLACEMENT))
    async with served(fake := engine()) as url:
        for pause in ([], ["--pause"]):
            assert await cluster("place", str(file), *pause, "--url", url) == 0
            assert fake.operations.done[-1] == ("place", ("mixed", 2, {"cache.memory": "1GiB"}), bool(pause))
            told = f"the cluster has the placement of {file}: prefill-0 (prefill), decode-0 (decode)\n"
            assert capsys.readouterr().out == told
        for words, reason in (
            (("place",), "quire cluster place takes one FILE, but got none"),
            (("place", str(tmp_path / "none")), "not a file that can be read"),
            (("restart", "--pause"), "--pause is for quire cluster place"),
            (("place", str(file), "--remove"), "--remove is for quire cluster drain"),
        ):
            assert await cluster(*words, "--url", url) == 2
            assert reason in capsys.readouterr().err
    assert len(fake.operations.done) == 4


@pytest.mark.parametrize(
    ("words", "done", "printed"),
    [
        (("drain", "prefill-0"), ("drain", "prefill-0", True), "prefill-0 is prefill-0.1 now\n"),
        (("drain", "--remove", "prefill-0"), ("drain", "prefill-0", False), "prefill-0 has ended\n"),
        (("role", "prefill-0", "mixed"), ("role", "prefill-0", "mixed"), "the role of prefill-0 is mixed\n"),
        (("restart",), ("restart",), "restarted: prefill-0.1\n"),
    ],
)
async def test_the_command_changes_instances(capsys, words, done, printed):
    async with served(fake := engine()) as url:
        assert await cluster(*words, "--url", url) == 0
        assert capsys.readouterr().out == printed
        assert await cluster(words[0], "--url", url, *words[1:], "--json") == 0
        check(shapes.ClusterInfo, json.loads(capsys.readouterr().out))
    assert [each for each in fake.operations.done if each[0] != "begins"] == [done, done]


async def test_the_command_passes_refusals_on_in_one_line(capsys, tmp_path, monkeypatch):
    async with served(engine()) as url:
        assert await cluster("drain", "king-0", "--url", url) == 2
        error = f"quire: {url} refuses (404): there is no instance 'king-0'; there are prefill-0, decode-0\n"
        assert capsys.readouterr().err == error
    async with served(FakeEngine()) as url:
        assert await cluster("status", "--url", url) == 2
        assert "this server has one engine and no cluster" in capsys.readouterr().err
    (tmp_path / "keys").write_text("secret\n")
    async with served(engine(), api_key_file=str(tmp_path / "keys")) as url:
        assert await cluster("status", "--url", url) == 2
        assert "needs an API key" in capsys.readouterr().err
        monkeypatch.setenv("QUIRE_API_KEY", "secret")
        assert await cluster("status", "--url", url) == 0
