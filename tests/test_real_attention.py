"""The claim that matters: on the heads of a real pretrained model, calibration makes random features worth using."""

from __future__ import annotations

from statistics import mean

import pytest
import torch

from bochner import data, feature_map, linear_attention

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def heads():
    """Scaled queries and keys, and values, of every layer of all-MiniLM-L6, on two disjoint sets of paragraphs."""
    transformers = pytest.importorskip("transformers")
    try:
        path = data.fetch("minilm", quiet=True)
    except data.ArtefactUnavailable as reason:
        pytest.skip(str(reason))
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModel.from_pretrained(path, attn_implementation="eager").eval()
    layers = model.encoder.layer
    captured: list = []
    for i, layer in enumerate(layers):
        attention = layer.attention.self

        def note(module, args, i=i):
            x = args[0]
            shape = (*x.shape[:-1], module.num_attention_heads, module.attention_head_size)
            q, k, v = (f(x).view(shape).transpose(1, 2) for f in (module.query, module.key, module.value))
            root = module.attention_head_size**-0.25
            captured.append((i, (q * root, k * root, v)))

        attention.register_forward_pre_hook(note)

    def run(split, count):
        captured.clear()
        for text in data.paragraphs(split, count):
            model(**tokenizer(text, return_tensors="pt", truncation=True, max_length=150))
        return [[t for j, t in captured if j == i] for i in range(len(layers))]

    with torch.no_grad():
        return run("calibration", 24), run("heldout", 16)


def mean_error(heads, name: str, m: int, seed: int = 0) -> float:
    """Relative error of the attention output on held-out text, averaged over the 72 heads."""
    calibration, heldout = heads
    errors = []
    for layer, (seen, unseen) in enumerate(zip(calibration, heldout, strict=True)):
        wrong = total = 0
        phi = None
        if name != "uniform":
            phi = feature_map(name, dim=32, num_features=m, num_heads=12, seed=100 * seed + layer)
            phi.calibrate_(*([t[i] for t in seen] for i in range(2)))
        for q, k, v in unseen:
            exact = (q @ k.mT).softmax(-1) @ v
            if phi is None:
                out = v.mean(-2, keepdim=True).expand_as(exact)
            else:
                out = linear_attention(q, k, v, phi, scale=1.0)
            wrong = wrong + (out - exact).square().sum((0, 2, 3))
            total = total + exact.square().sum((0, 2, 3))
        errors.append((wrong / total).sqrt())
    return torch.stack(errors).mean().item()


def test_calibrated_features_do_what_many_more_plain_ones_do(heads):
    with torch.no_grad():
        uniform = mean_error(heads, "uniform", 0)
        plain = {m: mean(mean_error(heads, "positive", m, seed) for seed in (0, 1)) for m in (256, 1024)}
        calibrated = {m: mean(mean_error(heads, "calibrated", m, seed) for seed in (0, 1)) for m in (64, 256)}
    print(f"uniform {uniform:.3f}, positive {plain}, calibrated {calibrated}")
    assert calibrated[64] < plain[1024]
    assert calibrated[256] <= 0.58
    assert plain[256] > 0.9 * uniform  # plain FAVOR+ is hardly better than averaging
