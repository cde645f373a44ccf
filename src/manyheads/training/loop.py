"""The training loop, on Hugging Face Accelerate: one process or many, any device, mixed precision.

A step depends only on the seed, its number, the weights and the optimiser's state: random generators are
seeded at every step. So a checkpoint of these is enough for a run to continue to the bit.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from manyheads.common.devices import for_float64
from manyheads.common.interrupts import Interrupted, interrupted
from manyheads.common.json_files import in_one_sentence
from manyheads.common.out_folder import writing
from manyheads.common.preserved_state import seed_generators
from manyheads.common.whole_files import write_whole
from manyheads.data.examples import Order, seed_of, spread
from manyheads.models.changes import record_of, restructure
from manyheads.models.config import build
from manyheads.models.folder import load
from manyheads.nn.orthogonal_rows import plain
from manyheads.training import checkpoint
from manyheads.training.compiled import compile_in_place, uncompile, uncompiled
from manyheads.training.diversity_terms import DiversityTerms, diversity_terms
from manyheads.training.dynamic_heads import BATCHES, DynamicHeads
from manyheads.training.evaluation import evaluate
from manyheads.training.head_health import HeadHealth
from manyheads.training.options import Options, diversity_weights, orthogonal_roles, rate
from manyheads.training.orthogonal_heads import orthogonal_heads
from manyheads.training.report import Report
from manyheads.training.run_folder import Run
from manyheads.training.task import Data, Task
from manyheads.training.weight_average import Average


@dataclass
class Result:
    """The result of a run: the metrics of the best weights on all validation examples, and why it ended."""

    out: Path
    model: nn.Module
    step: int
    best_step: int
    metrics: dict[str, float]
    ended: str  # "finished", "early" or "interrupted"
    notes: list[str]  # about the data, for the user
    dynamic: DynamicHeads | None = None  # what was done to the heads, with ``dynamic``


Callback = Callable[[Report], None]
KEPT = "the last good checkpoint is kept: make room, then continue with --resume"  # where writing fails
PRICED = 4  # every fourth example of a batch suffices to price heads


class DivergenceError(ValueError):
    """The loss of a step was no finite number."""


class Loop:
    """One run in progress."""

    def __init__(self, task: Task, data: Data, run: Run, options: Options, accelerator: Accelerator) -> None:
        self.task, self.data, self.run, self.options = task, data, run, options
        self.accelerator = accelerator
        seed_generators(seed_of(options.seed))
        self.model = build(task.describe())
        saved = self._saved()
        if saved is not None and (record := saved[1].get("changes")):
            shapes = {name: value.shape for name, value in saved[2]["model"].items()}
            with in_one_sentence(f"{saved[0]}: damaged; remove it to continue from the one before"):
                self.model = restructure(self.model, record, shapes)
        self.terms = self._keep_diverse()
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        others = [p for p in self.model.parameters() if p.dim() <= 1]
        groups: list[dict[str, object]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=options.learning_rate,
            betas=(0.9, options.beta2),
            weight_decay=options.weight_decay,
            fused=accelerator.device.type in ("cpu", "cuda"),
        )
        self.wrapped, self.optimizer = accelerator.prepare(self.model, optimizer)
        self.average = Average(self.model, options.ema) if options.ema else None
        self.dynamic = self._dynamic() if options.dynamic else None
        self.order = Order(data.train.sizes, options.batch_tokens, options.seed)
        self.step = 0
        self.best: float | None = None
        self.best_step = 0
        self.worse = 0  # evaluations since the best
        self.health = HeadHealth(self.model, options.watch_every) if options.watch_every else None
        if saved is not None:
            with in_one_sentence(f"{saved[0]}: damaged; remove it to continue from the one before"):
                self._put(*saved[1:])
        if options.compile:
            compile_in_place(self.model, accelerator.device)

    def _keep_diverse(self) -> DiversityTerms | None:
        """Constrain the model's heads, and make the terms of its loss, as the options say."""
        weights, roles = diversity_weights(self.options.diversity), orthogonal_roles(self.options.orthogonal)
        if not (weights or roles):
            return None
        batch = self.task.inputs(self.task.collate(self.data.train.take([0], self.options.seed, 0)))
        if roles:
            orthogonal_heads(self.model, roles, batch)
        return diversity_terms(self.model, batch=batch, **dict[str, Any](weights)) if weights else None

    def run_to_the_end(self, callbacks: Sequence[Callback]) -> str:
        """Make updates until all are made, the metric stops improving, or the user interrupts."""
        options = self.options
        while self.step < options.steps and not self._given_up():
            started = time.perf_counter()
            report, stop = self._update(interrupted())
            report.seconds = time.perf_counter() - started
            self.step += 1
            last = self.step == options.steps or stop
            if self.step % options.evaluate_every == 0 or self.step == options.steps:
                report.metrics = self._evaluate(spread(len(self.data.valid), options.evaluate_examples))
                report.best = self._judge(report.metrics)
            for callback in callbacks:
                callback(report)
            if self.step % options.save_every == 0 or last or self._given_up():
                self._save()
            if stop:
                return "interrupted"
        return "early" if self._given_up() and self.step < options.steps else "finished"

    def result(self, ended: str) -> Result:
        """The best weights in the model, measured on all validation examples unless it was interrupted."""
        metrics: dict[str, float] = {}
        self.model = uncompile(plain(self.model))
        self.accelerator.wait_for_everyone()  # the first process may still be writing the best weights
        if self.run.weights.exists() and self.dynamic is not None:
            self.model = load(self.run.out).to(self.accelerator.device)  # it may have had other heads
        elif self.run.weights.exists():
            checkpoint.set_weights(checkpoint.read_weights(self.run.weights), self.model)
        if ended != "interrupted":
            metrics, ended = self._evaluate_at_the_end(ended)
            if metrics and self.accelerator.is_main_process:
                document = {"step": self.step, "best_step": self.best_step, "ended": ended, **metrics}
                write_whole(self.run.metrics, json.dumps(document, indent=1))
        self.accelerator.wait_for_everyone()
        model, notes = self.model.eval(), self.data.notes
        return Result(self.run.out, model, self.step, self.best_step, metrics, ended, notes, self.dynamic)

    def _update(self, interrupted: bool) -> tuple[Report, bool]:
        """One update of the weights, from the same examples for any number of processes."""
        options, accelerator, step = self.options, self.accelerator, self.step
        processes = accelerator.num_processes
        seed_generators(seed_of(options.seed, step, accelerator.process_index))
        learning_rate = rate(step, options)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.wrapped.train()
        terms, names = self.terms, [*self.terms.weights] if self.terms is not None else []
        # loss, tokens, interruptions, terms
        exact = for_float64(accelerator.device)
        totals = torch.zeros(3 + len(names), dtype=torch.float64, device=exact)
        totals[2] = float(interrupted)
        with self._looked_at():
            for part in range(options.accumulate):
                batch, is_empty = self._batch(step, part)
                waits = part + 1 < options.accumulate
                with accelerator.no_sync(self.wrapped) if waits else nullcontext():
                    with accelerator.autocast(), terms or nullcontext():
                        loss, count = self.task.loss(self.wrapped, batch)
                    if is_empty:  # fewer examples than processes: this one takes part without a gradient
                        loss, count = loss * 0, count * 0
                    total_loss = loss if terms is None else loss + terms.loss() * count
                    # by a fixed number for now; the number of tokens of all processes is known at the end
                    accelerator.backward(total_loss / options.batch_tokens)
                totals[0] += loss.detach().to(exact)
                count = torch.as_tensor(count).to(exact)
                totals[1] += count
                if terms is not None:
                    totals[3:] += count * totals.new_tensor([*terms.values.values()])
        total, tokens, stops, *sums = accelerator.reduce(totals, "sum").tolist()
        loss_value = total / tokens if tokens else math.nan
        if not math.isfinite(loss_value):
            raise DivergenceError(
                f"the loss became {loss_value} at step {step + 1}; try a smaller learning_rate, a longer "
                f"warmup, or clip. The checkpoints in {self.run.checkpoints} are as they were"
            )
        accelerator.unscale_gradients()
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        torch._foreach_mul_(gradients, options.batch_tokens * processes / tokens)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), options.clip or math.inf)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.average is not None:
            self.average.update(step)
        report = Report(step + 1, options.steps, loss_value, learning_rate, float(norm), int(tokens), 0.0)
        report.diversity = {name: value / tokens for name, value in zip(names, sums, strict=True)}
        if self.health is not None:
            report.alarms = self.health.after_step(loss_value)
            report.heads = self.health.table if (step + 1) % options.watch_every == 0 else None
        report.acts = self._act(loss_value) if self.dynamic is not None else []
        return report, stops > 0

    @contextmanager
    def _looked_at(self) -> Iterator[None]:
        """The forward and backward passes of a step, which may be one to look at heads in."""
        if self.health is not None:
            self.health.before_step(self.step + 1)
        try:
            yield
        finally:
            if self.health is not None:
                self.health.close()

    def _batch(self, step: int, part: int, every: int = 1) -> tuple[dict[str, Tensor], bool]:
        """A part of a step's batch for this process, or every n-th of its examples, and whether there was
        none left for it.
        """
        rank, parts = self.accelerator.process_index, self.accelerator.num_processes
        indices = self.order.batch(step)
        chosen = indices[part * parts + rank :: parts * self.options.accumulate][::every]
        key = (self.options.seed, self.order.epoch(step))
        examples = self.data.train.take(chosen or indices[:1], *key)
        return send_to_device(self.task.collate(examples), self.accelerator.device), not chosen

    def _dynamic(self) -> DynamicHeads:
        """Heads that change. The averaged weights follow, and batches are made again when they are due."""

        def mean_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            loss, count = self.task.loss(model, batch)
            return loss / count

        return DynamicHeads(
            self.model,
            self.optimizer,
            mean_loss,
            steps=self.options.steps,
            heads=float(self.options.final_heads),
            seed=self.options.seed,
            averages=[] if self.average is None else [self.average.values],
        )

    def _act(self, loss: float) -> list[str]:
        """Let heads change after an update, and wrap the changed model again."""
        assert self.dynamic is not None
        first = max(self.step + 1 - BATCHES, 0)
        steps = range(first, self.step + 1) if self.dynamic.due else ()
        batches = [self._batch(step, 0, PRICED)[0] for step in steps]
        acts = self.dynamic.count(loss, batches)
        if acts:
            self.terms = self._keep_diverse()  # which rows are whose has changed
        if acts and isinstance(self.wrapped, DistributedDataParallel):
            # not by Accelerate, which would put mixed precision around the model once more
            devices, device = self.wrapped.device_ids, self.wrapped.output_device
            self.wrapped = DistributedDataParallel(self.model, devices, device)
        return list(map(str, acts))

    def _evaluate(self, indices: Sequence[int]) -> dict[str, float]:
        with self._averaged(), uncompiled(self.model):
            model, size = plain(self.model), self.options.batch_tokens
            return evaluate(self.task, model, self.data.valid, indices, batch_tokens=size)

    def _averaged(self) -> AbstractContextManager[None]:
        """The model with the weights that are evaluated and kept."""
        return self.average.in_place() if self.average is not None else nullcontext()

    def _evaluate_at_the_end(self, ended: str) -> tuple[dict[str, float], str]:
        """The metrics of all validation examples; none when Ctrl-C came before they were measured."""
        valid, size = self.data.valid, self.options.batch_tokens
        alone = self.accelerator.num_processes == 1  # or they would have to agree where to end
        try:
            metrics = evaluate(self.task, self.model, valid, batch_tokens=size, partly=alone)
        except Interrupted:
            metrics = {}
        return ({}, "interrupted") if alone and interrupted() else (metrics, ended)

    def _judge(self, metrics: dict[str, float]) -> bool:
        """Whether these are the best so far; then the weights are written."""
        value = metrics[self.task.metric]
        sign = 1 if self.task.higher_is_better else -1
        if self.best is not None and not sign * value > sign * self.best:
            self.worse += 1
            return False
        self.best, self.best_step, self.worse = value, self.step, 0
        if self.accelerator.is_main_process:
            with writing(self.run.out, KEPT), self._averaged():
                values, record = checkpoint.weights(plain(self.model)), record_of(self.model)
                write_whole(self.run.weights, checkpoint.model_bytes(values, record))
        return True

    def _given_up(self) -> bool:
        return 0 < self.options.patience <= self.worse

    def _save(self) -> None:
        if not self.accelerator.is_main_process:
            return
        moments = checkpoint.moments(self.optimizer, self.model)
        tensors = {"model": checkpoint.weights(self.model), "optimizer": moments}
        if self.average is not None:
            tensors["average"] = self.average.values
        scaler = self.accelerator.scaler
        state: checkpoint.State = {
            "step": self.step,
            "best": self.best,
            "best_step": self.best_step,
            "worse": self.worse,
            "data": self._digest(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "health": None if self.health is None else self.health.state_dict(),
        }
        if self.dynamic is not None:
            state |= {"dynamic": self.dynamic.state_dict(), "changes": record_of(self.model)}
        with writing(self.run.out, KEPT):
            checkpoint.save(self.run.checkpoints, tensors, state)

    def _saved(self) -> tuple[Path, checkpoint.State, dict[str, dict[str, Tensor]]] | None:
        """The newest checkpoint."""
        newest = next(iter(checkpoint.list_checkpoints(self.run.checkpoints)), None)
        if newest is None:
            return None
        state, tensors = checkpoint.load(newest)
        if missing := {"model", "optimizer", *(["average"] if self.options.ema else [])} - set(tensors):
            raise ValueError(
                f"{newest}: damaged, it has no {min(missing)}.safetensors; remove it to continue from "
                "the one before"
            )
        if state["data"] != self._digest():
            raise ValueError(
                f"data: not what the run in {self.run.out} began with; --resume needs the same files"
            )
        return newest, state, tensors

    def _put(self, state: checkpoint.State, tensors: dict[str, dict[str, Tensor]]) -> None:
        checkpoint.set_weights(tensors["model"], self.model)
        if self.average is not None:
            for name, value in self.average.values.items():
                value.copy_(tensors["average"][name])
        checkpoint.set_moments(tensors["optimizer"], self.optimizer, self.model)
        if self.dynamic is not None and "dynamic" in state:
            self.dynamic.load_state_dict(state["dynamic"])
        if state["scaler"] is not None and self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        if self.health is not None and (health := state.get("health")) is not None:
            self.health.load_state_dict(health)
        self.step, self.best = state["step"], state["best"]
        self.best_step, self.worse = state["best_step"], state["worse"]

    def _digest(self) -> list[str]:
        return [self.data.train.digest(), self.data.valid.digest()]
