"""Speech: which symbols is a Mandarin syllable written with? 2,358 recordings of two speakers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from bochner import data
from bochner._checks import BochnerError, extra
from bochner.tasks.base import IGNORE, Preset, cut, ends, shuffled, stored

BANDS = 64
RATE = 44_100
HOP, FRAME, BINS = 220, 1024, 1024  # 5 ms


@dataclass(eq=False)
class Syllables(Dataset):
    """Logarithmic mel spectra (n, bands) and symbols (k,), numbered from 1: 0 is the blank."""

    frames: list[np.ndarray]
    symbols: list[np.ndarray]

    def __len__(self) -> int:
        return len(self.frames)

    def __getitem__(self, i: int) -> dict[str, Any]:
        labels = torch.from_numpy(self.symbols[i].astype(np.int64))
        return {"input_features": torch.from_numpy(self.frames[i]), "labels": labels}


def load(preset: Preset, split: str) -> Syllables:
    """Both recordings of a syllable are in the same split: those tested on were never heard."""
    arrays = stored("speech-1", _read)
    syllable = arrays["syllable"]
    order = shuffled(int(syllable.max()) + 1, 0)
    chosen = np.flatnonzero(np.isin(syllable, cut(order, split, len(order) // 10)))
    frames, symbols = (np.split(arrays[a], arrays[b][1:-1]) for a, b in (("frames", "starts"), ("symbols", "ends")))
    return Syllables([frames[i][: preset.length] for i in chosen], [symbols[i] for i in chosen])


def alphabet() -> list[str]:
    """The symbols, in the order of their numbers from 1."""
    return [chr(c) for c in stored("speech-1", _read)["alphabet"]]


def collate(items: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """A batch of recordings, padded to the longest."""
    features, labels = ([x[name] for x in items] for name in ("input_features", "labels"))
    mask = [torch.ones(len(x), dtype=torch.int64) for x in features]
    return {
        "input_features": pad_sequence(features, batch_first=True),
        "attention_mask": pad_sequence(mask, batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORE),
    }


def _read() -> dict[str, np.ndarray]:
    soundfile = extra("soundfile", "train", "The task 'speech', which reads Ogg files,")
    from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

    range_: dict[str, Any] = {"min_frequency": 80.0, "max_frequency": 8_000.0, "sampling_rate": RATE}
    filters = mel_filter_bank(num_frequency_bins=BINS // 2 + 1, num_mel_filters=BANDS, **range_)
    window = window_function(FRAME, "hann")
    names = sorted(p.name for p in data.fetch("syllables").iterdir() if p.is_dir())
    letters = sorted({c for name in names for c in name})
    frames, symbols, syllable = [], [], []
    for number, name in enumerate(names):
        for path in sorted((data.fetch("syllables") / name).glob("*.ogg")):
            sound, rate = soundfile.read(path, dtype="float32")
            if rate != RATE or sound.ndim != 1 or len(sound) < FRAME:
                raise BochnerError(f"The recording {path.name} of {name} is not mono at {RATE} Hz: {rate} Hz.")
            mel = spectrogram(sound, window, FRAME, HOP, fft_length=BINS, power=2.0, mel_filters=filters, log_mel="log")
            mel = mel.T
            frames.append(((mel - mel.mean()) / mel.std()).astype(np.float32))
            symbols.append([1 + letters.index(c) for c in name])
            syllable.append(number)
    return {
        "frames": np.concatenate(frames),
        "starts": ends(frames),
        "symbols": np.concatenate(symbols),
        "ends": ends(symbols),
        "syllable": np.array(syllable),
        "alphabet": np.array([ord(c) for c in letters]),
    }
