"""Drives a scheduler without a runner, for simulators. Tokens are placeholders; steps without events run at once."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.engine.calendar import placeholder_tokens
from quire.engine.scheduler import SampledToken, Scheduler


@dataclass(slots=True)
class AdvanceReport:
    """The work of the last call of `FastForward.advance`.

    num_quiet  rows of sequences in the calendar, in the last step
    context    tokens that these attend to, in the last step
    prompts    first position and number of rows of each prompt's slice
    decodes    positions of rows of other decoding sequences, of all steps
    sampled    tokens of prompts and of these sequences, of all steps
    """

    num_quiet: int = 0
    context: int = 0
    prompts: list[tuple[int, int]] = field(default_factory=list)
    decodes: list[int] = field(default_factory=list)
    sampled: list[SampledToken] = field(default_factory=list)


class FastForward:
    """Drives a scheduler without retention, because retention decides by attention weights. Decides and commits as the
    engine does, so that tokens come in the same steps.

    report  report of the last call of `advance`
    """

    def __init__(self, scheduler: Scheduler) -> None:
        assert scheduler.manager.retainer is None, "nobody says what retention keeps"
        self.scheduler = scheduler
        self.report = AdvanceReport()
        self._batch = scheduler.batch

    @property
    def num_quiet(self) -> int:
        """Number of next steps in which each sequence of the batch gets a token and nothing else happens."""
        if self._batch.active or not self._batch.calendar or self._may_admit:
            return 0
        return self._batch.calendar.quiet_steps

    def advance(self, steps: int = 1) -> int:
        """Takes up to `steps` steps in which the whole batch decodes, and stops before an admission, a prompt's slice,
        an end or a preemption. If the next step has one of these, takes that step alone. Returns the number of steps; 0
        if there is nothing to do but wait.
        """
        self.report = AdvanceReport()
        num_running, done = len(self._batch.running), 0
        while done < steps and len(self._batch.running) == num_running:
            skipped = self._skip(steps - done)
            if not skipped:
                break
            done += skipped
        done = done or self._take_step()
        self.scheduler.builder.forget()
        return done

    @property
    def _may_admit(self) -> bool:
        scheduler = self.scheduler
        return scheduler.policy.may_admit and not scheduler.manager.was_refused(scheduler.waiting[0])

    def _take_step(self) -> int:
        """Takes one step, whatever it has. Returns 0 if there is none."""
        scheduler, report = self.scheduler, self.report
        rows = scheduler.policy.decide()
        if not (self._batch.calendar or rows):
            return 0
        self._pass_steps(1)
        for each in sorted(rows, key=lambda each: each.sequence.admitted):
            sequence, end = each.sequence, each.end
            tokens = [(token_id, None) for token_id in placeholder_tokens(sequence, end, int(each.samples))]
            if each.num_rows > 1 or each.start < sequence.num_prompt:
                report.prompts.append((each.start, each.num_rows))
            else:
                report.decodes.append(each.start)
            report.sampled += scheduler.commit_rows(sequence, end, each.num_rows, tokens)
        return 1

    def _skip(self, limit: int) -> int:
        """Takes decode steps of the whole batch: all steps without events at once, or one step with events. Returns
        their number; 0 if the next step is not a decode step of the whole batch.
        """
        if self._may_admit:
            return 0
        batch, manager = self._batch, self.scheduler.manager
        if not batch.active and batch.calendar:
            count = min(limit, batch.calendar.quiet_steps)
            if count:
                self._pass_steps(count)
                return count
        active = batch.wake()
        for sequence in active:
            if (
                not sequence.is_decoding
                or sequence.path.transfer is not None
                or sequence.guide is not None
                or not manager.paths.extend(sequence, sequence.num_computed + 1)
            ):
                return 0
        if not active:
            return 0
        self._pass_steps(1)
        for sequence in active:
            end = sequence.num_computed + 1
            tokens = [(token_id, None) for token_id in placeholder_tokens(sequence, end, 1)]
            self.report.decodes.append(end - 1)
            self.report.sampled += self.scheduler.commit_rows(sequence, end, 1, tokens)
        return 1

    def _pass_steps(self, count: int) -> None:
        calendar = self._batch.calendar
        self.report.num_quiet, self.report.context = len(calendar), calendar.context
        self.scheduler.pass_steps(count)
