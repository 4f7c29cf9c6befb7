"""`train`: a task, an attention and a preset, by transformers' Trainer."""

from __future__ import annotations

import atexit
import json
import os
import re
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from bochner._checks import BochnerError, extra, is_int, one_of
from bochner._progress import quietly, speaker
from bochner.nn import maps_of, parameter_groups
from bochner.tasks import models
from bochner.tasks.base import PAD, Collator, Guessed, Preset, Sequences, Task, summary
from bochner.tasks.checkpoints import Journal, last_checkpoint, prepare, room_named, write_json
from bochner.tasks.peers import PEERS
from bochner.tasks.registry import preset_of
from bochner.tasks.registry import task as task_of
from bochner.tasks.rehearsal import first, rehearse, scored, splits

transformers = extra("transformers", "train", "bochner.tasks")
extra("accelerate", "train", "bochner.tasks")

LOGS, SAVES = 50, 10  # per run
FIGURES = ("loss", "accuracy", "perplexity", "bits", "error_rate", "score")
GLIMPSE = 256  # validation examples looked at while training
NOT_SAID = ("features_of", "departures")  # of a preset in `run.json`: what the attention has of it stands there


def train(
    task: str | Task,
    attention: Any = "exact",
    preset: str | Preset = "small",
    *,
    seed: int = 0,
    output: str | Path | None = None,
    resume: bool = False,
    report: str | None = "bar",
    **changes: Any,
) -> dict[str, Any]:
    """Train a fresh model on a task and test it; returns the result, which is also `result.json` of the output.

    `task`: a name, see `tasks.TASKS`, or a `Task` of your own. `attention`: a name, see `tasks.attentions()`, a
    subclass of `FeatureMap`, or an instance that every layer gets a copy of. `preset`: a name or a `Preset`; `changes`
    replace single values of it, as in `steps=100, features=64, options={"learnable": "S"}`.
    `output`: default `runs/TASK-ATTENTION-PRESET-SEED`, with the options behind the attention; holds `run.json`,
    `metrics.jsonl`, checkpoints and `result.json`. `resume`: go on where the run in `output` was stopped, however it
    was; a finished run returns its result. `report`: `"bar"`, `"tensorboard"` for event files and the bar, or None
    for silence. Under `torchrun` or `accelerate launch` the batch is shared by the processes.
    """
    if not is_int(seed) or not 0 <= seed < 2**32:
        raise BochnerError(f"The 'seed' of train must be an int from 0 to 2**32 - 1, got {seed!r}.")
    one_of(report, "report", "train", ("bar", "tensorboard", None))
    chosen = task if isinstance(task, Task) else task_of(task)
    name, sizes = models.map_name(attention), preset_of(chosen, preset, **changes)
    kind = models.choose(chosen, name, sizes)
    configuration = described(chosen, kind, sizes, seed)
    where = Path(output) if output else Path("runs") / run_name(chosen, kind, preset, seed)
    if sizes.start is not None:
        finished(Path(sizes.start))
    if is_first():
        prepare(where, configuration, resume=resume)
    if (where / "result.json").exists():
        found: dict[str, Any] = json.loads((where / "result.json").read_text(encoding="utf-8"))
        return found
    say = speaker(report is not None and is_first())
    say(f"{chosen.name} with {name}: the examples, then {sizes.steps:,} steps, in {where}")
    begin = time.perf_counter()
    with quietly(), room_named(where), each_warning_once():
        # Trainer warns of tensors it gathers from one process; nothing is lost.
        warnings.filterwarnings("ignore", message="Was asked to gather along dimension 0")
        warnings.filterwarnings("ignore", message=".*pin_memory.*")
        model = models.build(chosen, sizes, kind, seed=seed)
        if sizes.start is not None:
            take_over_(model, Path(sizes.start))
        trainer = make_trainer(chosen, sizes, kind, model, where, seed=seed, report=report)
        checkpoint = last_checkpoint(where, tidy=is_first())
        seconds = rehearse(chosen, model, trainer)  # by every process, as they wait for each other
        say(f"about {duration(sizes.steps * seconds)} for {sizes.steps:,} steps")
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        result = {
            **configuration,
            "parameters": sum(p.numel() for p in model.parameters()),
            "metrics": (metrics := trainer.test()),
            "score": metrics[chosen.figure],
            "resumed": checkpoint is not None,
            "seconds": round(time.perf_counter() - begin, 1),
        }
        if chosen.baseline is not None:
            result["baseline"] = chosen.baseline(sizes)
        if trainer.is_world_process_zero():
            trainer.save_model(str(where / "model"))
            write_json(where / "result.json", result)
        trainer.accelerator.wait_for_everyone()
    return result


