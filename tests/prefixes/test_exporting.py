"""Prefixes of a folder that are exported to a file: all, or those that are chosen."""

from __future__ import annotations

import json

import pytest

from quire.llm import LLM
from quire.stores.archive import RunArchive
from quire.stores.folder_reader import FolderReader
from tests.disk_folders import GREEDY, OPTIONS, PROMPTS, SYSTEM, WORDS, cache, filled, found
from tests.tiny_models import save_tiny

pytestmark = pytest.mark.usefixtures("fetched")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("tiny")))


def test_a_parcel_has_no_mac_and_its_source_none_of_the_parcel(folder, tmp_path):
    here, file = tmp_path / "here", tmp_path / "file"
    filled(folder, here, PROMPTS[2:])
    assert cache("export", "--disk", here, file) == 0
    source = {each.header.run.names: each for each in FolderReader(here).runs()}
    with RunArchive(file) as archive:
        for each in archive.runs:
            mac = source[each.header.run.names].blob[48:80]
            assert any(mac) and mac not in file.read_bytes()
            for extent in archive.extents(each):
                assert not any(extent[48:80])


@pytest.mark.parametrize("trust", [[], ["--trust"]])
def test_a_part_of_a_folder_is_exported(folder, tmp_path, capsys, trust):
    here, there, file = tmp_path / "here", tmp_path / "there", tmp_path / "file"
    filled(folder, here, [SYSTEM, *PROMPTS])
    with LLM(folder, OPTIONS | {"tiers.disk": f"{here}:64MiB"}) as llm:
        key = llm.prefix_key(PROMPTS[1])
    assert cache("export", "--disk", here, file, "--key", key) == 0
    with RunArchive(file) as archive:
        assert sum(len(each.header.run.names) for each in archive.runs) == 5
    words = ["--model", folder, *WORDS, *trust]
    assert cache("import", "--disk", f"{there}:64MiB", file, *words) == 0
    assert ("computed 1 chunks again" in capsys.readouterr().out) != bool(trust)
    assert found(folder, there, PROMPTS[1])[0] == {"disk": 320}
    assert found(folder, there, PROMPTS[2])[0] == {}
    lines = tmp_path / "prompts.jsonl"
    lines.write_text(json.dumps({"prompt": PROMPTS[2]}) + "\n" + json.dumps({"prompt": SYSTEM}))
    by_prompt = ["--prompt-file", lines, "--model", folder]
    assert cache("export", "--disk", here, tmp_path / "second", *by_prompt) == 0
    with RunArchive(tmp_path / "second") as archive:
        assert sum(len(each.header.run.names) for each in archive.runs) == 7
    lines.write_text("text")
    assert cache("export", "--disk", here, tmp_path / "third", *by_prompt) == 2
    assert f"--prompt-file {lines}, line 1: not JSON" in capsys.readouterr().err
    assert cache("import", "--disk", there, tmp_path / "second", *words) == 0
    assert found(folder, there, PROMPTS[2])[0] == {"disk": 320}


def test_a_run_without_its_beginning_is_left_out(folder, tmp_path, capsys):
    here, file = tmp_path / "here", tmp_path / "file"
    with LLM(folder, OPTIONS | {"tiers.disk": f"{here}:64MiB"}) as llm:
        for prompt in (SYSTEM, PROMPTS[0]):
            llm.generate([prompt], GREEDY)
            assert llm.flush()
        store = llm.engine.tiering.tiers.tiers[0]
        first = next(run for run in store.stored() if run.start == 0)
        store.drop(first.names)
        assert store.flush(5)
    assert cache("export", "--disk", here, file) == 2
    captured = capsys.readouterr()
    assert "1 runs are left out: their beginnings are no longer" in captured.out and "nothing to export" in captured.err
    assert not file.exists()
