"""A SentenceTransformer with linear attention: how close its embeddings stay, on texts that it was not fitted to.

python examples/sentence_encoder.py [DIRECTORY]
"""

import sys

import torch
from sentence_transformers import SentenceTransformer

import bochner


def main(directory: str | None = None) -> float:
    model = SentenceTransformer(directory or str(bochner.data.fetch("minilm")), device="cpu")
    texts = bochner.data.paragraphs("calibration", 16)
    heldout = bochner.data.paragraphs("heldout", 8)
    before = model.encode(heldout, convert_to_tensor=True)

    recipe = bochner.Recipe("landmark", 16, window=32, sinks=1)
    conversion = bochner.convert(model, recipe, texts, progress=True)  # its tokenizer is known
    print(conversion.plan)

    after = model.encode(heldout, convert_to_tensor=True)
    cosine = float(torch.nn.functional.cosine_similarity(before, after).mean())
    print(f"mean cosine to the original embeddings: {cosine:.3f}")

    conversion.save_pretrained("conversion")  # the plan and the maps, to be loaded onto the original
    conversion.revert()
    bochner.convert(model, "conversion")
    again = model.encode(heldout, convert_to_tensor=True)
    print("loaded again, the same:", bool(torch.allclose(after, again, atol=1e-5)))
    return cosine


if __name__ == "__main__":
    main(*sys.argv[1:2])