def described(task: Task, kind: models.Attention, sizes: Preset, seed: int) -> dict[str, Any]:
    """What tells a run from others, as it will be read back."""
    start = None if sizes.start is None else str(sizes.start)
    said = {"task": task.name, "attention": kind.name, "seed": seed}
    said |= {k: v for k, v in asdict(sizes).items() if k not in NOT_SAID}
    said |= {k: getattr(kind, k) for k in ("features", "window", "redraw")}
    said |= {"options": dict(kind.options), "start": start}
    found: dict[str, Any] = json.loads(json.dumps(said))
    return found


def run_name(task: Task, kind: models.Attention, preset: str | Preset, seed: int) -> str:
    """The directory of a run that was given none."""
    named = "".join(f",{k}={v}" for k, v in sorted(kind.options.items()))
    return f"{task.name}-{kind.name}{named}-{preset if isinstance(preset, str) else 'own'}-{seed}"


def duration(seconds: float) -> str:
    """A length of time in words.

    >>> duration(8), duration(200), duration(9000)
    ('8 s', '3 min', '2.5 h')
    """
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@contextmanager
def each_warning_once() -> Iterator[None]:
    """Show warnings that differ in their figures only, such as those of signed maps, once and not at every step."""
    with warnings.catch_warnings():
        show, seen = warnings.showwarning, set()

        def first(message: Warning | str, category: type[Warning], *where: Any) -> None:
            kind = re.sub(r"\d+", "", str(message))
            if kind not in seen:
                seen.add(kind)
                show(message, category, *where)

        warnings.showwarning = first  # type: ignore[assignment]
        yield


def is_first() -> bool:
    """Whether this is the only process, or the first of those that `torchrun` started."""
    return int(os.environ.get("RANK", "0")) == 0


