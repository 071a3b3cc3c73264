"""kvpress: transformers' model, and a press that drops keys and values of a prompt, layer by layer.

A press acts after each layer's attention, on a cache that no later layer reads. So one prefill serves all presses: the
part of a layer that each press keeps is stored separately, and its cache is assembled from that. Weights, arithmetic
and cache are float32.

AdaKV's presses choose a different number of tokens for each head, but free none. Their cache stays whole. In every
later call, a key without weight under that call's queries replaces each key that was not chosen. kvpress searches for
such a key and raises an error if it finds none, which may happen for too many queries. A continuation is therefore read
in slices of SLICE_TOKENS.

Source: kvpress 0.5.5, with the default settings of each press, and the press that its evaluation calls
adakv_expected_attention_e2.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import torch
from kvpress import AdaKVPress, ExpectedAttentionPress, KnormPress, SnapKVPress, StreamingLLMPress
from kvpress.presses.base_press import BasePress
from tasks import FULL, Engine, Result, Task, work
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

# With 4, 16 and 64, AdaKV's losses equalled those of single tokens to six digits.
SLICE_TOKENS = 32

PRESSES: dict[str, Callable[[float], BasePress]] = {
    "StreamingLLM": StreamingLLMPress,
    "Knorm": KnormPress,
    "SnapKV": SnapKVPress,
    "ExpectedAttention": ExpectedAttentionPress,
    "AdaKV(SnapKV)": lambda ratio: AdaKVPress(SnapKVPress(ratio)),
    "AdaKV(ExpectedAttention)": lambda ratio: AdaKVPress(ExpectedAttentionPress(ratio)),
    "AdaKV(ExpectedAttention e2)": lambda ratio: AdaKVPress(ExpectedAttentionPress(ratio, epsilon=1e-2)),
}


@dataclass
class Thinned:
    """The part of a prompt that a press keeps, layer by layer.

    keys, values  f32 [1, H, tokens, D]
    masked        of AdaKV's presses, (batch, head, token) indices of keys that get no weight; None if no key is masked
    """

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    masked: list[tuple[Tensor, ...] | None] = field(default_factory=list)

    def tokens(self) -> int:
        """Tokens of each head."""
        return self.keys[0].shape[-2]

    def bytes(self) -> int:
        """Bytes of its tensors, masked keys included."""
        return sum(states.untyped_storage().nbytes() for states in [*self.keys, *self.values])


class Runner:
    """The model and its presses."""

    def __init__(self, folder: str, threads: int) -> None:
        """Load it."""
        torch.set_num_threads(threads)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.layers = [layer.self_attn for layer in self.model.model.layers]
        for attention in self.layers:
            # Presses expect this attribute.
            attention.rotary_emb = self.model.model.rotary_emb

    @torch.inference_mode()
    def run(self, task: Task) -> Iterator[Result]:
        """Runs the task with the full cache, and with every press at every share."""
        presses = {(FULL, 1.0): None} | {
            (name, kept): make(1 - kept) for name, make in PRESSES.items() for kept in task.kept
        }
        caches, logits = self.prefill(task.prompt, presses)
        bytes_full = caches[FULL, 1.0].bytes()
        reference = torch.empty(0)
        # Caches with equal numbers of tokens make a batch. The full cache is the first of the first batch.
        for tokens in sorted({thinned.tokens() for thinned in caches.values()}, reverse=True):
            batch = {name: thinned for name, thinned in caches.items() if thinned.tokens() == tokens}
            cache = self.restore(list(batch.values()))
            if not task.continuation:
                answers = self.answer(task, cache, logits.expand(len(batch), -1))
                for (name, thinned), answer in zip(batch.items(), answers, strict=True):
                    yield Result(*name, thinned.bytes() / bytes_full, answer=answer)
                continue
            found = self.read(cache, len(task.prompt), task.continuation[:-1], len(batch))
            targets = torch.tensor(task.continuation[1:])[:, None]
            for (name, thinned), rows in zip(batch.items(), found.unbind(), strict=True):
                rows = rows.log_softmax(-1)
                reference = reference if reference.numel() else rows
                yield Result(
                    *name,
                    thinned.bytes() / bytes_full,
                    surprise=-rows.gather(1, targets).double().sum().item(),
                    agreeing=int((rows.argmax(-1) == reference.argmax(-1)).sum()),
                    divergence=(reference.exp() * (reference - rows)).double().sum().item(),
                )

    def prefill(
        self, prompt: list[int], presses: dict[tuple[str, float], BasePress | None]
    ) -> tuple[dict[tuple[str, float], Thinned], Tensor]:
        """What each press keeps, and the logits [V] after the prompt, which saw the full cache."""
        caches = {name: Thinned() for name in presses}

        def collect(layer: Any, _: Any, named: dict[str, Any], output: Any) -> None:
            held = named["past_key_values"].layers[layer.layer_idx]
            for name, press in presses.items():
                layer.masked_key_indices = None
                keys, values = held.keys, held.values
                if press is not None:
                    keys, values = press.compress(layer, named["hidden_states"], keys, values, output[1], named)
                caches[name].keys.append(keys)
                caches[name].values.append(values)
                caches[name].masked.append(layer.masked_key_indices)
            layer.masked_key_indices = None

        for press in presses.values():
            if press is not None:
                press.post_init_from_model(self.model)
        with ExitStack() as stack:
            for layer in self.layers:
                handle = layer.register_forward_hook(collect, with_kwargs=True)
                stack.callback(handle.remove)
            logits = self.model(
                torch.tensor([prompt]), past_key_values=DynamicCache(config=self.model.config), logits_to_keep=1
            ).logits[0, -1]
        return caches, logits

    def restore(self, batch: list[Thinned]) -> DynamicCache:
        """A new cache with what presses have kept. Tells the layers which keys to mask."""
        cache = DynamicCache(config=self.model.config)
        for number, layer in enumerate(self.layers):
            cache.update(
                torch.cat([thinned.keys[number] for thinned in batch]),
                torch.cat([thinned.values[number] for thinned in batch]),
                number,
            )
            masks = [(row, *thinned.masked[number][1:]) for row, thinned in enumerate(batch) if thinned.masked[number]]
            layer.masked_key_indices = None
            if masks:
                rows = [torch.full_like(heads, row) for row, heads, _ in masks]
                layer.masked_key_indices = (
                    torch.cat(rows),
                    torch.cat([heads for _, heads, _ in masks]),
                    torch.cat([tokens for *_, tokens in masks]),
                )
        return cache

    def read(self, cache: DynamicCache, at: int, tokens: list[int], batch: int) -> Tensor:
        """Logits [batch, tokens, V] of the same ids in each row, from position `at` of the text on."""
        slices = torch.tensor([tokens] * batch).split(SLICE_TOKENS, dim=1)
        return torch.cat([self.step(cache, at + SLICE_TOKENS * n, each) for n, each in enumerate(slices)], dim=1)

    def step(self, cache: DynamicCache, at: int, tokens: Tensor) -> Tensor:
        """One call: logits [batch, tokens, V] of ids at position `at` of the text; the cache may hold fewer tokens."""
        positions = torch.arange(at, at + tokens.shape[1])[None]
        logits: Tensor = self.model(tokens, position_ids=positions, past_key_values=cache).logits
        return logits

    def answer(self, task: Task, cache: DynamicCache, logits: Tensor) -> list[list[int]]:
        """Greedy ids of each row, including the one that ends the answer."""
        at = len(task.prompt)
        if task.later:
            logits = self.step(cache, at, torch.tensor([task.later] * len(logits)))[:, -1]
            at += len(task.later)
        written = [logits.argmax(-1)]
        ended = torch.isin(written[-1], torch.tensor(task.stop))
        while len(written) < task.answer_tokens and not ended.all():
            logits = self.step(cache, at, written[-1][:, None])[:, -1]
            at += 1
            written.append(logits.argmax(-1))
            ended |= torch.isin(written[-1], torch.tensor(task.stop))
        return [cut(ids, task.stop) for ids in torch.stack(written, dim=1).tolist()]


def cut(ids: list[int], stop: list[int]) -> list[int]:
    """The ids up to the first one that ends an answer."""
    ends = [at for at, each in enumerate(ids) if each in stop]
    return ids[: ends[0] + 1] if ends else ids


def start(given: argparse.Namespace) -> Engine:
    """The checkpoint."""
    return Engine(version("kvpress"), Runner(given.model, given.threads).run)


if __name__ == "__main__":
    work(start)
