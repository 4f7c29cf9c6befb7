"""A speech model whose encoder is made linear: Whisper tiny, 1,500 frames, nothing trained.

The weights are published in 8 bits; they are taken out of the ONNX file and multiplied out. The transcript of the
original is the reference of the word error rate, so 0 is "nothing changed". There are 82 seconds of speech by three
readers to calibrate and to measure on: pieces that are measured have no part in calibration, their readers have.
Differences of one word mean nothing.
"""

from __future__ import annotations

import re
import time
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _framework import Said, Store, experiment, kept
from torch import Tensor

from bochner import Recipe, Target, convert, data
from bochner._timing import best_times
from bochner.demo import quietly

RATE = 16_000
FRAMES = RATE // 50  # samples to a frame of the encoder
RECIPES: dict[str, Recipe | Target] = {
    "window 32, sink": Recipe(None, window=32, sinks=1),
    "window 32, sink, calibrated m=64": Recipe("calibrated", 64, window=32, sinks=1),
    "window 32, sink, landmark m=16": Recipe("landmark", 16, window=32, sinks=1),
    "window 32, sink, landmark m=64": Recipe("landmark", 64, window=32, sinks=1),
    "calibrated m=64 alone": Recipe("calibrated", 64),
    "keep 0.98": Target(keep=0.98, minimize="time", length=1500),
}