def _leave() -> None:
    """Close the group of processes; one that ends within it may be aborted by the group's threads."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def make_trainer(
    task: Task,
    preset: Preset,
    attention: models.Attention,
    model: nn.Module,
    output: Path,
    *,
    seed: int = 0,
    report: str | None = None,
) -> TaskTrainer:
    """transformers' Trainer with the data, the optimizer and the schedule of a preset."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        atexit.register(_leave)
    if preset.batch % world:
        raise BochnerError(f"The batch of {preset.batch} cannot be shared by {world} processes; choose a multiple.")
    every = max(1, preset.steps // LOGS)
    saving = every * max(1, LOGS // SAVES)
    arguments = transformers.TrainingArguments(
        output_dir=str(output),
        max_steps=preset.steps,
        per_device_train_batch_size=preset.batch // world,
        per_device_eval_batch_size=2 * preset.batch // world,
        learning_rate=preset.learning_rate,
        lr_scheduler_type=preset.schedule,
        # A warm-up of the Arena's schedule may be longer than the training, which then ends below the peak.
        warmup_steps=preset.warmup if preset.schedule == "inverse_sqrt" else min(preset.warmup, preset.steps),
        max_grad_norm=preset.clip,
        logging_steps=every,
        logging_nan_inf_filter=False,
        eval_strategy="steps",
        eval_steps=saving,
        save_strategy="steps",
        save_steps=saving,
        save_total_limit=2,
        report_to="none",
        seed=seed,
        data_seed=seed,
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
        disable_tqdm=report is None,
        bf16=preset.precision == "bfloat16",
        remove_unused_columns=False,
        label_names=["labels"],
        # A peer may leave weights of the model out of a step; Reformer's passes cannot be asked.
        ddp_find_unused_parameters=attention.name in PEERS and attention.name != "reformer",
    )
    callbacks: list[Any] = [Journal(output / "metrics.jsonl")]
    if attention.redraw:
        callbacks.append(LastDraw(attention.redraw))
    if report == "tensorboard" and is_first():
        callbacks.append(events(output / "tensorboard"))
    groups = parameter_groups(model, preset.learning_rate, weight_decay=preset.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=preset.learning_rate, betas=preset.betas, eps=preset.eps)
    peer = attention.peer
    collate = task.collate or Collator(preset.length, peer.multiple, masks=peer.takes_mask)
    data = splits(task, preset, collate)
    validation, examples = data.pop("validation"), data.pop("train")
    if preset.guess:
        examples = Guessed(cast(Sequences, examples), preset.guess)
    return TaskTrainer(
        model=model,
        args=arguments,
        train_dataset=examples,
        eval_dataset=Subset(validation, range(min(GLIMPSE, len(validation)))),
        data_collator=collate,
        compute_metrics=lambda found: judged(task, found),
        preprocess_logits_for_metrics=lambda logits, labels: scored(task, logits, labels),
        optimizers=(optimizer, None),
        callbacks=callbacks,
        task=task,
        tests=data,
    )


def judged(task: Task, found: Any) -> dict[str, float]:
    """The figures of a data set."""
    if isinstance(task.metric, str):
        return summary(task.kind, found.predictions)
    return {"score": float(np.mean(found.predictions))}


def events(folder: Path) -> Any:
    """The callback that writes event files for TensorBoard."""
    extra("tensorboard", "train", "TensorBoard")
    from torch.utils.tensorboard import SummaryWriter
    from transformers.integrations import TensorBoardCallback

    return TensorBoardCallback(SummaryWriter(str(folder)))


class TaskTrainer(transformers.Trainer):  # type: ignore[name-defined]
    """Trainer that stops before a loss or gradient that is not finite reaches the weights, and can test."""

    def __init__(self, *args: Any, task: Task, tests: Mapping[str, Any], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.task, self.tests = task, tests
        # The losses of these models are means over the batch of a process: Trainer must not scale them again.
        self.model_accepts_loss_kwargs = False
        self.remove_callback(transformers.PrinterCallback)  # the journal has it all

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = super().training_step(model, inputs, *args, **kwargs)
        gradients = {
            n: p.grad for n, p in self.accelerator.unwrap_model(model).named_parameters() if p.grad is not None
        }
        wrong = [f"the gradient of {n!r} is not finite" for n, g in gradients.items() if not g.sum().isfinite()]
        if not loss.isfinite():
            wrong = [f"the loss is {loss.item()}"]
        if wrong:
            raise BochnerError(
                f"Training stopped at step {self.state.global_step}: {wrong[0]}. "
                "Lower the learning rate, or take another attention."
            )
        return loss

    def prediction_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss, logits, labels = super().prediction_step(model, inputs, *args, **kwargs)
        if self.task.kind == "ctc":
            logits = blank_padding(self.accelerator.unwrap_model(model), first(logits), inputs["attention_mask"])
        return loss, logits, labels

    def test(self) -> dict[str, float]:
        """Figures on the test split, and on the further ones of the task under their name."""
        out: dict[str, float] = {}
        for split, examples in self.tests.items():
            found = self.evaluate(examples, metric_key_prefix=split)
            kept = {k.removeprefix(f"{split}_"): v for k, v in found.items() if np.isfinite(v)}
            kept = {k: v for k, v in kept.items() if k in FIGURES}
            out |= kept if split == "test" else {f"{split}_{k}": v for k, v in kept.items()}
        if self.task.figure not in out:
            raise BochnerError(
                f"The {self.task.figure!r} of the task {self.task.name!r} is not a number on its test split: look at "
                "its metric, and whether any of its labels counts."
            )
        return out


def blank_padding(model: Any, logits: Tensor, mask: Tensor) -> Tensor:
    """The logits of a Conformer with frames that come from padding read as blanks: nothing was said there."""
    said = model._get_output_attention_mask(mask, target_length=logits.shape[1])
    blank = nn.functional.one_hot(torch.tensor(PAD), logits.shape[-1]).to(logits)
    return torch.where(said[..., None], logits, blank)


class LastDraw(transformers.TrainerCallback):  # type: ignore[name-defined]
    """No redraw in the last period: a model is tested with projections that it was trained with for long."""

    def __init__(self, every: int) -> None:
        self.every = every

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step + self.every > state.max_steps:
            for phi in maps_of(model):
                phi.schedule_redraws_(None)


def finished(output: Path) -> tuple[dict[str, Any], Path]:
    """The configuration of a finished run, and its weights."""
    path = output / "model" / "model.safetensors"
    if not path.exists() or not (output / "run.json").exists():
        raise BochnerError(f"There is no finished run in {str(output)!r}: run.json or {path.name} is missing.")
    said: dict[str, Any] = json.loads((output / "run.json").read_text(encoding="utf-8"))
    return said, path


def load(output: str | Path) -> nn.Module:
    """The model of a finished run, trained, from its directory; maps and their draws included."""
    from safetensors.torch import load_model

    said, path = finished(Path(output))
    sizes = Preset(**{f.name: said[f.name] for f in fields(Preset) if f.name in said})  # its features are the map's own
    chosen = task_of(said["task"])
    kind = models.choose(chosen, said["attention"], sizes)
    model = models.build(chosen, sizes, kind, seed=said["seed"])
    load_model(model, path)  # weights that are tied are stored once
    return model.eval()


def take_over_(model: nn.Module, start: Path) -> None:
    """Take over the weights of another run but for its head; what another attention has of its own stays fresh."""
    theirs, ours = body_of(load(start)).state_dict(), body_of(model).state_dict()
    own = (".linear_attn.", ".peer.", "pooler.")  # maps, peers, and BERT's pooler, which only some heads have
    for name, weight in ours.items():
        there = theirs.get(name)
        if there is not None and there.shape == weight.shape:
            weight.copy_(there)
        elif not any(part in f".{name}" for part in own):
            said = "is not there" if there is None else f"is {tuple(there.shape)} there and {tuple(weight.shape)} here"
            raise BochnerError(f"The run in {str(start)!r} has another model: the weight {name!r} {said}.")


def body_of(model: nn.Module) -> nn.Module:
    """A model without its head."""
    return model.encoder if isinstance(model, models.Pooled) else model.base_model  # type: ignore[return-value]
