"""A fate of a key head of your own: uniform attention, the mean of the values so far, which needs no keys at all."""

from typing import NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import bochner.hf


class Sum(NamedTuple):  # the state of decoding: the sum of the values, and in the last column their number
    total: torch.Tensor
    nbytes = property(lambda self: self.total.nbytes)
    map = lambda self, f: Sum(f(self.total))  # noqa: E731


class UniformHeads(bochner.hf.FateModule):
    def decode(self, call: bochner.hf.Call, state: Sum | None) -> tuple[torch.Tensor, Sum]:
        values = torch.nn.functional.pad(call.value, (0, 1), value=1.0)
        if call.padding is not None:
            values = values * ~call.padding[:, None, -values.shape[2] :, None]
        total = values.cumsum(-2) + (0 if state is None else state.total)
        mean = total[..., :-1] / total[..., -1:].clamp_min(1)
        return mean.repeat_interleave(call.group, dim=1), Sum(total[..., -1:, :])


@bochner.hf.register_fate
class Uniform(bochner.hf.Fate):  # settings would make it a frozen dataclass
    name, letter = "uniform", "U"
    build = lambda self, layer, heads, seed: UniformHeads(layer, heads)  # noqa: E731
    cache_bytes = lambda self, layer, length, element_size: (layer.value_dim + 1) * 4  # noqa: E731


if __name__ == "__main__":
    model = LlamaForCausalLM(LlamaConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4))
    plan = bochner.convert(model, bochner.Recipe(None, window=8)).plan
    plan.layers[0].fates[1] = Uniform()
    print(bochner.convert(bochner.revert(model), plan).plan)
    print(model.generate(torch.arange(5)[None], max_new_tokens=5, do_sample=False))
