"""The configuration: one tree, three ways to set it, and refusals that name the way out."""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config import (
    CacheConfig,
    ClusterConfig,
    EngineConfig,
    ModelConfig,
    ServeConfig,
    add_flags,
    describe,
    flags_of,
    format_bytes,
    options_from,
    parse_bytes,
    sources,
)
from quire.errors import ConfigError

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "settings.md"


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("17", 17),
        (17, 17),
        ("17B", 17),
        ("1KiB", 1024),
        ("512MiB", 512 * 2**20),
        ("512 mib", 512 * 2**20),
        ("1.5GiB", 3 * 2**29),
        ("2G", 2**31),
        ("20GB", 20 * 10**9),
        ("1TiB", 2**40),
    ],
)
def test_sizes_are_read_in_binary_and_decimal_units(text, num_bytes):
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", -1, "1 GiB 2", "1e9", "1XiB", "1.GiB", True, "nan"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ConfigError, match="is not a number of bytes"):
        parse_bytes(text)


@given(st.integers(0, 2**50))
def test_a_formatted_size_reads_back_within_a_thousandth(num_bytes):
    assert parse_bytes(format_bytes(num_bytes)) == pytest.approx(num_bytes, rel=1e-3)


def test_flag_wins_over_file_wins_over_default(tmp_path):
    file = tmp_path / "quire.toml"
    file.write_text('[cache]\nmemory = "1GiB"\n[runtime]\nthreads = 3\n[serve]\nport = 80\n')
    options = {"cache.memory": "2GiB"}
    config = EngineConfig.from_options(options, file)
    assert (config.cache.memory, config.runtime.threads, config.scheduler.max_running) == (2**31, 3, 256)
    assert ServeConfig.from_options({}, file).port == 80
    origin = sources(options, file)
    assert [origin[key] for key in ("cache.memory", "runtime.threads", "model.dtype")] == [
        "flag",
        f"file {file}",
        "default",
    ]


@pytest.mark.parametrize(
    ("mistyped", "meant"),
    [
        ("cache.memry", "cache.memory"),
        ("memory", "cache.memory"),
        ("model.type", "model.dtype"),
        ("attention.backends", "attention.backend"),
        ("max_context", "model.max_context"),
        ("cache.cod", "cache.codec"),
    ],
)
def test_an_unknown_key_names_the_nearest_one(mistyped, meant, tmp_path):
    with pytest.raises(ConfigError, match=f"unknown setting '{mistyped}'; did you mean {meant}"):
        EngineConfig.from_options({mistyped: "1"})
    file = tmp_path / "quire.toml"
    file.write_text(f'"{mistyped}" = 1\n')
    with pytest.raises(ConfigError, match=f"unknown setting '{mistyped}' in .*quire.toml; did you mean {meant}"):
        EngineConfig.from_options({}, file)


def test_an_unknown_section_names_the_nearest_one(tmp_path):
    file = tmp_path / "quire.toml"
    file.write_text('[cach]\nmemory = "1GiB"\n')
    with pytest.raises(ConfigError, match=r"unknown section \[cach\] in .*quire.toml; did you mean \[cache\]\?"):
        EngineConfig.from_options({}, file)
    file.write_text("[server]\nport = 80\n")
    with pytest.raises(ConfigError, match=r"did you mean \[serve\]\?"):
        ServeConfig.from_options({}, file)


def test_a_section_written_as_a_setting_is_told_apart(tmp_path):
    file = tmp_path / "quire.toml"
    file.write_text("cache = 3\n")
    with pytest.raises(ConfigError, match=r"'cache' in .* is a section: write \[cache\], and its settings below"):
        EngineConfig.from_options({}, file)


