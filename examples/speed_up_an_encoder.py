"""Speed up an encoder of long sequences: seconds before and after, and how close the outputs are.

    python examples/speed_up_an_encoder.py [FRAMES]

The encoder is Whisper's, with random weights, so that nothing is downloaded: put `from_pretrained` and real sound in
their place. Random weights attend almost uniformly, so their error is small; trained heads need the data that you give.
"""

import sys
import time

import torch
from transformers import WhisperConfig
from transformers.models.whisper.modeling_whisper import WhisperEncoder

import bochner


def seconds(model, features) -> float:
    took = []
    for _ in range(3):
        began = time.perf_counter()
        model(features)
        took.append(time.perf_counter() - began)
    return min(took)


@torch.no_grad()
def main(frames: int = 1500) -> float:
    torch.manual_seed(0)
    sizes = {"d_model": 128, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 256}
    model = WhisperEncoder(WhisperConfig(**sizes, max_source_positions=frames)).eval()
    sound = [{"input_features": torch.randn(1, 80, 2 * frames)} for _ in range(4)]

    test = torch.randn(1, 80, 2 * frames)
    exact, before = model(test).last_hidden_state, seconds(model, test)

    recipe = bochner.Recipe("landmark", 16, window=32, sinks=1)
    conversion = bochner.convert(model, recipe, sound, progress=True)
    print(conversion.plan)

    linear, after = model(test).last_hidden_state, seconds(model, test)
    error = float((linear - exact).norm() / exact.norm())
    print(f"{frames} frames: {before:.3f} s before, {after:.3f} s after, relative error {error:.3f}")
    return error


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
