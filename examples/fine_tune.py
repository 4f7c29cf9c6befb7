"""Fine-tune a converted model with transformers' Trainer: its maps learn with it, and are redrawn on schedule.

python examples/fine_tune.py [STEPS]
"""

import sys
import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import bochner


class Majority(torch.utils.data.Dataset):
    """Rows of random symbols, and whether symbol 1 is in more than half of the places."""

    def __init__(self, rows: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        share = torch.rand(rows, 1, generator=generator)
        self.ids = (torch.rand(rows, 40, generator=generator) < share).long() + 1
        self.labels = (self.ids == 2).float().mean(1).gt(0.5).long()

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[i], "labels": self.labels[i]}


def main(steps: int = 60) -> float:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(**sizes, vocab_size=8, attention_probs_dropout_prob=0.0, num_labels=2)
    model = BertForSequenceClassification(config)
    conversion = bochner.convert(model, bochner.Recipe("gmm_prf", 16, trainable=True, options={"redraw_every": 20}))
    print(conversion.plan)

    groups = bochner.nn.parameter_groups(model, 2e-3, map_lr=1e-2, weight_decay=0.01)
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=32, report_to=[], logging_steps=20, use_cpu=True,
            save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(
            model, settings, train_dataset=Majority(2000, 0), optimizers=(torch.optim.AdamW(groups), None)
        )
        trainer.train()
    test = Majority(500, 1)
    with torch.no_grad():
        right = (model.eval()(input_ids=test.ids).logits.argmax(-1) == test.labels).float().mean()
    print(f"accuracy on new rows: {float(right):.2f}")
    return float(right)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
