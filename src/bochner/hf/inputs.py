"""What a model is run on: texts, arrays and batches as its inputs, and how many tokens it has positions for."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bochner._checks import BochnerError, extra

POSITION_NAMES = ("posit", "wpe")  # of tables of positions, in all families
SENSES = ("pixel_values", "input_features", "input_values")  # beside these, token ids may stand for something else


def positions(model: Any) -> dict[str, int]:
    """How many tokens of an input a model has a table of positions for, by the input's name; rotary models have none.

    The table lies beside that of the tokens. Some families count from behind the number of the padding token (RoBERTa,
    ESM), some from an offset (OPT, BART): so many rows are never used.
    """
    words, found = _words(model), dict[str, int]()
    if words is None:
        return {}
    for path, module in model.named_modules():
        tables = {name: x for name, x in module.named_children() if isinstance(x, nn.Embedding)}
        if not any(x.num_embeddings == words.num_embeddings for x in tables.values()):
            continue
        decodes = getattr(model.config, "is_encoder_decoder", False) and "decoder" in path.split(".")
        side = "decoder_input_ids" if decodes else "input_ids"
        for name, table in tables.items():
            if any(part in name for part in POSITION_NAMES):
                unused = max(getattr(table, "offset", 0), -1 if table.padding_idx is None else table.padding_idx + 1, 0)
                found[side] = min(found.get(side, 2**31), table.num_embeddings - unused)
    return found


def _words(model: Any) -> nn.Embedding | None:
    """The table of a model's tokens, if it has one."""
    try:
        words = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    return words if isinstance(words, nn.Embedding) else None


