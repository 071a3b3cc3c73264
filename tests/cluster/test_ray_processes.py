"""Instances on Ray: through one head, whose processes the tests start and stop."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from quire.cluster.ray_processes import check_head, find_token
from quire.errors import ConfigError, ModelError

from ..clusters import RunningCluster
from ..effort import full_only
from ..ray_cluster import (
    LONG,
    MARK,
    OPTIONS,
    PARAMS,
    PROMPTS,
    TOKEN,
    Head,
    command_of,
    environment,
    free_port,
    instance,
    marked,
    on_ray,
    parent_of,
    places,
    serves_anew,
    shared_memory,
    tokens,
    until,
)

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="needs Ray: pip install -c constraints.txt 'ray[default]'"
    ),
]
whole = full_only("it starts Ray")


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    before = shared_memory()
    started = Head(cores=6)
    try:
        with environment(started.environment):
            yield started
    finally:
        started.stop()
    assert shared_memory() <= before


@pytest.fixture(scope="module")
def running(head: Head, model: Path) -> Iterator[RunningCluster]:
    """An instance that computes prompts and one that decodes."""
    with on_ray(head.address, model, prefill=1, decode=1, cores=2) as started:
        yield started


def settled(head: Head) -> list[int]:
    """The actors, once those of earlier tests have ended: at most two are left."""
    until(lambda: len(head.actors()) in (0, 2), "earlier actors have ended")
    return head.actors()


async def kill_while(running: RunningCluster, place: str, number: int) -> list[int]:
    """The tokens of a long request whose instance gets a signal after some of them."""
    found: list[int] = []
    async for delta in running.cluster.generate(PROMPTS[1], LONG):
        found += delta.outputs[0].token_ids
        if number and len(found) >= 20:
            os.kill(instance(running, place)["pid"], number)
            number = 0
    return found


# ---- without a cluster -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def answering(token: str | None) -> Iterator[str]:
    """A server that answers like a head: to those with the token, or without one to everybody."""
    import grpc

    def check(request: bytes, context: Any) -> bytes:
        headers = dict(context.invocation_metadata())
        if token is not None and headers.get("authorization") != f"Bearer {token}":
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")
        return b""

    handler = grpc.method_handlers_generic_handler(
        "ray.rpc.NodeInfoGcsService", {"CheckAlive": grpc.unary_unary_rpc_method_handler(check)}
    )
    server = grpc.server(ThreadPoolExecutor(2), handlers=[handler])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


def test_a_head_with_our_token_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "ours")
    with answering("ours") as address:
        check_head(address)


def test_a_head_that_serves_everybody_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "ours")
    with answering(None) as address, pytest.raises(ConfigError, match="whatever anyone sends.*RAY_AUTH_MODE=token"):
        check_head(address)


def test_a_head_with_another_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "ours")
    with answering("theirs") as address, pytest.raises(ConfigError, match="has another token"):
        check_head(address)


def test_a_head_that_is_not_there_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "ours")
    begun = time.monotonic()
    with pytest.raises(ConfigError, match="no head of a Ray cluster answers at 127.0.0.1:"):
        check_head(f"127.0.0.1:{free_port()}")
    assert time.monotonic() - begun < 2


def test_without_a_token_nobody_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="no token .* RAY_AUTH_TOKEN_PATH"):
        check_head("127.0.0.1:1")


def test_a_token_is_found_where_ray_finds_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_token() == ""
    for found, place in (("home", tmp_path / ".ray" / "auth_token"), ("file", tmp_path / "token")):
        place.parent.mkdir(exist_ok=True)
        place.write_text(f"{found}\n")
        if found == "file":
            monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(place))
        assert find_token() == found
    monkeypatch.setenv("RAY_AUTH_TOKEN", "variable")
    assert find_token() == "variable"


def test_a_ray_without_tokens_is_refused(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(ConfigError, match="set RAY_AUTH_MODE=token"):
        on_ray("127.0.0.1:1", model, mixed=1)


def test_a_wrong_address_ends_the_start_at_once(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(ConfigError, match="no head of a Ray cluster answers at .*Connection refused"):
        on_ray(address, model, mixed=1)


# ---- one head --------------------------------------------------------------------------------------------------------


@whole
def test_a_head_takes_our_token_alone(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    check_head(head.address)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a" * 40)
    with pytest.raises(ConfigError, match="has another token"):
        check_head(head.address)


@whole
def test_instances_are_actors_with_processes_of_their_own(running: RunningCluster, head: Head) -> None:
    found = [instance(running, place) for place in ("prefill-0", "decode-0")]
    assert sorted(each["pid"] for each in found) == sorted(head.actors())
    for each in found:
        assert "raylet" in command_of(parent_of(each["pid"]))
        assert each["health"] == "serving"


@whole
def test_instances_take_their_cores_and_memory_of_the_cluster(running: RunningCluster) -> None:
    import ray

    has, free = ray.cluster_resources(), ray.available_resources()
    assert has["CPU"] - free["CPU"] == 4
    assert has["memory"] - free["memory"] > 2 * (8 << 20)


@whole
def test_prefill_and_decode_answer_like_one_engine(
    running: RunningCluster, expected: dict[str, list[list[int]]]
) -> None:
    before = running.cluster.operations.state()["counts"]
    assert [tokens(each) for each in running.generate(PROMPTS, PARAMS)] == expected["prompts"]
    assert running.cluster.operations.state()["counts"] != before


@whole
def test_caches_travel_over_tcp_from_node_to_node(running: RunningCluster) -> None:
    import ray

    host = ray.util.get_node_ip_address()
    ready = [member.ready for member in running.cluster.router.members.values()]
    assert all(each is not None and each.address.startswith(f"tcp://{host}:") for each in ready)


@whole
def test_the_secret_is_in_no_command_line_and_no_log(running: RunningCluster, head: Head) -> None:
    secret = running.cluster.supervisor._secret.hex()
    assert not any(secret in command_of(pid) for pid in marked(head.mark))
    for file in head.folder.rglob("*"):
        if file.is_file() and not file.is_symlink():
            assert secret.encode() not in file.read_bytes(), file


@whole
def test_a_role_can_be_changed(running: RunningCluster, expected: dict[str, list[list[int]]]) -> None:
    running.cluster.operations.set_role("prefill-0", "mixed")
    running.cluster.operations.set_role("decode-0", "mixed")
    try:
        assert [tokens(each) for each in running.generate(PROMPTS, PARAMS)] == expected["prompts"]
    finally:
        running.cluster.operations.set_role("prefill-0", "prefill")
        running.cluster.operations.set_role("decode-0", "decode")


@whole
def test_a_drained_instance_is_replaced_by_another_process(running: RunningCluster, head: Head) -> None:
    before = instance(running, "prefill-0")
    running.call(running.cluster.operations.drain("prefill-0"))
    until(lambda: serves_anew(running, "prefill-0", before), "another one serves")
    until(lambda: before["pid"] not in head.actors(), "the drained one has ended")
    assert len(head.actors()) == 2


@whole
def test_a_killed_actor_is_replaced_and_its_streams_go_on(
    running: RunningCluster, head: Head, expected: dict[str, list[list[int]]]
) -> None:
    before = instance(running, "decode-0")
    found = running.call(kill_while(running, "decode-0", signal.SIGKILL))
    assert [found] == expected["long"]
    until(lambda: serves_anew(running, "decode-0", before), "another one serves")
    assert before["pid"] not in head.actors() and len(head.actors()) == 2


@whole
def test_a_frozen_actor_is_ended_and_replaced(
    running: RunningCluster, head: Head, expected: dict[str, list[list[int]]]
) -> None:
    before = instance(running, "decode-0")
    found = running.call(kill_while(running, "decode-0", signal.SIGSTOP))
    assert [found] == expected["long"]
    until(lambda: serves_anew(running, "decode-0", before), "another one serves", 30)
    until(lambda: before["pid"] not in head.actors(), "the frozen one has ended")


@whole
def test_mixed_instances_answer_like_one_engine(head: Head, model: Path, expected: dict[str, list[list[int]]]) -> None:
    with on_ray(head.address, model, mixed=2, cores=1, placement="spread") as cluster:
        assert [tokens(each) for each in cluster.generate(PROMPTS, PARAMS)] == expected["prompts"]


@whole
def test_the_end_leaves_no_process_and_no_shared_memory(
    head: Head, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", head.address)
    memory, before = shared_memory(), settled(head)
    with on_ray("auto", model, mixed=1, cores=1) as cluster:
        cluster.generate(PROMPTS[:1], PARAMS[0])
        assert len(head.actors()) == len(before) + 1
    until(lambda: head.actors() == before, "the instance has ended")
    assert shared_memory() <= memory


@whole
def test_a_model_that_does_not_load_is_an_error_and_leaves_nothing(head: Head, model: Path) -> None:
    before = settled(head)
    with pytest.raises((ConfigError, ModelError), match="model.tokenizer|no-tokenizer"):
        on_ray(head.address, model, {"model.tokenizer": "/no-tokenizer"}, mixed=1, cores=1)
    until(lambda: head.actors() == before, "the instance has ended")


@whole
def test_a_killed_server_leaves_no_actor(head: Head, model: Path, tmp_path: Path) -> None:
    before = settled(head)
    with server(head, model, tmp_path) as (process, port):
        assert ask(port, model)["usage"]["completion_tokens"] == 4
        assert len(head.actors()) == len(before) + 2
        process.kill()
        process.wait()
        until(lambda: head.actors() == before, "the instances have ended")
    assert places(head.address, 1, 1, cores=1, place_seconds=10), "their cores are free again"


@whole
def test_the_server_and_its_instances_end_with_ray(model: Path, tmp_path: Path) -> None:
    memory = shared_memory()
    own = Head(cores=2, RAY_gcs_rpc_server_reconnect_timeout_s="3")
    try:
        with server(own, model, tmp_path) as (process, port):
            ask(port, model)
            own.stop()
            process.wait(30)
    finally:
        own.stop()
    assert not marked(own.mark) and shared_memory() <= memory


@contextlib.contextmanager
def server(head: Head, model: Path, folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A server with two instances on Ray."""
    port, output = free_port(), folder / "server.txt"
    flags = {**OPTIONS, "cluster.prefill": 1, "cluster.decode": 1, "cluster.cores": 1, "cluster.address": head.address}
    command = [sys.executable, "-m", "quire", "serve", str(model), f"--port={port}"]
    with output.open("w") as file:
        process = subprocess.Popen(
            [*command, *(f"--{key}={value}" for key, value in flags.items())],
            env={**os.environ, **head.environment, MARK: head.mark}, stdout=file, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        until(lambda: "ready after" in output.read_text() or process.poll() is not None, "the server is ready", 60)
        assert process.poll() is None, output.read_text()
        yield process, port
    finally:
        process.kill()
        process.wait()


def ask(port: int, model: Path) -> dict[str, Any]:
    body = json.dumps({"prompt": [5, 6, 7, 8], "max_tokens": 4, "model": str(model), "ignore_eos": True}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        found: dict[str, Any] = json.load(answer)
        return found
