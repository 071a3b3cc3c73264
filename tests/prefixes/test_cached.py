"""Prefixes of the arena and of a disk as one list, and what goes with a dropped one."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.engine.params import SamplingParams
from quire.errors import RequestError
from quire.llm import LLM
from quire.prefixes.cached import branch_of, find_prefix, known_prefixes, prompt_key
from quire.prefixes.disk_index import DiskPrefixIndex
from quire.prefixes.listing import Prefix
from quire.stores.listing import StoredRun

from ..tiny_models import save_tiny

NOW = 1000.0
OPTIONS: dict[str, Any] = {"model.dtype": "float32", "cache.memory": "8MiB", "runtime.threads": 1}
GREEDY = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)


def name(letters: str) -> bytes:
    """The key of a chunk, from the letters of all chunks up to it."""
    return letters.encode().ljust(16, b".")


def run(letters: str, start: int = 0, used: float = 0.0, pinned_until: float = 0.0, num_bytes: int = 100) -> StoredRun:
    """A run of the last chunks of a sequence, a letter each."""
    names = tuple(name(letters[: count + 1]) for count in range(start, len(letters)))
    parent = name(letters[:start]) if start else b"namespace......."
    return StoredRun("", names, parent, start, num_bytes * len(names), used, pinned_until, True)


def segment(letters: str, start: int = 0, idle: float = 0.0, pinned: float | None = None) -> Prefix:
    """A segment of the arena, likewise."""
    count = len(letters) - start
    parent = name(letters[:start]).hex() if start else None
    return Prefix(name(letters).hex(), "", parent, 64 * start, 64 * count, [], 0, 0, 0, 1, 0.0, 7 * count, idle, pinned)


def letters(key: str) -> str:
    return bytes.fromhex(key).decode().rstrip(".")


def told(arena: list[Prefix], stored: list[StoredRun]) -> dict[str, tuple[str | None, int, dict[str, int]]]:
    """By key: parent, tokens, and bytes by tier."""
    return {
        letters(each.key): (
            None if each.parent is None else letters(each.parent),
            each.num_tokens // 64,
            {tier: tier_copy.num_bytes for tier, tier_copy in each.tiers.items()},
        )
        for each in known_prefixes(arena, DiskPrefixIndex(stored), NOW)
    }


def engine(tree: Any = None) -> Any:
    """An engine whose arena is empty."""
    tree = tree or SimpleNamespace(segments=list)
    return SimpleNamespace(scheduler=SimpleNamespace(manager=SimpleNamespace(tree=tree)))


def visible(salt: str) -> bool:
    return True


def test_runs_of_one_path_are_one_prefix() -> None:
    stored = [run("abcdef", 4), run("abcd", 2), run("ab")]
    assert told([], stored) == {"abcdef": (None, 6, {"disk": 600})}
    assert told([], [*stored, run("abcd", 2)]) == {"abcdef": (None, 6, {"disk": 600})}, "a run stored twice"


def test_where_paths_part_a_prefix_ends() -> None:
    stored = [run("ab"), run("abcd", 2), run("abx", 2)]
    assert told([], stored) == {
        "ab": (None, 2, {"disk": 200}),
        "abcd": ("ab", 4, {"disk": 200}),
        "abx": ("ab", 3, {"disk": 100}),
    }
    # A path that goes on from the middle of a run does not cut it.
    assert told([], [run("abcd"), run("abx", 2)]) == {
        "abcd": (None, 4, {"disk": 400}),
        "abx": ("ab", 3, {"disk": 100}),
    }


def test_what_ends_with_the_same_chunk_is_one_prefix() -> None:
    arena = [segment("ab"), segment("abcd", 2), segment("xy")]
    assert told(arena, [run("abcd"), run("pq")]) == {
        "ab": (None, 2, {"arena": 14, "disk": 200}),
        "abcd": ("ab", 4, {"arena": 14, "disk": 200}),
        "xy": (None, 2, {"arena": 14}),
        "pq": (None, 2, {"disk": 200}),
    }


def test_times_are_since_the_epoch_and_the_last_used_come_first() -> None:
    arena = [segment("a", idle=50, pinned=10.0), segment("b", idle=5, pinned=math.inf)]
    disk_index = DiskPrefixIndex([run("a", used=990.0, pinned_until=2000.0), run("c", used=999.0)])
    found = known_prefixes(arena, disk_index, NOW)
    assert [letters(each.key) for each in found] == ["c", "b", "a"]
    tiers = found[2].tiers
    assert (tiers["arena"].used, tiers["arena"].pinned_until) == (950.0, 1010.0)
    assert (tiers["disk"].used, tiers["disk"].pinned_until, found[2].used) == (990.0, 2000.0, 990.0)
    assert found[1].tiers["arena"].pinned_until == math.inf and found[0].tiers["disk"].pinned_until == 0.0


def test_the_branch_of_a_chunk_is_found_over_runs() -> None:
    stored = DiskPrefixIndex([run("abcd"), run("abxyz", 2), run("abxyzpq", 5), run("abxyk", 4)])
    found = branch_of(engine(), name("abxyz"), stored, visible)
    assert found is not None
    assert found.names == [name("abxyz"[: count + 1]) for count in range(5)]
    assert sorted(found.descendants) == sorted([name("abxyzp"), name("abxyzpq")])
    # abxyk goes on from abxy, so the chunks up to there stay.
    assert found.kept == {name("a"), name("ab"), name("abx"), name("abxy")}
    (alone,) = [branch_of(engine(), name("abcd"), DiskPrefixIndex([run("abcd")]), visible)]
    assert alone is not None and alone.kept == set() and alone.descendants == []
    inner = branch_of(engine(), name("ab"), stored, visible)
    assert inner is not None and len(inner.descendants) == 8 and inner.kept == set()
    assert branch_of(engine(), name("q"), stored, visible) is None


def test_the_bytes_of_a_prefix_are_those_of_all_its_runs() -> None:
    """As after a restart, when the arena has in one segment what the disk has in several runs."""
    stored = [run("abcdef", 4), run("abcd"), run("abx", 2)]
    disk_index = DiskPrefixIndex(stored)
    assert told([segment("abcdef")], stored) == {
        "abcdef": (None, 6, {"arena": 42, "disk": 600}),
        "abx": ("ab", 3, {"disk": 100}),
    }
    assert told([segment("abcdef", 3)], stored)["abcdef"][2] == {"arena": 21, "disk": 300}
    for key, num_bytes in (("abcdef", 600), ("abcde", 500), ("abc", 300), ("a", 100)):
        found = find_prefix(engine(), name(key), disk_index, visible)
        assert found is not None and (found.parent, found.num_tokens) == (None, 64 * len(key))
        assert found.tiers["disk"].num_bytes == num_bytes
    fork = find_prefix(engine(), name("abx"), disk_index, visible)
    assert fork is not None and (fork.parent, fork.tiers["disk"].num_bytes) == (name("ab").hex(), 100)


def test_a_branch_whose_beginning_is_lost_is_what_is_left() -> None:
    found = branch_of(engine(), name("abcd"), DiskPrefixIndex([run("abcd", 2)]), visible)
    assert found is not None and found.names == [name("abc"), name("abcd")]
    prefix = find_prefix(engine(), name("abc"), DiskPrefixIndex([run("abcd", 2)]), visible)
    assert prefix is not None and (prefix.parent, prefix.num_tokens) == (name("ab").hex(), 192)
    assert prefix.tiers["disk"].num_bytes == 100


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny(tmp_path_factory.mktemp("tiny")))


def test_the_library_lists_and_drops_prefixes(folder: str, tmp_path: Path) -> None:
    options = OPTIONS | {"tiers.disk": f"{tmp_path / 'kv'}:64MiB"}
    prompt = "a few words that are said again and again, " * 5
    with LLM(folder, options) as llm:
        key = llm.prefix_key(prompt)
        assert llm.drop_prefix(key) is None and llm.known_prefixes() == [] and llm.find_prefix(key) is None
        llm.generate([prompt], GREEDY)
        assert llm.flush()
        (known,) = llm.known_prefixes()
        assert (known.key, known.parent, known.num_tokens) == (key, None, 192)
        assert set(known.tiers) == {"arena", "disk"} and all(tier_copy.num_bytes for tier_copy in known.tiers.values())
        found = llm.find_prefix(key)
        assert found is not None and found.tiers["disk"] == known.tiers["disk"]
        (prefix,) = llm.prefixes()
        assert prefix.id == key
    other = str(save_tiny(tmp_path / "other", seed=1))
    with LLM(other, options) as llm:
        assert llm.known_prefixes() == [], "the prefixes of another model"
    with LLM(folder, options) as llm:
        assert [list(each.tiers) for each in llm.known_prefixes()] == [["disk"]]
        assert llm.drop_prefix(key) == {"arena": 0, "disk": 3}
        assert llm.known_prefixes() == [] and llm.drop_prefix(key) is None
        llm.engine.check()
    with LLM(folder, OPTIONS) as llm:
        assert llm.known_prefixes() == [] and llm.flush()
        llm.generate([prompt], GREEDY)
        assert llm.drop_prefix(llm.prefix_key(prompt)) == {"arena": 3}
        assert llm.prefixes() == []
        assert llm.prefix_key({"prompt": prompt, "cache_salt": "s"}) != llm.prefix_key(prompt)
        assert llm.drop_prefix(key.upper()) is None
        wrong: Any
        for wrong in ("", "12", "x" * 32, key + "00", f" {key[2:]} ", f"{key[:2]} {key[2:]}", 5, None):
            with pytest.raises(RequestError, match="hexadecimal"):
                llm.drop_prefix(wrong)
        with pytest.raises(RequestError, match="whole chunks of 64"):
            llm.prefix_key("short")
        for ids, said in (([], "has no tokens;"), ([5], "has 1 token;"), ([5, 6], "has 2 tokens;")):
            with pytest.raises(RequestError, match=said):
                llm.prefix_key(ids)
        with pytest.raises(RequestError, match="63 tokens"):
            prompt_key(llm.engine.namespace, [1] * 63, "")
