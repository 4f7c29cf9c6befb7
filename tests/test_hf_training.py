"""Maps that are trained with their model: seen by the optimizer, saved, loaded, redrawn on schedule."""

from __future__ import annotations

import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from hf_models import GROUPED, TEXT, Labelled, build, inputs  # noqa: E402

from bochner import BochnerError, Conversion, Recipe, convert  # noqa: E402
from bochner._checks import spawn_seed  # noqa: E402
from bochner.hf import layers_of, parameter_groups  # noqa: E402

LEARNED = ["gmm_prf", "fastfood_prf", "generative_prf", "hedgehog", "calibrated"]
SETTINGS = {**TEXT, "attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}


def classifier(feature_map: str = "gmm_prf", **options: Any) -> Any:
    model = build("bert", SETTINGS, head="AutoModelForSequenceClassification")
    return convert(model, Recipe(feature_map, 8, trainable=True, **options)).model


def map_parameters(model: Any) -> dict[str, torch.nn.Parameter]:
    return {n: p for n, p in model.named_parameters() if ".linear_attn." in n}


PAPER = {"gmm_prf": {"shared_noise": True}, "generative_prf": {"residual": False}}  # options, to the letter
SPELLED = [*((name, {}) for name in LEARNED), *PAPER.items()]


@pytest.mark.parametrize(("feature_map", "options"), SPELLED)
def test_learned_maps_are_trained_saved_and_loaded(feature_map: str, options: dict, tmp_path: Path) -> None:
    model = classifier(feature_map, options=options)
    x = inputs(model)
    found = map_parameters(model)
    assert found
    assert all(p.requires_grad for p in found.values())
    assert found.keys() <= model.state_dict().keys()
    before = {n: p.detach().clone() for n, p in found.items()}
    optimizer = torch.optim.AdamW(parameter_groups(model, 1e-2, map_lr=1e-1))
    model.train()
    for _ in range(3):
        optimizer.zero_grad()
        model(**x, labels=torch.tensor([0, 1])).loss.backward()
        optimizer.step()
    model.eval()
    assert not [n for n, p in found.items() if torch.equal(p, before[n])]
    with torch.no_grad():
        assert model(**x).logits.isfinite().all()
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    assert Conversion.of(loaded).plan == Conversion.of(model).plan
    with torch.no_grad():
        assert torch.equal(loaded(**x).logits, model(**x).logits)
    again = map_parameters(loaded)
    assert again.keys() == found.keys()
    assert all(p.requires_grad for p in again.values())


def test_a_function_that_cannot_be_saved_is_refused() -> None:
    with pytest.raises(BochnerError, match=r"option 'f' of .* is a function, which no file can hold"):
        classifier("generalized", options={"f": lambda x: x})


@pytest.mark.parametrize("f", ["softplus", torch.nn.functional.softplus])
def test_functions_of_torch_are_saved_by_their_names(f: Any, tmp_path: Path) -> None:
    model = classifier("generalized", options={"f": f}).eval()
    assert {dict(layer.fates[0].options)["f"] for layer in Conversion.of(model).plan.layers} == {"softplus"}
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    phi = layers_of(loaded)[Conversion.of(loaded).plan.layers[0].name].parts["kernel"].phi
    assert phi.function is torch.nn.functional.softplus
    assert phi.positive
    x = inputs(model)
    with torch.no_grad():
        assert torch.equal(loaded(**x).logits, model(**x).logits)


@pytest.mark.parametrize("f", ["softer", "conv2d", "pi"])
def test_names_of_no_function_of_a_tensor_are_refused(f: str) -> None:
    with pytest.raises(BochnerError, match="The 'f' of FunctionFeatures"):
        classifier("generalized", options={"f": f})


def test_a_decoder_is_trained_too() -> None:
    model = build("llama", GROUPED, head="AutoModelForCausalLM")
    convert(model, Recipe("gmm_prf", 8, window=4, sinks=1, trainable=True))
    x = inputs(model)
    model.train()
    model(**x, labels=x["input_ids"]).loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in map_parameters(model).values())