def trained_positions(model: Any) -> int | None:
    """How many tokens a model was made for, as its configuration says; beyond them it may run and be worse."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(text, "max_position_embeddings", None)


def has_rotary_positions(model: Any) -> bool:
    """Whether queries and keys are rotated by positions that can be given, so that attention sees distances alone."""
    rotates = any("RotaryEmbedding" in type(module).__name__ for module in model.modules())
    return rotates and "position_ids" in inspect.signature(model.base_model.forward).parameters


def batches(
    calibration: Any,
    tokenizer: Any,
    *,
    model: Any = None,
    max_length: int = 256,
    batch_size: int = 8,
    labels: bool = False,
) -> list[dict[str, Tensor]]:
    """Calibration data as model inputs: texts (with a tokenizer), one batch, or a sequence of batches.

    `model`: texts are cut to its positions, and without a tokenizer take the one stored beside it; its decoder, if it
    has an encoder too, gets inputs from the labels. `labels`: leave them in their batches.
    """
    items = listed(calibration, model)
    if all(isinstance(t, str) for t in items):
        most = positions(model).get("input_ids", max_length)
        return tokenized(items, tokenizer, model, min(max_length, most), batch_size)
    found = [with_decoder_inputs(model, as_tensors(model, dict(b))) for b in items]
    for batch in found:
        check(model, batch)
    return [{k: v for k, v in b.items() if labels or k != "labels"} for b in found]


def is_several(data: Any) -> bool:
    """Whether data is a list or another iterable, and not one text, array or batch."""
    return hasattr(data, "__iter__") and not isinstance(data, (str, Tensor, np.ndarray)) and not hasattr(data, "keys")


def listed(calibration: Any, model: Any = None) -> list[Any]:
    """Calibration data as a list of texts or of batches."""
    items, article = [calibration], ""
    if is_several(calibration):
        items, article = list(calibration), "a list of "
    if not items:
        raise BochnerError("The 'data' is empty; give some texts of the kind the model will see.")
    if all(isinstance(x, str) for x in items) or all(hasattr(x, "keys") for x in items):
        return items
    kinds = " and ".join(sorted({type(x).__name__ for x in items}))
    raise BochnerError(
        f"The 'data' must be texts or batches, dicts of tensors by the names of the model's inputs, got {article}"
        f"{kinds}: name them, as in {{{getattr(model, 'main_input_name', 'input_ids')!r}: x}}."
    )


def tokenized(
    texts: Sequence[str], tokenizer: Any, model: Any, max_length: int, batch_size: int
) -> list[dict[str, Tensor]]:
    """Texts as batches, each cut to `max_length` tokens."""
    tokenizer = tokenizer or _tokenizer_beside(model)
    if tokenizer is None:
        raise BochnerError(
            "Calibration texts need a 'tokenizer'; pass the model's, or pass tokenized batches, as in "
            "[{'input_ids': ids}, ...]."
        )
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise BochnerError("The texts of 'data' are empty; give some of the kind that the model will see.")
    found = []
    size = batch_size if getattr(tokenizer, "pad_token", None) is not None else 1
    for start in range(0, len(texts), size):
        some = list(texts[start : start + size])
        encoded = tokenizer(some, return_tensors="pt", truncation=True, max_length=max_length, padding=size > 1)
        found.append(with_decoder_inputs(model, {k: v for k, v in encoded.items() if isinstance(v, Tensor)}))
    return found


def as_tensors(model: Any, batch: dict[str, Any]) -> dict[str, Tensor]:
    """A batch of tensors: arrays and lists of numbers become some, one sequence alone a batch of one.

    What else a tokenizer or a data set puts there is left out, unless the model asks for it by name.
    """
    found = {}
    for name, value in batch.items():
        if isinstance(value, (np.ndarray, list, tuple)):
            try:
                rows = isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor)
                value = torch.stack(list(value)) if rows else torch.as_tensor(value)
            except (ValueError, TypeError, RuntimeError):
                if name in _parameters(model):
                    raise BochnerError(
                        f"The {name!r} of a batch of 'data' must be a tensor or an array of numbers: pad its rows "
                        "to one length, as a tokenizer does with padding=True."
                    ) from None
            else:
                value = value.to(torch.get_default_dtype()) if value.is_floating_point() else value
        if isinstance(value, Tensor):
            found[name] = value
    if not found.keys() - {"labels"}:
        raise BochnerError(
            f"A batch of 'data' holds no inputs, but {list(batch)[:6]}: give dicts of tensors, as in "
            f"{{{getattr(model, 'main_input_name', 'input_ids')!r}: x}}."
        )
    alone = all(x.ndim == 1 for name, x in found.items() if name != "labels")
    return {name: x[None] if alone and x.ndim == 1 else x for name, x in found.items()}


def _parameters(model: Any) -> set[str]:
    forward = getattr(model, "forward", None)
    return set() if forward is None else set(inspect.signature(forward).parameters)


def with_decoder_inputs(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """A batch of an encoder-decoder with inputs for its decoder, where it has none.

    The labels moved on by one token, as the model itself does; without labels the text that it reads, and beside sounds
    and pictures the token that it begins with.
    """
    asked = _parameters(model)
    if "decoder_input_ids" not in asked or {"decoder_input_ids", "decoder_inputs_embeds"} & batch.keys():
        return batch
    configs = (model.config, getattr(model, "generation_config", None))
    names = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
    tokens = (getattr(config, name, None) for config in configs for name in names)
    start = next((int(token) for token in tokens if token is not None), None)
    if start is None:
        raise BochnerError(
            f"The batches of 'data' need inputs for the decoder of {type(model).__name__}: add 'decoder_input_ids'."
        )
    labels = batch.get("labels")
    if labels is not None and (labels.ndim != 2 or labels.is_floating_point()):
        labels = None
    source = batch.get("input_ids") if labels is None else labels
    if source is None:
        return {**batch, "decoder_input_ids": torch.full((len(next(iter(batch.values()))), 1), start)}
    own = getattr(model, "prepare_decoder_input_ids_from_labels", None) or getattr(model, "_shift_right", None)
    if own is None:
        known = source[:, :-1].masked_fill(source[:, :-1] == -100, getattr(model.config, "pad_token_id", None) or 0)
        shifted = torch.cat([torch.full_like(source[:, :1], start), known], dim=1)
    else:
        shifted = own(source)
    moved = {**batch, "decoder_input_ids": shifted}
    if labels is not None and "decoder_attention_mask" in asked and (labels == -100).any():
        moved.setdefault("decoder_attention_mask", (labels != -100).long())
    return moved


def check(model: Any, batch: dict[str, Tensor]) -> None:
    """Refuse token ids that the model does not know and sequences that it has no positions for."""
    for name, most in positions(model).items():
        if name in batch and batch[name].ndim == 2 and batch[name].shape[1] > most:
            raise BochnerError(
                f"The {name!r} of a batch of 'data' have {batch[name].shape[1]} tokens, and "
                f"{type(model).__name__} has positions for {most}: cut them."
            )
    ids, words = batch.get("input_ids"), _words(model)
    if words is None or ids is None or any(name in batch for name in SENSES):
        return
    if not ids.numel():
        raise BochnerError("The 'input_ids' of a batch of 'data' hold no tokens: leave empty texts out.")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= words.num_embeddings:
        raise BochnerError(
            f"The 'input_ids' of a batch of 'data' must be in [0, {words.num_embeddings}), the tokens of "
            f"{type(model).__name__}, got {low} to {high}: take the model's own tokenizer."
        )


def stream(data: Sequence[dict[str, Tensor]]) -> Tensor:
    """The tokens of a language model's texts, one after another, without padding."""
    if any("input_ids" not in b for b in data):
        raise BochnerError(
            "A language model is judged by the tokens that it predicts: give texts or 'input_ids' as data, got batches "
            f"of {sorted(data[0])}."
        )
    found = []
    for batch in data:
        mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
        found += [row[keep.bool()] for row, keep in zip(batch["input_ids"], mask, strict=True)]
    return torch.cat(found)


def first_row(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The first example of a batch."""
    return {k: v[:1] for k, v in batch.items()}


def _tokenizer_beside(model: Any) -> Any:
    path = getattr(getattr(model, "config", None), "_name_or_path", "")
    if not path:
        return None
    try:
        return extra("transformers", "hf", "bochner.hf").AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception:  # whatever is wrong with it, the caller is told to pass one
        return None
