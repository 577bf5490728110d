"""Train with TRL's RewardTrainer and write the loss of every step; run by test_trl_equality.py in TRL's environment.

    python trl_losses.py SPEC.json      {"base", "adapter", "pad_token", "answer", "runs": [{"rows", ...}]}

Invariant: nothing of ours is imported here, and the losses are what ``RewardTrainer.compute_loss`` returned.
"""

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from peft import PeftModel
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from trl import RewardConfig, RewardTrainer


class Recording(RewardTrainer):
    def compute_loss(self, *args, **kwargs):
        loss = super().compute_loss(*args, **kwargs)
        self.losses.append(loss.item())
        return loss


def train(spec, run, output):
    model = AutoModelForSequenceClassification.from_pretrained(spec["base"], num_labels=1, dtype=torch.float32)
    trainer = Recording(
        model=PeftModel.from_pretrained(model, spec["adapter"], is_trainable=True),
        args=RewardConfig(
            output_dir=output,
            per_device_train_batch_size=run["batch_size"],
            num_train_epochs=1,
            learning_rate=run["learning_rate"],
            lr_scheduler_type=run["schedule"],
            warmup_steps=0,
            weight_decay=run["weight_decay"],
            max_grad_norm=run["max_grad_norm"],
            center_rewards_coefficient=run["centering"],
            pad_token=spec["pad_token"],
            max_length=None,
            bf16=False,
            gradient_checkpointing=False,
            train_sampling_strategy="sequential",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
        ),
        train_dataset=Dataset.from_list(run["rows"]),
        processing_class=AutoTokenizer.from_pretrained(spec["base"]),
    )
    trainer.losses = []
    trainer.train()
    return trainer.losses


def main():
    spec = json.loads(Path(sys.argv[1]).read_text())
    losses = [train(spec, run, str(Path(spec["answer"]).with_suffix(f".{n}"))) for n, run in enumerate(spec["runs"])]
    Path(spec["answer"]).write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