def test_random_maps_have_no_parameters_but_are_part_of_the_model() -> None:
    model = classifier("positive")
    assert not map_parameters(model)
    assert any("linear_attn" in name for name in model.state_dict())


def test_maps_of_a_converted_model_are_not_trained_unless_asked() -> None:
    model = convert(build("bert", TEXT), Recipe("gmm_prf", 8)).model
    assert map_parameters(model)
    assert not any(p.requires_grad for p in map_parameters(model).values())


def test_parameter_groups_list_everything_once_and_decay_no_map() -> None:
    model = classifier()
    groups = parameter_groups(model, 1e-3, map_lr=1e-2, weight_decay=0.1)
    places = {id(p): group for group in groups for p in group["params"]}
    assert sum(len(group["params"]) for group in groups) == len(places) == len(list(model.parameters()))
    maps = {id(p) for p in map_parameters(model).values()}
    for p in model.parameters():
        group = places[id(p)]
        assert group["lr"] == (1e-2 if id(p) in maps else 1e-3)
        assert group["weight_decay"] == (0.1 if p.ndim > 1 and id(p) not in maps else 0.0)


def noise(model: Any) -> list[torch.Tensor]:
    return [layer.map_norm["kernel"].phi.projection.weight.clone() for layer in layers_of(model).values()]


def test_seeds_of_parts_do_not_collide() -> None:
    keys = [(seed, step, layer) for seed in range(20) for step in range(20) for layer in range(20)]
    assert len({spawn_seed(*key) for key in keys}) == len(keys)
    assert len({spawn_seed(0), spawn_seed(0, 0), spawn_seed(0, 0, 0)}) == 3
    assert all(0 <= spawn_seed(s, 1) < 2**63 for s in range(100))
    for one, other in ((0, 1000), (1000, 0)):  # what seed + 1000 * layer could not tell apart
        assert spawn_seed(one, 1) != spawn_seed(other, 0)


def trained(folder: Path, *, resume: bool = False, checkpointing: bool = False) -> tuple[Any, list[list[torch.Tensor]]]:
    """A model after 6 steps with redraws every 2, and the frequencies at the end of every step."""
    model = classifier(options={"redraw_every": 2})
    if checkpointing:
        model.gradient_checkpointing_enable()
    seen: list[list[torch.Tensor]] = []

    class Watch(transformers.TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            seen.append(noise(model))

    arguments = transformers.TrainingArguments(
        str(folder), max_steps=6, per_device_train_batch_size=4, learning_rate=1e-2, report_to=[], use_cpu=True,
        disable_tqdm=True, save_strategy="steps", save_steps=3, logging_strategy="no", seed=1,
    )  # fmt: skip
    trainer = transformers.Trainer(model, arguments, train_dataset=Labelled(24), callbacks=[Watch()])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-3") if resume else None)
    return model, seen


def test_a_resumed_run_redraws_and_ends_like_one_that_was_not_stopped(tmp_path: Path) -> None:
    whole, draws = trained(tmp_path)
    assert len(draws) == 6
    same = [all(torch.equal(x, y) for x, y in zip(a, b, strict=True)) for a, b in pairwise(draws)]
    assert same == [True, False, True, False, True]  # new ones for steps 3 and 5
    assert not torch.equal(*draws[0])  # each layer has its own
    resumed, rest = trained(tmp_path, resume=True)
    assert len(rest) == 3
    for a, b in zip(draws[3:], rest, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    want, got = whole.state_dict(), resumed.state_dict()
    assert want.keys() == got.keys()
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, atol=1e-6, rtol=1e-5, msg=name)


def test_gradient_checkpointing_changes_neither_draws_nor_weights(tmp_path: Path) -> None:
    (whole, draws), (less, again) = (trained(tmp_path / str(c), checkpointing=c) for c in (False, True))
    assert all(torch.equal(x, y) for a, b in zip(draws, again, strict=True) for x, y in zip(a, b, strict=True))
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(less.state_dict()[name], value, atol=1e-6, rtol=1e-5, msg=name)
