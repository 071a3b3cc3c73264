"""`quire inspect --tiers`: what a disk would hold, against what one does hold; and a server's tiers."""

import asyncio
import json

import pytest

from quire.cli import main
from quire.config import LEAST_TIER
from quire.llm import LLM
from quire.stores.folder import MIN_CAP
from quire.stores.sizing import disk_bytes_per_token, tokens_that_fit
from tests.cli.test_tree import served
from tests.server.fake_engine import MOVED, FakeEngine
from tests.server.harness import OPTIONS
from tests.tiny_models import save_tiny

SMALL = ["--runtime.device", "cpu", "--cache.memory", "8MiB"]


@pytest.mark.parametrize("codec", ["dense", "g4"])
def test_what_a_disk_would_hold_is_what_one_holds(tmp_path, codec, capsys):
    """The estimate is of runs of 16 chunks, without the exact tokens of a sequence's first chunk."""
    folder = str(save_tiny(tmp_path / "model", max_position_embeddings=2048))
    options = OPTIONS | {"tiers.disk": f"{tmp_path / 'kv'}:64MiB", "cache.codec": codec, "cache.check": False}
    with LLM(folder, options) as llm:
        llm.generate([[number % 250 for number in range(16 * 64 + 1)]])
        assert llm.flush()
        stored = llm.engine.tiering.tiers.stored()
        chunk_bytes = llm.engine.scheduler.manager.statistics.chunk_bytes
        per_token = sum(path.stat().st_size for path in (tmp_path / "kv").rglob("*.runs")) / (16 * 64)
    assert sum(len(run.names) for run in stored) == 16
    assert per_token == pytest.approx(disk_bytes_per_token(chunk_bytes, 2, 2), rel=0.1)
    words = ["inspect", folder, "--tiers", "--json", "--tiers.disk", f"{tmp_path / 'new'}:1GiB", *SMALL]
    assert main([*words, "--model.dtype", "float32", "--cache.codec", codec]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["disk_bytes_per_token"] == disk_bytes_per_token(chunk_bytes, 2, 2) > facts["bytes_per_token"]
    assert facts["tokens"] == tokens_that_fit(1 << 30, facts["disk_bytes_per_token"])
    assert (1 << 30) - (8 << 20) < facts["tokens"] * facts["disk_bytes_per_token"] < 1 << 30
    assert facts["bytes_per_second"] > 1e6 and not facts["is_limited"]
    assert not (tmp_path / "new").exists() and {path.name for path in tmp_path.iterdir()} == {"kv", "model"}


def test_a_table_says_when_fetching_is_faster(folder, tmp_path, capsys):
    assert main(["inspect", folder, "--tiers", *SMALL]) == 0
    without = capsys.readouterr().out
    assert "tokens in 20GiB" in without and "give --tiers.disk DIR:SIZE" in without and "bandwidth" not in without
    assert main(["inspect", folder, "--tiers", "--tiers.disk", f"{tmp_path}:64MiB", *SMALL]) == 0
    out = capsys.readouterr().out
    assert "measured now" in out and "a slower prefill makes fetching the faster way" in out and "64MiB" in out
    limited = ["--tiers.disk", f"{tmp_path}:64MiB", "--tiers.disk_bandwidth", "1MiB"]
    assert main(["inspect", folder, "--tiers", *limited, *SMALL]) == 0
    assert "1MiB/s" in capsys.readouterr().out


def test_a_folder_that_an_engine_would_refuse_is_refused(folder, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    tmp_path.chmod(0o777)
    assert main(["inspect", folder, "--tiers", "--tiers.disk", f"{tmp_path}:64MiB", *SMALL]) == 2
    assert "other users may write to" in capsys.readouterr().err
    assert LEAST_TIER == MIN_CAP


@pytest.mark.anyio
async def test_the_tiers_of_a_server_are_printed(capsys):
    engine = FakeEngine()
    async with served(engine) as url:
        assert await asyncio.to_thread(main, ["inspect", "--tiers", url]) == 0
        assert "this server has no tiers" in capsys.readouterr().out
        engine.moved = MOVED | {"costs": MOVED["costs"] | {"prefill_tokens_per_second": 1000.0}}
        assert await asyncio.to_thread(main, ["inspect", "--tiers", url]) == 0
        table = capsys.readouterr().out
        assert await asyncio.to_thread(main, ["inspect", "--tiers", url, "--json"]) == 0
    _, memory, disk, counts, speeds = table.strip().splitlines()
    assert memory.split()[0] == "memory" and memory.split()[-1] == "on" and disk.split()[-1] == "off"
    assert "40B in 1.5 s" in disk and "50B in 2.5 s" in disk
    assert "11 fetched, 12 fetched for nobody, 13 computed because that was faster" in counts
    assert "17 fetches failed" in counts and "fetching is faster" in speeds and "prefill 1,000 tokens/s" in speeds
    found = json.loads(capsys.readouterr().out)
    assert found["tiers"]["disk"]["bytes"] == 10 and found["moves"]["lost"] == 18