def onnx_weights(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Names and weights of an ONNX file: stored plainly, in 8 bits, or as the nameless factor of a product."""
    import onnx

    stored: dict[str, np.ndarray] = {}
    products: list[tuple[str, str]] = []

    def walk(graph: Any) -> None:
        for tensor in graph.initializer:
            stored[tensor.name.replace("_merged_0", "")] = onnx.numpy_helper.to_array(tensor)
        for node in graph.node:
            if node.op_type in ("MatMul", "MatMulInteger"):
                module = re.sub(r"/MatMul(_quant|_\d+)*$", "", node.name).strip("/").replace("/", ".")
                products.append((f"{module}.weight", node.input[1].replace("_merged_0", "")))
            for attribute in node.attribute:
                if attribute.type == onnx.AttributeProto.GRAPH:
                    walk(attribute.g)

    def plain(name: str) -> np.ndarray:
        if not name.endswith("_quantized"):
            return stored[name]
        base = name.removesuffix("_quantized")
        # Scales and zero points belong to columns, where there are several.
        return (stored[name].astype(np.float32) - stored[f"{base}_zero_point"]) * stored[f"{base}_scale"]

    walk(onnx.load(str(path)).graph)
    for name in stored:
        if re.fullmatch(r"[a-z_][\w.]*\.(weight|bias)(_quantized)?", name):
            yield name.removesuffix("_quantized"), torch.tensor(plain(name), dtype=torch.float32)
    for name, factor in products:
        if factor in stored:
            yield name, torch.tensor(plain(factor).T, dtype=torch.float32)


def whisper() -> tuple[Any, Any]:
    """The model and its processor."""
    from transformers import GenerationConfig, WhisperConfig, WhisperForConditionalGeneration, WhisperProcessor

    home = data.fetch("whisper")
    weights = {f"model.encoder.{k}": v for k, v in onnx_weights(home / "onnx" / "encoder_model_quantized.onnx")}
    decoder = onnx_weights(home / "onnx" / "decoder_model_merged_quantized.onnx")
    weights |= {k: v for k, v in decoder if k.startswith("model.")}
    weights["proj_out.weight"] = weights["model.decoder.embed_tokens.weight"]
    model = WhisperForConditionalGeneration(WhisperConfig.from_pretrained(home)).eval()
    model.load_state_dict({name: weights[name] for name in model.state_dict()})
    model.generation_config = GenerationConfig.from_pretrained(home)
    return model, WhisperProcessor.from_pretrained(home)


def sound(name: str) -> np.ndarray:
    """Samples in [-1, 1], 16,000 a second."""
    with wave.open(str(data.fetch("speech") / f"{name}.wav")) as file:
        raw = np.frombuffer(file.readframes(file.getnframes()), np.int16).astype(np.float32) / 2**15
        samples = torch.from_numpy(raw.reshape(-1, file.getnchannels()).mean(1))
        factor = RATE / file.getframerate()
    if factor == 1:
        return samples.numpy()
    return torch.nn.functional.interpolate(samples[None, None], scale_factor=factor, mode="linear")[0, 0].numpy()


def pieces(samples: np.ndarray, seconds: int, step: int) -> list[np.ndarray]:
    size = seconds * RATE
    return [samples[i : i + size] for i in range(0, len(samples) - size + 1, step * RATE)]


def word_errors(truth: str, found: str) -> tuple[int, int]:
    """Words to change, leave out or add, and the number of words."""
    a, b = (re.sub(r"[^a-z' ]", " ", text.lower()).split() for text in (truth, found))
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        before, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (x != y))
    return row[-1], len(a)


class Speech:
    """The model, its calibration, and what it made of the pieces held back before it was converted."""

    def __init__(self) -> None:
        self.model, self.processor = whisper()
        cities, endgame, beckett = sound("two_cities"), sound("endgame_nagg_nell"), sound("beckett")
        seen = [*pieces(cities[: 30 * RATE], 9, 3), *pieces(endgame[: 16 * RATE], 7, 4)]
        unseen = [*pieces(cities[30 * RATE :], 7, 7), *pieces(endgame[16 * RATE :], 6, 6), beckett]
        self.held = [self.features(x) for x in unseen]
        self.sizes = [len(x) // FRAMES for x in unseen]
        self.frames = [self.encode(x) for x in self.held]
        self.said = [self.transcribe(x) for x in self.held]
        self.calibration = []
        for x in map(self.features, seen):
            words = self.processor.tokenizer(self.transcribe(x)).input_ids
            self.calibration.append({"input_features": x, "decoder_input_ids": torch.tensor([words])})

    def features(self, samples: np.ndarray) -> Tensor:
        return self.processor(samples, sampling_rate=RATE, return_tensors="pt").input_features

    @torch.no_grad()
    def encode(self, features: Tensor) -> Tensor:
        return self.model.model.encoder(features).last_hidden_state[0]

    @torch.no_grad()
    def transcribe(self, features: Tensor) -> str:
        how = {"max_new_tokens": 120, "language": "en", "task": "transcribe", "num_beams": 1, "do_sample": False}
        return self.processor.batch_decode(self.model.generate(features, **how), skip_special_tokens=True)[0]

    def figures(self) -> dict[str, float]:
        """Of the model as it is: cosine of the frames that hold speech, and the rate of words that differ."""
        triples = zip(self.frames, self.held, self.sizes, strict=True)
        same = [torch.cosine_similarity(truth[:n], self.encode(x)[:n], dim=-1).mean().item() for truth, x, n in triples]
        counts = [word_errors(a, self.transcribe(x)) for a, x in zip(self.said, self.held, strict=True)]
        wrong, words = (sum(column) for column in zip(*counts, strict=True))
        return {"cosine": sum(same) / len(same), "word_error_rate": wrong / words, "words": words}

    def seconds(self) -> float:
        """Of the encoder, the best of several."""
        return best_times({"encoder": lambda: self.encode(self.held[0])}, repeats=5, budget=4.0)["encoder"]

    def row(self, recipe: Recipe | Target) -> dict[str, Any]:
        """Convert, measure, and take it back."""
        plain = self.seconds()
        began = time.process_time()
        conversion = convert(self.model, recipe, self.calibration, parts=["encoder"])
        spent = time.process_time() - began
        row: dict[str, Any] = {**self.figures(), "convert_seconds": spent, "plan": str(conversion.plan)}
        row["time"] = self.seconds() / plain
        report = conversion.report
        if report is not None:
            row |= {"kept": report.verified.quality.retained, "met": report.met, "reasons": report.reasons}
        conversion.revert()
        return row


@experiment(
    claim="Ours: with a kernel beside a window the encoder of a speech model is linear, and its transcripts stay; "
    "`keep=0.98` finds such a choice by itself.",
    ours="Whisper tiny, 82 seconds of speech, 66 words",
    quick="fits maps to 1,500 frames of thirteen pieces, four times",
    needs=("transformers", "onnx"),
)
def measure(store: Store) -> None:
    with quietly():
        speech = Speech()
    for name, recipe in RECIPES.items():
        store.cell(name, lambda r=recipe: speech.row(r))


def judge(found: Any) -> Said:
    window, kernel, target = found["window 32, sink"], found["window 32, sink, landmark m=64"], found["keep 0.98"]
    good = kernel["word_error_rate"] < window["word_error_rate"] / 4 and target["met"]
    rates = {"window alone": window, "and landmark m = 64": kernel, "`keep=0.98`": target}
    return Said(
        "word error rate to the original's transcript: "
        + ", ".join(f"{n} {row['word_error_rate']:.3f}" for n, row in rates.items())
        + f"; the target retains {target['kept']:.1%} on validation pieces.",
        kept(good),
        "the kernel does not pay, or the target is missed",
    )
