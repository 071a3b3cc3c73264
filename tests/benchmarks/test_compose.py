"""`benchmarks/compose.py`: its configurations, loads, what each gets of the memory, and what it says of them."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.workload.slo import Slo
from tests.benchmark_scripts import benchmark
from tests.engines import keep_calibration
from tests.tiny_models import save_tiny

compose, results = benchmark("compose"), benchmark("results")
Served, Stage = results.Served, results.Stage
systems = benchmark("systems")
CONFIGURATIONS, IN_INSTANCES, NAMES, NONE = systems.CONFIGURATIONS, systems.IN_INSTANCES, systems.NAMES, systems.NONE
name_of, Recipe = systems.name_of, systems.Recipe
asked = benchmark("asking").asked

TINY = {"model.dtype": "float32", "runtime.device": "cpu", "runtime.threads": 1}
FLAGS = ["--model.dtype", "float32", "--runtime.device", "cpu", "--runtime.threads", "1"]
LOAD = systems.Load(prompt=300, shared=200, prefixes=2, output=20, clients=(2, 3), seconds=1.0)
MIB = 1 << 20


pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = save_tiny(
        tmp_path_factory.mktemp("tiny"), num_hidden_layers=5, hidden_size=128, intermediate_size=96,
        max_position_embeddings=1024,
    )  # fmt: skip
    keep_calibration(path)
    return str(path)


# ---- configurations --------------------------------------------------------------------------------------------------


def test_configurations_are_none_each_system_each_pair_and_all_five() -> None:
    assert len(CONFIGURATIONS) == len(set(CONFIGURATIONS)) == 1 + 5 + 10 + 1
    assert CONFIGURATIONS[0] == () and CONFIGURATIONS[-1] == NAMES
    assert [systems.systems_of(name_of(each)) for each in CONFIGURATIONS] == list(CONFIGURATIONS)
    assert name_of(()) == NONE and name_of(NAMES) == systems.ALL and name_of(("sharing", "codec")) == "sharing + codec"
    with pytest.raises(ConfigError, match=r"no configuration 'codec \+ sharing'; there are none, sharing"):
        systems.systems_of("codec + sharing")


@pytest.mark.parametrize("chosen", CONFIGURATIONS, ids=name_of)
def test_every_configuration_has_the_options_of_its_systems_and_no_others(chosen: tuple[str, ...]) -> None:
    options = Recipe.of({"model.dtype": "float32"}).options(chosen, LOAD, 64 * MIB, 10 * MIB)
    config = EngineConfig.from_options(options)
    assert config.cache.share == ("sharing" in chosen)
    assert (config.cache.codec != "dense") == ("codec" in chosen)
    assert config.retain.is_on == ("retention" in chosen)
    assert config.offload.is_on == ("offload" in chosen)
    assert (config.offload.cache is not None) == ("offload" in chosen and "instances" not in chosen)
    assert (sum(systems.roles_of(chosen).values()) == 2) == ("instances" in chosen)
    assert (systems.note_of(chosen) == IN_INSTANCES) == ({"offload", "instances"} <= {*chosen})
    assert config.model.dtype == "float32" and config.cache.memory == 64 * MIB
    assert config.model.max_context == 320 and config.scheduler.max_running == 3


def test_given_options_belong_to_their_systems() -> None:
    given = {
        "cache.codec": "nuq4", "cache.sink_tokens": 2, "retain.threshold": 0.9, "offload.memory": "7MiB",
        "scheduler.max_running": 9, "cache.lifetime": 3,
    }  # fmt: skip
    recipe = Recipe.of(given)
    assert recipe.codec == {"cache.codec": "nuq4", "cache.sink_tokens": 2}
    assert recipe.retention == {"retain.threshold": 0.9}
    assert recipe.options(("offload",), LOAD, MIB, 10 * MIB)["offload.memory"] == "7MiB"
    assert recipe.base == {"scheduler.max_running": 9, "cache.lifetime": 3, "runtime.device": "cpu"}
    assert recipe.options((), LOAD, MIB, 0)["scheduler.max_running"] == 9
    policy = Recipe.of({"offload.mode": "policy.json"}).options(("offload",), LOAD, MIB, 10 * MIB)
    assert {key for key in policy if key.startswith("offload")} == {"offload.mode"}


def test_the_cache_is_what_processes_and_weights_leave() -> None:
    assert systems.cache_of((), 1000 * MIB, 300 * MIB) == 700 * MIB - systems.RESERVE_BYTES
    assert systems.cache_of(("instances",), 1000 * MIB, 300 * MIB) == 350 * MIB - systems.RESERVE_BYTES
    with pytest.raises(ConfigError, match=r"processes and weights take 990MiB of it \(all five\); give at least"):
        systems.cache_of(NAMES, 1000 * MIB, 990 * MIB)


def test_probes_differ_in_what_changes_the_memory_beside_the_cache() -> None:
    found = {systems.probe_of(each) for each in CONFIGURATIONS}
    assert found == {(), ("offload",), ("instances",), ("offload", "instances")}


# ---- loads -----------------------------------------------------------------------------------------------------------


def test_prompts_take_turns_with_their_prefixes_and_are_the_same_each_time() -> None:
    first, second = (list(itertools.islice(asked(LOAD, 1000), 6)) for _ in range(2))
    assert first == second and all(len(each.prompt) == 300 and each.num_out == 20 for each in first)
    heads = [tuple(each.prompt[:200]) for each in first]
    assert heads[0] == heads[2] != heads[1] == heads[3]
    assert len({tuple(each.prompt[200:]) for each in first}) == 6
    assert all(250 <= token < 500 for each in first for token in each.prompt), "special tokens"


def test_a_trace_s_requests_that_fit_come_again_and_again(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [(512, 5, [0]), (1024, 1, [0, 1]), (4096, 5, list(range(8))), (512, 5, [7])]
    trace.write_text(
        "".join(
            json.dumps({"timestamp": place, "input_length": num_in, "output_length": num_out, "hash_ids": ids}) + "\n"
            for place, (num_in, num_out, ids) in enumerate(lines)
        )
    )
    load = replace(LOAD, prompt=2000, shared=0, trace=str(trace))
    found = list(itertools.islice(asked(load, 10_000), 6))
    assert [(len(each.prompt), each.num_out) for each in found[:3]] == [(512, 5), (1024, 2), (512, 5)]
    assert found[:3] == found[3:] and found[1].prompt[:512] == found[0].prompt != found[2].prompt
    with pytest.raises(ConfigError, match="has no request of at most 120 tokens"):
        asked(replace(LOAD, prompt=100, shared=0, trace=str(trace)), 10_000)


# ---- goodput ---------------------------------------------------------------------------------------------------------


def stage(clients: int, *served: tuple[float, float, float]) -> Any:
    return Stage(clients, 10.0, tuple(itertools.starmap(Served, served)), running=clients, preemptions=0)


def test_goodput_counts_answers_after_the_warm_up_that_meet_both_targets() -> None:
    slo = Slo(1.0, 0.1)
    found = stage(4, (3.9, 0.1, 0.01), (4.1, 1.0, 0.1), (6.0, 1.1, 0.01), (7.0, 0.5, 0.11), (9.0, 0.2, 0.02))
    assert found.rate == pytest.approx(4 / 6) and found.goodput(slo) == pytest.approx(2 / 6)
    told = found.told(slo)
    assert told["answers"] == 4 and told["ttft_p50"] == 1.0 and told["tpot_p90"] == 0.11 and told["clients"] == 4
    assert results.best([found, stage(8, (5.0, 0.1, 0.1)), stage(2)], slo) == (pytest.approx(2 / 6), 4)
    assert stage(2).told(slo)["ttft_p90"] is None
    assert results.percentile([4.0, 1.0, 3.0, 2.0], 50) == 3.0 and results.percentile([1.0], 90) == 1.0


# ---- the comparison --------------------------------------------------------------------------------------------------


def test_targets_of_all_five_are_judged() -> None:
    row = {"gain_sequences": 5.0, "gain_goodput": 2.5, "ratio": 1.04, "pss": 3 * MIB}
    assert [text.split()[3] for text in results.missed(row, 2 * MIB)] == ["5.00", "1.0400", "3MiB"]
    reached = {"gain_sequences": 6.0, "gain_goodput": 2.0, "ratio": 1.03, "pss": MIB}
    assert not results.missed(reached, MIB)
    assert not results.missed(dict.fromkeys(reached) | {"pss": 0}, MIB)


# ---- the script ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--only", "everything"], "there is no configuration 'everything'"),
        (["--shared-tokens", "5000"], "--shared-tokens is 5000; it must be below --input-tokens, 4096"),
        (["--output-tokens", "1"], "--output-tokens is 1; it must be at least 2"),
        (["--cache.codec", "dense"], "cache.codec is dense"),
        (["--runtime.device", "cuda"], "runtime.device must be cpu"),
        (["--text", "/nowhere"], "cannot read the text /nowhere"),
    ],
)
def test_flags_that_cannot_be_are_refused(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose.compare(compose.arguments(["--model", "m", *flags]))


def test_settings_of_a_file_belong_to_their_systems(tmp_path: Path) -> None:
    """One that quire plan auto wrote has all settings, and must not switch a system on where it is off."""
    file = tmp_path / "quire.toml"
    file.write_text(
        '[cache]\nmemory = "1GiB"\nshare = true\ncodec = "nuq4"\noutlier_slots = 2\n[retain]\nbudget = 0.5\n'
        "[scheduler]\nmax_running = 7\ntoken_budget = 300\n"
    )
    given = compose.arguments(["--config", str(file), "--cache.codec", "nuq2"])
    recipe = Recipe.of(compose.settings_of(given))
    assert recipe.codec == {"cache.codec": "nuq2", "cache.outlier_slots": 2} and recipe.retention == {
        "retain.budget": 0.5
    }
    none = EngineConfig.from_options(recipe.options((), LOAD, 100 * MIB, 0))
    assert (none.cache.codec, none.retain.budget, none.cache.share, none.cache.memory) == (
        "dense", "off", False, 100 * MIB,
    )  # fmt: skip
    assert (none.scheduler.max_running, none.scheduler.token_budget) == (7, 300)


def test_what_goodputs_do_not_show_is_said() -> None:
    served = tuple(Served(5.0 + 0.1 * place, 0.1, 0.01) for place in range(30))
    load = replace(LOAD, clients=(4, 24), seconds=10.0)
    none = results.Row((), sequences=17, stages=(Stage(24, 10.0, served, 17, 0),))
    assert results.doubts(load, Slo(5.0, 1.0), none) == []
    told = results.doubts(
        replace(load, clients=(4, 17)), Slo(10.0, 1.0), replace(none, stages=(Stage(4, 10.0, served[:9], 4, 0),))
    )
    assert [text.split()[2] for text in told] == ["number", "takes", "'none'"] and "memory pressure" in told[0]


@pytest.mark.parametrize(
    ("flags", "shared"),
    [([], 3584), (["--input-tokens", "1024"], 896), (["--shared-tokens", "5"], 5), (["--quick"], 448)],
)
def test_prompts_have_seven_eighths_in_common_unless_it_is_given(flags: list[str], shared: int) -> None:
    assert compose.load_of(compose.arguments(flags)).shared == shared


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_script_runs_processes_of_each_kind_and_writes_what_it_found(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, output, lines = tmp_path / "text.txt", tmp_path / "out.json", tmp_path / "lines.jsonl"
    text.write_text("Of all the mills on the river, the oldest made no flour. " * 40)
    memory, pair = 1 << 30, "offload + instances"
    flags = ["--quick", "--input-tokens", "600", "--seconds", "2", f"--plan.memory={memory}", "--only", pair]
    flags += ["--text", str(text), "--output", str(output), "--json", str(lines)]
    status = compose.main(["--model", model, *FLAGS, *flags])
    told = capsys.readouterr().out
    assert status == 0, told
    found = json.loads(output.read_text())
    none, apart = found["rows"]
    assert (none["configuration"], apart["configuration"]) == (NONE, pair) and not none["refused"] + apart["refused"]
    assert none["ratio"] == apart["ratio"] == 1.0 and apart["note"] == IN_INSTANCES
    assert apart["gain_sequences"] == apart["sequences"] / none["sequences"] < 1, "three processes take more"
    assert none["goodput"] > 0 and apart["stages"][0]["answers"] > 0
    assert all(0 < row["pss"] < 1.1 * memory for row in found["rows"])
    assert found["about"]["memory"] == memory and len(lines.read_text().splitlines()) == 2
    assert pair in told and IN_INSTANCES in told
