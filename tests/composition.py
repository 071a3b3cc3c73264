"""The composition matrix as data: the tests that prove each pair of the five systems, and all five at once.

`tests/scripts/test_composition.py` checks that every test here is collected, with the parameters that are named.
`scripts/composition.py` writes docs/lab/composition.md from it.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.benchmark_scripts import benchmark

five = benchmark("systems")
CODEC, INSTANCES, OFFLOAD = five.CODEC, five.INSTANCES, five.OFFLOAD
NAMES, RETENTION, SHARING = five.NAMES, five.RETENTION, five.SHARING


@dataclass(frozen=True)
class Test:
    """A test. words: of the parameters of one of its cases, by which it is about the pair; empty: all cases are."""

    file: str
    name: str
    words: tuple[str, ...] = ()

    __test__ = False

    @property
    def node(self) -> str:
        """Its id without parameters."""
        return f"tests/{self.file}::{self.name}"


@dataclass(frozen=True)
class Proof:
    """What is proved of systems together, in one sentence, and by which tests."""

    claim: str
    tests: tuple[Test, ...]


TOKENS = "cluster/test_tokens.py", "test_tokens_are_those_of_one_engine"
MEMORY = "engine/test_offloading.py", "test_tokens_are_those_of_a_cache_in_memory"

MATRIX: dict[tuple[str, ...], Proof] = {
    (SHARING, CODEC): Proof(
        "Chunks that are found answer like chunks that are computed, and like the reference backend; sharers of packed"
        " chunks attend like each row alone.",
        (
            Test(
                "engine/test_codec_matrix.py",
                "test_every_codec_answers_alike_from_the_cache_and_after_a_preemption",
                ("nuq3", "everything", "True"),
            ),
            Test("engine/test_encoded_engine.py", "test_a_hit_says_what_a_miss_says"),
            Test("kernels/test_encoded_attend.py", "test_sharers_of_packed_chunks_read_like_every_row_alone"),
        ),
    ),
    (SHARING, RETENTION): Proof(
        "A prompt that is found keeps the tokens that it keeps when it is computed, at any time and with any sharers;"
        " they are those of full attention matrices.",
        (
            Test("engine/test_retention.py", "test_one_prompt_cold_found_twice_at_once_and_after_eviction"),
            Test("engine/test_retention.py", "test_the_cpu_backend_does_what_the_oracle_does"),
            Test("cache/test_retention_retained.py", "test_many_readers_read_in_place"),
        ),
    ),
    (SHARING, OFFLOAD): Proof(
        "Tokens are those of a cache in memory, and a beginning that several micro-batches share is read once a layer.",
        (
            Test(*MEMORY, ("dense", "shared")),
            Test("engine/test_offloading.py", "test_a_shared_beginning_is_loaded_once_a_layer"),
        ),
    ),
    (SHARING, INSTANCES): Proof(
        "Tokens are those of one engine; of a known prefix only the suffix travels, and the next turn finds what"
        " another instance decoded.",
        (
            Test(*TOKENS, ("all", "arena")),
            Test("cluster/test_bytes.py", "test_a_second_request_with_the_prefix_sends_only_its_suffix"),
            Test("cluster/test_elsewhere.py", "test_the_next_turn_fetches_what_was_decoded"),
        ),
    ),
    (CODEC, RETENTION): Proof(
        "The kernels keep the tokens and give the answers of the reference backend, and those of full attention"
        " matrices over decoded pages.",
        (
            Test("engine/test_retention_encoded.py", "test_both_backends_keep_and_answer_alike"),
            Test("engine/test_retention.py", "test_encoded_pages_keep_and_answer_like_the_oracle"),
        ),
    ),
    (CODEC, OFFLOAD): Proof(
        "Tokens are those of the same codec in memory, wherever weights, cache and activations are.",
        (
            Test(*MEMORY, ("nuq3",)),
            Test("engine/test_offloading.py", "test_tokens_are_those_of_memory_under_every_policy", ("g4 sinks",)),
        ),
    ),
    (CODEC, INSTANCES): Proof(
        "Tokens are those of one engine with the codec; its bytes travel, and another calibration is refused.",
        (
            Test(*TOKENS, ("nuq3", "all")),
            Test("cluster/test_bytes.py", "test_encoded_and_retained_caches_send_a_fraction_of_dense_ones"),
            Test("cluster/test_tokens.py", "test_caches_of_another_calibration_are_refused"),
        ),
    ),
    (RETENTION, OFFLOAD): Proof(
        "Tokens are those of retention in memory, with cache or weights on the disk.",
        (
            Test("offload/test_paged.py", "test_tokens_are_those_of_retention_in_memory"),
            Test("engine/test_offloading.py", "test_weights_on_the_disk_go_with_retention_and_a_disk_tier"),
        ),
    ),
    (RETENTION, INSTANCES): Proof(
        "Tokens are those of one engine; the receiver knows all that retention goes on with, and another source decides"
        " the same.",
        (
            Test(*TOKENS, ("dense", "budget")),
            Test("cluster/test_bytes.py", "test_all_that_retention_knows_travels"),
            Test("cluster/test_tokens.py", "test_another_source_decides_as_the_first_one_did"),
        ),
    ),
    (OFFLOAD, INSTANCES): Proof(
        "Tokens are those of one engine in memory where both instances have weights on the disk.",
        (Test("cluster/test_offloaded.py", "test_weights_on_the_disk_of_both_instances_change_no_token"),),
    ),
    NAMES: Proof(
        "Tokens are those of one process with all weights in memory, over the same pages and kept tokens; that nothing"
        " is shared there and attention follows the definition changes log-probabilities by less than a quarter of what"
        " codec and retention change.",
        (
            Test(
                "cluster/test_offloaded.py",
                "test_all_five_answer_like_one_plain_engine_with_the_same_pages_and_kept_tokens",
            ),
        ),
    ),
}
"""The pairs, and all five. What a codec and retention lose is measured beside the tests: `benchmarks/compose.py`."""
