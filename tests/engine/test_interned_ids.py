"""Token ids of prompts that wait share their objects."""

from quire.engine.admission import tokenized
from quire.engine.interned_ids import InternedTokenIds


def test_equal_ids_are_one_object_and_the_list_is_not_copied() -> None:
    first, second = InternedTokenIds([70_000, 5, 70_000]), InternedTokenIds([int("70000")])
    assert first == [70_000, 5, 70_000] and second == [70_000]
    assert first[0] is first[2] is second[0] and InternedTokenIds(first)[0] is first[0]
    assert tokenized({"prompt_token_ids": first}, list).ids is first
    given = [1, 2]
    assert tokenized(given, list).ids is not given, "a caller may change its own list"


def test_ids_of_no_vocabulary_stay_what_they_are() -> None:
    assert InternedTokenIds([-1, 3]) == [-1, 3] and InternedTokenIds([]) == []
