"""A fate of a key head of your own: uniform attention, the mean of the values so far, which needs no keys at all."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import transformers

import bochner
from bochner.hf import Call, Fate, FateModule, register_fate


class Sum(NamedTuple):  # the state of decoding: the sum of the values and their number, of every sequence
    total: torch.Tensor
    count: torch.Tensor
    nbytes = property(lambda self: sum(t.nbytes for t in self))
    map = lambda self, f: Sum(*map(f, self))  # noqa: E731


class UniformHeads(FateModule):
    def forward(self, call: Call) -> torch.Tensor:
        return self.decode(call, None)[0]

    def decode(self, call: Call, state: Sum | None) -> tuple[torch.Tensor, Sum]:
        n = call.key.shape[-2]
        keep = torch.ones(len(call.key), n) if call.padding is None else (~call.padding[:, -n:]).float()
        before = state or Sum(call.value[..., :1, :] * 0, keep[:, :1] * 0)
        total = before.total + (call.value * keep[:, None, :, None]).cumsum(-2)
        count = before.count + keep.cumsum(-1)
        out = total / count.clamp_min(1)[:, None, :, None]
        return out.repeat_interleave(call.group, dim=1), Sum(total[..., -1:, :], count[:, -1:])


@register_fate
@dataclass(frozen=True)
class Uniform(Fate):
    name, letter = "uniform", "U"
    build = lambda self, layer, heads, seed: UniformHeads(layer, heads)  # noqa: E731
    cache_bytes = lambda self, layer, length, element_size: (layer.value_dim + 1) * 4  # noqa: E731


if __name__ == "__main__":
    small = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**small, num_attention_heads=4, num_key_value_heads=2)
    model = transformers.LlamaForCausalLM(config).eval()
    plan = bochner.convert(model, bochner.Recipe(None, window=8)).plan
    plan.layers[0].fates[1] = Uniform()
    bochner.revert(model)
    print(bochner.convert(model, plan).plan)
    print(model.generate(torch.arange(5)[None], max_new_tokens=5, do_sample=False))