def test_a_server_setting_is_refused_where_only_an_engine_is_made():
    with pytest.raises(ConfigError, match=r"'serve.port' does not belong here"):
        EngineConfig.from_options({"serve.port": 1})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("cache.memory", "much", "cache.memory is 'much'; it must be a size such as 512MiB or 1.5GiB or auto"),
        ("cache.memory", None, "cache.memory is None"),
        ("cache.memory", True, "cache.memory is True"),
        ("cache.strict", "maybe", "cache.strict is 'maybe'; it must be true or false"),
        ("cache.strict", 1, "cache.strict is 1"),
        ("cache.strict", "off", "no effect on dense pages"),
        ("retain.chain", "punctuation", "retain.chain is 'punctuation', which has no effect .*; set retain.threshold$"),
        ("retain.local", 0.5, "retain.local is 0.5, which has no effect without retention; set retain.threshold"),
        ("retain.frequent", "0", "retain.frequent is 0.0, which has no effect without retention"),
        ("retain.profile_rows", 64, "retain.profile_rows is 64, .*; set retain.threshold or retain.budget$"),
        ("model.max_context", 1, "model.max_context is 1; it must be a whole number of at least 2 or auto"),
        ("model.dtype", "float8", "it must be auto, float32, bfloat16 or float16"),
        ("model.dtype", None, "model.dtype is None"),
        ("runtime.threads", 0, "it must be a whole number of at least 1 or auto"),
        ("runtime.threads", "two", "runtime.threads is 'two'"),
        ("runtime.threads", 513, "runtime.threads is 513; it must be at most 512"),
        ("runtime.threads", 1.5, "runtime.threads is 1.5"),
        ("scheduler.max_running", True, "scheduler.max_running is True"),
        ("scheduler.max_running", [1], r"scheduler.max_running is \[1\]"),
    ],
)
def test_a_wrong_value_is_refused_with_what_would_do(key, value, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_options({key: value})


@pytest.mark.parametrize(
    "options",
    [
        {"serve.port": 65536},
        {"serve.port": -1},
        {"serve.drain_seconds": "nan"},
        {"serve.max_request_bytes": 0},
        {"serve.max_request_bytes": 999},
    ],
)
def test_a_wrong_server_value_is_refused(options):
    with pytest.raises(ConfigError, match="must be"):
        ServeConfig.from_options(options)


def test_a_group_made_by_hand_is_checked_too():
    assert CacheConfig(memory="1GiB").memory == 2**30
    with pytest.raises(ConfigError, match="cache.codec is 'zip'; it must be dense"):
        CacheConfig(codec="zip")


def test_a_missing_or_broken_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read the configuration file .*nowhere.toml"):
        EngineConfig.from_options({}, tmp_path / "nowhere.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("[cache")
    with pytest.raises(ConfigError, match=r"broken.toml"):
        EngineConfig.from_options({}, broken)


def test_options_give_the_configuration_back():
    config = EngineConfig.from_options({"cache.memory": "3MiB", "runtime.threads": 1, "model.name": "it"})
    assert EngineConfig.from_options(config.to_options()) == config
    assert EngineConfig.from_options(EngineConfig().to_options()) == EngineConfig()


def test_changed_options_give_what_all_options_together_give(tmp_path):
    file = tmp_path / "q.toml"
    file.write_text("[cache]\nmemory = '1GiB'\n[scheduler]\nmax_running = 7\n")
    given, changes = {"cache.codec": "g4", "tiers.disk": "kv:1GiB"}, {"tiers.disk": None, "cache.memory": "2MiB"}
    changed = EngineConfig.from_options(given, file).with_options(changes)
    assert changed == EngineConfig.from_options({**given, **changes}, file)
    assert changed.with_options({}) == changed and EngineConfig().with_options(changed.to_options()) == changed
    with pytest.raises(ConfigError, match="unknown setting 'cache.memry'"):
        changed.with_options({"cache.memry": 1})
    with pytest.raises(ConfigError, match="does not belong here"):
        changed.with_options({"serve.port": 1})
    with pytest.raises(ConfigError, match="it must be"):
        changed.with_options({"cache.memory": "much"})
    cluster = ClusterConfig.from_options({"cluster.prefill": 1, "cluster.decode": 1}, None)
    assert cluster.with_options({"cluster.decode": 2, "cache.memory": 1}) == ClusterConfig(prefill=1, decode=2)


def test_settings_as_flags_are_read_back():
    options = EngineConfig.from_options(
        {"cache.memory": "3MiB", "retain.budget": 0.5, "cache.strict": True}
    ).to_options()
    assert None in options.values() and True in options.values() and "off" in options.values()
    parser = argparse.ArgumentParser()
    add_flags(parser)
    read = options_from(parser.parse_args(flags_of(options)))
    assert read.keys() == options.keys() and EngineConfig.from_options(read).to_options() == options


def test_a_printed_configuration_is_a_file_that_gives_it_back(tmp_path):
    options = {
        "cache.memory": 2**30 + 1,
        "runtime.threads": 1,
        "model.name": 'a "name" \N{SNOWMAN}',
        "cache.strict": "on",
    }
    serve_options = {"serve.api_key_file": "keys", "serve.drain_seconds": 0.5}
    config, serve = EngineConfig.from_options(options), ServeConfig.from_options(serve_options)
    text = describe(config, sources(options)) + describe(serve, {})
    cache = {
        "codec": "dense",
        "check": True,
        "memory": 2**30 + 1,
        "share": True,
        "lifetime": "auto",
        "pin": "none",
        "strict": True,
        "sparse_values": 1.0,
    }
    nuq = {"calibration": "none", "outlier_slots": 1, "sink_tokens": 1}
    assert tomllib.loads(text)["cache"] == {**cache, **nuq}
    (line,) = [line for line in text.splitlines() if line.startswith("threads")]
    assert line.split() == ["threads", "=", "1", "#", "flag"]
    file = tmp_path / "printed.toml"
    file.write_text(text, encoding="utf-8")
    assert EngineConfig.from_options({}, file) == config
    assert ServeConfig.from_options({}, file) == serve


def test_flags_cover_every_setting_and_leave_no_trace_when_absent():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    add_flags(parser)
    assert options_from(parser.parse_args(["smollm2"])) == {}
    arguments = [
        "smollm2",
        "--cache.memory",
        "1GiB",
        "--port",
        "80",
        "--serve.host",
        "::1",
        "--allow-public",
        "--cache.strict",
        "no",
    ]
    given_flags = parser.parse_args(arguments)
    assert options_from(given_flags, ["model", "cache"]) == {"cache.memory": "1GiB", "cache.strict": "no"}
    served = ServeConfig.from_options(options_from(given_flags, ["serve"]))
    assert (served.host, served.port, served.allow_public) == ("::1", 80, True)
    for key in (*EngineConfig().to_options(), *ServeConfig().to_options()):
        assert f"--{key}" in parser.format_help()


def test_the_reference_page_is_up_to_date():
    script = str(ROOT / "scripts" / "settings_page.py")
    printed = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout
    assert printed == PAGE.read_text(encoding="utf-8")


def test_a_configuration_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ModelConfig().dtype = "float32"
    assert hash(EngineConfig()) == hash(EngineConfig())


def test_settings_of_numbers_without_a_value_may_be_written_in_both_ways() -> None:
    for word in ("none", "auto"):
        config = EngineConfig.from_options({"offload.mode": "auto", "offload.cache": word, "tiers.memory": word})
        assert config.offload.cache is None and config.tiers.memory is None
