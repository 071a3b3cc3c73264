"""The settings for a Ray cluster, and what is told to its machines. No Ray."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from quire.cluster.cluster import Cluster
from quire.cluster.instance import LaunchConfig
from quire.cluster.ray_processes import RayProcesses, _cache_bytes
from quire.config import ClusterConfig, EngineConfig
from quire.errors import ConfigError

from ..tiny_models import save_tiny


def test_without_ray_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = save_tiny(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="cluster.address needs Ray.*pip install -c constraints.txt '.\\[cluster\\]'"):
        Cluster(str(model), {"cache.memory": "8MiB"}, settings=ClusterConfig(mixed=1, address="auto"))


@pytest.mark.parametrize("address", ["", "head", "head:", ":6379", "head:0", "head:65536", "head:port"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="must be none, auto or HOST:PORT"):
        ClusterConfig(mixed=1, address=address)


@pytest.mark.parametrize("address", ["auto", "head:6379", "10.0.0.1:6379", "[::1]:6379"])
def test_addresses_of_a_head_are_accepted(address: str) -> None:
    assert ClusterConfig(mixed=1, address=address).address == address


def test_an_address_is_for_instances() -> None:
    with pytest.raises(ConfigError, match="cluster.address is for instances"):
        ClusterConfig(address="auto")


def test_caches_do_not_travel_between_machines_in_shared_memory() -> None:
    with pytest.raises(ConfigError, match="must be auto or tcp"):
        ClusterConfig(mixed=1, address="auto", transport="shm")


@pytest.mark.parametrize("given", [{"cores": 1}, {"placement": "pairs"}, {"mixed_labels": "zone=a"}], ids=str)
def test_what_is_for_a_ray_cluster_alone_is_refused_without_one(given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(ConfigError, match=rf"cluster\.{name} is for machines of a Ray cluster: set cluster.address"):
        ClusterConfig(mixed=1, **given)


def test_labels_are_read_from_text() -> None:
    config = ClusterConfig(mixed=1, address="auto", prefill_labels="zone=a, ray.io/accelerator-type=H100")
    assert config.labels("prefill") == {"zone": "a", "ray.io/accelerator-type": "H100"}
    assert config.labels("decode") == {}


@pytest.mark.parametrize("text", ["zone", "zone=", "=a", "zone=a,,"])
def test_what_is_no_label_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="cluster.mixed_labels is .* KEY=VALUE"):
        ClusterConfig(mixed=1, mixed_labels=text)


def test_all_settings_travel_to_another_machine(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('[cache]\nmemory = "8MiB"\ncodec = "g4"\n[retain]\nthreshold = 0.95\n')
    config = EngineConfig.from_options({"model.max_context": 256, "runtime.device": "cpu"}, file)
    launch_config = LaunchConfig("mixed-0.1", "", "", "", config.to_options())
    assert EngineConfig.from_options(LaunchConfig.from_json(launch_config.to_json()).options) == config


def test_a_cache_gets_its_share_of_a_node(tmp_path: Path) -> None:
    options: dict[str, Any] = {"runtime.device": "cpu", "model.dtype": "float32", "cache.memory": "auto"}
    launch_config = LaunchConfig("mixed-0.1", "", "", str(save_tiny(tmp_path)), options)
    alone = _cache_bytes(launch_config, 1 << 50)
    assert alone // 2 - 1_000_000 < _cache_bytes(launch_config, alone // 2) < alone // 2, "the weights take some of it"
    assert _cache_bytes(launch_config, 0) == alone // 4, "too little is not nothing"


def test_ray_does_not_share_the_cores_of_this_machine() -> None:
    assert not RayProcesses.is_local and RayProcesses.transport == "tcp"
