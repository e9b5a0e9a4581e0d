"""A program: a tiny GPT-2 that `transformers.Trainer` trains; prints what it came to, as JSON.

python trained_by_transformers.py ROOT [--die STEP] [--stop STEP] [--steps STEPS] [--every STEPS]
    [--early] [--bare] [--norm] [--jit]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
import tempfile
import time
from typing import Any

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import dist_ckpt as dc
from dist_ckpt.integrations.transformers import CheckpointCallback

seen: list[int] = []


class Rows(torch.utils.data.Dataset[Any]):
    """40 rows, each known by its first number."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        rows = torch.randint(0, 50, (8,), generator=torch.Generator().manual_seed(number))
        rows[0] = number
        return {"input_ids": rows, "labels": rows}


class Seeing(Trainer):  # type: ignore[misc]  # it has no types
    """Notes which rows it trains on."""

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        seen.extend(inputs["input_ids"][:, 0].tolist())
        return super().training_step(model, inputs, *args, **kwargs)


class Normed(GPT2LMHeadModel):  # type: ignore[misc]  # it has no types
    """Has a BatchNorm, whose buffers follow from the rows of the rank."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__(config)
        self.norm = torch.nn.BatchNorm1d(16, affine=False)

    def forward(self, input_ids: Any, labels: Any) -> Any:
        self.norm(self.transformer.wte(input_ids).flatten(0, 1))
        return super().forward(input_ids=input_ids, labels=labels)


class Ending(transformers.TrainerCallback):  # type: ignore[misc]  # it has no types
    """Ends the process at a step, or asks for its end."""

    def __init__(self, die: int | None, stop: int | None) -> None:
        self.die, self.stop = die, stop

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.die:
            os.kill(os.getpid(), signal.SIGKILL)
        if state.global_step == self.stop:
            os.kill(os.getpid(), signal.SIGTERM)
        if self.stop and state.global_step >= self.stop:
            time.sleep(0.2)  # as long as a batch takes: ranks agree in the meantime


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("root")
    parser.add_argument("--die", type=int)
    parser.add_argument("--stop", type=int)
    parser.add_argument("--steps", type=int, default=-1)
    parser.add_argument("--every", type=int, default=3)
    parser.add_argument("--early", action="store_true")
    parser.add_argument("--bare", action="store_true")
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--norm", action="store_true")
    parser.add_argument("--jit", action="store_true")
    asked = parser.parse_args()
    set_seed(0)
    config = GPT2Config(
        vocab_size=50,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = Normed(config) if asked.norm else GPT2LMHeadModel(config)
    args = TrainingArguments(
        tempfile.mkdtemp(),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=asked.accumulate,
        num_train_epochs=3,
        max_steps=asked.steps,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        eval_strategy="steps",
        eval_steps=3,
        **({"enable_jit_checkpoint": True} if asked.jit else {}),
        # Nothing is better than a loss that is to rise: each evaluation counts.
        **({"metric_for_best_model": "loss", "greater_is_better": True} if asked.early else {}),
    )
    save = dc.every(steps=asked.every) | dc.at_end | dc.on_signal("TERM")
    callback = CheckpointCallback(asked.root, save=save, keep=dc.keep.last(2))
    callbacks = [callback, Ending(asked.die, asked.stop)]
    if asked.early:
        callbacks.append(transformers.EarlyStoppingCallback(early_stopping_patience=3))
    trainer = Seeing(model, args, train_dataset=Rows(), eval_dataset=Rows(), callbacks=callbacks)
    try:
        trainer.train(resume_from_checkpoint=None if asked.bare else callback.resume(trainer))
    except ValueError as error:
        print(json.dumps({"error": str(error)}))
        return
    weights = b"".join(bytes(one.numpy().tobytes()) for one in model.state_dict().values())
    history = trainer.state.log_history
    found = {
        "rank": args.process_index,
        "seen": seen,
        "step": trainer.state.global_step,
        "epoch": trainer.state.epoch,
        "weights": hashlib.sha256(weights).hexdigest(),
        "losses": [row["loss"] for row in history if "loss" in row],
        "logged": [row["step"] for row in history if "loss" in row],
        "stopped": None if callback.stopped is None else callback.stopped.step,
    }
    sys.stdout.write(json.dumps(found) + "\n")  # at once: another rank prints as well
    sys.stdout.flush()
    sys.exit(0 if callback.stopped is None else callback.stopped.exit_code)


if __name__ == "__main__":
    main()
