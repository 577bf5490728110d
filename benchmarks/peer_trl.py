"""One run of TRL's RewardTrainer on pairs that are already token ids; runs in TRL's own environment.

    python peer_trl.py SPEC.json         the spec and the answer are described in train_vs_trl.py

Invariant: nothing of ours is imported here. TRL pools at the last token that is not padding, so the pad token must not
be the end token: the base folder it is given has another one.
"""

import json
import sys
import time
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback
from trl import RewardConfig, RewardTrainer


class Steps(TrainerCallback):
    """Seconds of each optimizer step (data, forward, backward, update) and its loss."""

    def __init__(self) -> None:
        self.steps = []
        self.began = 0.0

    def on_step_begin(self, args, state, control, **kwargs):
        self.began = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.steps.append({"step": state.global_step, "seconds": time.perf_counter() - self.began})

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in (logs or {}):
            self.steps[-1]["loss"] = float(logs["loss"])


def read(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def score(model, sequences, pad, batch=16):
    """Rewards of ``sequences``, longest first so that a batch holds little padding."""
    order = sorted(range(len(sequences)), key=lambda i: -len(sequences[i]))
    rewards = [0.0] * len(sequences)
    model.eval()
    with torch.inference_mode():
        for start in range(0, len(order), batch):
            part = order[start : start + batch]
            width = len(sequences[part[0]])
            ids = torch.tensor([sequences[i] + [pad] * (width - len(sequences[i])) for i in part])
            mask = torch.tensor([[1] * len(sequences[i]) + [0] * (width - len(sequences[i])) for i in part])
            logits = model(input_ids=ids.to(model.device), attention_mask=mask.to(model.device)).logits
            for i, value in zip(part, logits[:, 0].float().tolist(), strict=True):
                rewards[i] = value
    return rewards


def main():
    spec = json.loads(Path(sys.argv[1]).read_text())
    weights, autocast = {"bf16": ("bfloat16", False), "autocast": ("float32", True), "fp32": ("float32", False)}[
        spec["numbers"]
    ]
    tokenizer = AutoTokenizer.from_pretrained(spec["base"])
    model = AutoModelForSequenceClassification.from_pretrained(
        spec["base"], num_labels=1, dtype=getattr(torch, weights)
    )
    with torch.no_grad():  # the same start as ours: almost no preference, so the first loss is ln 2
        model.score.weight.normal_(std=0.01 * model.config.hidden_size**-0.5)
    steps = Steps()
    trainer = RewardTrainer(
        model=model,
        args=RewardConfig(
            output_dir=spec["output"],
            per_device_train_batch_size=spec["batch_size"],
            num_train_epochs=1,
            learning_rate=spec["learning_rate"],
            lr_scheduler_type="constant",
            max_length=None,
            bf16=autocast,
            gradient_checkpointing=False,  # TRL's default is True; off is faster
            train_sampling_strategy="sequential",  # the batches come in the file's order
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
            dataloader_pin_memory=False,
            seed=spec["seed"],
        ),
        train_dataset=Dataset.from_list(read(spec["train"])),
        processing_class=tokenizer,
        peft_config=LoraConfig(
            r=16, lora_alpha=32, target_modules="all-linear", task_type="SEQ_CLS", modules_to_save=["score"]
        ),
        callbacks=[steps],
    )
    trainer.train()
    answer = {"steps": steps.steps}
    if spec["eval"]:
        pairs = read(spec["eval"])
        sequences = [ids for pair in pairs for ids in (pair["chosen_ids"], pair["rejected_ids"])]
        answer["eval_rewards"] = score(trainer.model, sequences, tokenizer.pad_token_id)
    Path(spec["answer"]).write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
