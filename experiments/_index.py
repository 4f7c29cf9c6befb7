"""Every figure, table and numbered statement of the five papers: what judges it, its baseline, its sizes, its verdict.

An item takes its verdict from the stored result of an experiment, or states one whose evidence are tests, by name. A
test refuses a verdict with neither. "not tried" needs a reason and no evidence.
"""

from __future__ import annotations

from dataclasses import dataclass

STATED, SIMULATED = "a statement", "simulated or enumerated, small d"
PRINTED = "the printed formula"


@dataclass(frozen=True)
class Item:
    """One figure, table or statement of a paper."""

    label: str
    title: str
    experiment: str = ""  # whose stored result judges it
    verdict: str = ""  # instead of the experiment's, or of an item without one
    why: str = ""
    tests: tuple[str, ...] = ()  # names of test functions
    baseline: str = ""  # what the claim is measured against
    paper: str = ""  # sizes; those that the experiment declares unless given
    ours: str = ""
    limits: str = ""  # what of the item its experiment leaves out: what holds there is then reproduced in part
    page: str = ""  # of the documentation, that says more


@dataclass(frozen=True)
class Paper:
    key: str
    title: str
    items: tuple[Item, ...]


def statement(label: str, title: str, verdict: str, *tests: str, why: str = "", page: str = "errata.md") -> Item:
    """A lemma, theorem or equation, judged by tests."""
    return Item(label, title, "", verdict, why, tests, PRINTED, STATED, SIMULATED, page=page)


def untried(label: str, title: str, why: str, page: str = "") -> Item:
    return Item(label, title, verdict="not tried", why=why, page=page)


DRAWING = "a drawing of the method; ours is on the page How it works"
# Seconds of a step of six layers of width 512 with positive features, one sequence and one thread: `train_speed`.
DAYS = "a step of six layers of its width over one sequence of {} tokens takes {} s of a core here (Figure {}). {}"
NO_MODEL = "the model or the data is not in a package registry: {}"
PARAMETERS = "a list of settings, not a result; ours are the presets of `bochner train`"
SPEED, TABLE, PROTEINS = "results-attention.md", "results-attention.md", "results-attention.md"
VALUES = "exact attention by torch, and attention that only returns the values"
ONE_THREAD = "the paper's sizes on one thread, one sequence a step, lengths up to 8,192; memory and the peers with one layer only"

# fmt: off
PAPERS = (
    Paper("000", "Data Mining Problems (Lucyszyn, 2025)", (
        Item("Section 1.3", "time of exact and sketched polynomial attention", "polynomial_timings", baseline="exact kernel"),
        statement("Results 1, 2", "sum decomposition is unbiased; its error", "partly", "test_sum_decomposition_has_its_error", "test_000_eq_7_lacks_a_square", why="unbiased as stated; eq. 7 lacks a square"),
        statement("Results 3, 4", "absolute and relative errors of sum decomposition, and their tails", "partly", "test_chebyshev_bounds_the_tails_of_polynomial_features", "test_features_for_a_tail_keep_it", why="hold with the corrected error of Result 2"),
        statement("Result 5", "TensorSketch is unbiased; a bound of its error", "partly", "test_tensor_sketch_has_its_exact_error", "test_000_eq_21_is_false_and_avrons_bound_holds", "test_000_eq_16_needs_more_than_pairwise_independent_signs", why="unbiased; the bound of eq. 21 is false beyond degree 1, and signs must be 4-wise independent"),
        statement("Results 6, 7", "absolute and relative errors of TensorSketch, and their tails", "partly", "test_chebyshev_bounds_the_tails_of_polynomial_features", "test_features_for_a_tail_keep_it", why="false as printed, for they rest on eq. 21; hold with the exact variance"),
        statement("Results 8-12", "linearised feed-forward layers", "partly", "test_layer_has_its_polynomial_as_mean_and_its_variance", "test_bernstein_error_stays_below_its_bound_and_reaches_half_of_it", "test_taylor_composition_is_unbiased_with_its_variance", "test_000_eq_43_is_exceeded_by_the_bernstein_polynomial", "test_000_algorithm_1_reaches_three_times_its_target", why="mean and variance hold with corrected constants; on a trained transformer the layers do not pay", page="results-attention.md"),
        Item("Section 2.1, remark", "iterated Bernstein operators", "iterated_bernstein", baseline="the plain operator; Chebyshev, least-squares and Taylor fits of the same degree"),
        statement("Result 13", "smoothed local masks", "partly", "test_000_eq_72_misses_the_normaliser", "test_000_the_spectrum_of_an_indicator_is_not_integrable", "test_000_eq_66_to_80_disagree_about_one_over_m", why="unbiased with a corrected normaliser and a mollified mask; thousands of features are needed", page="which-map.md"),
        Item("Problem 4", "masks of the queries themselves, with their cost", "query_masks", baseline="exact masked attention, the mean of the values", page="which-map.md"),
    )),
    Paper("001", "Hybrid Random Features (Choromanski et al., 2022)", (
        statement("Lemma 2.2", "errors of trigonometric and hyperbolic features", "reproduced", "test_errors_equal_their_closed_form"),
        statement("Lemmas 2.3, 2.4", "features of a hybrid; complex exponential estimators", "reproduced", "test_the_general_hybrid_of_two_bases_is_the_bipolar_one", "test_a_complex_exponential_is_unbiased_with_the_mse_of_its_matrix"),
        statement("Eq. (17), (18)", "where complex exponential estimators have no variance", "partly", "test_a_complex_exponential_has_no_variance_where_its_two_changed_arguments_cancel", "test_001_eq_18_is_no_relaxation", why="eq. (17) holds; eq. (18), its relaxation, is none"),
        statement("Theorems 3.1, D.1", "error of the bipolar and of the angular hybrid", "reproduced", "test_the_angular_hybrid_is_unbiased_with_the_mse_of_theorem_3_1", "test_shared_projections_have_the_covariance_of_theorem_3_1"),
        statement("Lemma 3.2", "moments of the angular coefficient", "reproduced", "test_angular_coefficient_has_its_moments"),
        statement("Lemma 3.4", "largest relative errors on a sphere", "reproduced", "test_sphere_errors_are_the_maxima_over_angles"),
        statement("Theorem 3.5, eq. (27)", "a bound of the largest relative error of the angular hybrid", "partly", "test_theorem_3_5_bounds_the_angular_hybrid", "test_001_eq_27_is_exceeded_at_large_radius", why="as printed it is exceeded from r = 4.2 on, the one its proof gives holds"),
        Item("Theorem 3.5, limits", "limits of the relative error of the angular hybrid", "angular_limits", baseline="trig, FAVOR+ of eq. (3); the stated limits", tests=("test_angular_error_has_the_limits_of_theorem_3_5",)),
        statement("Theorems F.1, F.2", "error of the Gaussian hybrid", "reproduced", "test_the_gaussian_hybrid_is_unbiased_with_the_mse_of_theorem_f_1", "test_gaussian_coefficient_has_its_moments"),
        statement("Definitions H.1, H.2", "hybrids for clusters, with Gaussian and zero-one coefficients", "partly", "test_each_pair_of_clusters_has_the_mse_of_its_matrix", "test_the_expansion_of_a_gaussian_coefficient_has_the_softmax_kernel_of_minus_y", why="eq. (93) has the wrong sign of y, and with complex A no bounded coefficient"),
        Item("Section 2.4, M_k", "Gaussian coefficients with general M_k", "gaussian_coefficients", baseline="FAVOR+ of eq. (3), as many projections and equal length"),
        Item("Section 2.4, massive pairs", "clusters for the most massive pairs, a default for the rest", "massive_pairs", baseline="FAVOR+ of eq. (3), as many projections and equal length"),
        Item("Figure 1", "error of three estimators by length and angle", "hybrid_surface", baseline="trig, hyperbolic"),
        Item("Figure 2", "pointwise estimates by angle, lengths 1 and 1.5", "hybrid_angles", baseline="trig, FAVOR+ of eq. (3)"),
        Item("Table 1", "estimators on the wine and Boston tables", "quasi_random_table", baseline="trig, positive, eq. (3) on four projections"),
        Item("Figure 3", "softmax of a language model, Penn Treebank", "softmax_metrics", baseline="trig, FAVOR+ of eq. (3)"),
        Item("Table 2", "error rate of a Conformer", "train_conformer", baseline="FAVOR+ as eq. (3), trigonometric features; exact attention and none", page=TABLE),
        Item("Figure 4, left", "policies with implicit attention", "attention_policies", baseline="exact attention, FAVOR+, no attention"),
        untried("Figure 4, right", "robotic-arm manipulation", NO_MODEL.format("the simulator and its demonstrations")),
        Item("Figure 5", "pointwise estimates by angle, lengths 1, 1.25 and 1.5", "hybrid_angles", baseline="trig, FAVOR+ of eq. (3)"),
        Item("Figure 6", "clustered data", "clustered_table", baseline="trig, FAVOR+ of eq. (3)"),
        Item("Table 3", "clustered data, smallest and largest errors", "clustered_table", baseline="trig, FAVOR+ of eq. (3)"),
        Item("Table 4", "softmax of a language model, ten runs", "softmax_metrics", baseline="trig, FAVOR+ of eq. (3)"),
        Item("Figure 7", "lengths of keys and queries, Penn Treebank", "softmax_metrics", "partly", "histograms of another model on another corpus; the paper claims no figure", baseline="the histograms that the paper shows"),
        Item("Figure 8", "softmax of a language model, WikiText-2", "softmax_metrics", baseline="trig, FAVOR+ of eq. (3)"),
        Item("Table 5", "softmax of a language model, WikiText-2", "softmax_metrics", baseline="trig, FAVOR+ of eq. (3)"),
        Item("Figure 9", "lengths of keys and queries held near 1 by eq. (105)", "softmax_metrics", "partly", "histograms of another model on another corpus; the paper claims no figure", baseline="the histograms that the paper shows"),
        Item("Figure 10", "training with a sampled softmax", "sampled_softmax", baseline="exact training, uniform sampling", page="sampling.md", limits="keys of 64 for 200, one epoch for 80, one run for 25, the Brown corpus for Penn Treebank. `--set path=FILE` takes another corpus"),
        untried("Figure 11", "camera image of the manipulation task", "an illustration of the task"),
    )),
    Paper("002", "Improved algorithms for kernel matrix-vector multiplication under sparsity assumptions (2025)", (
        Item("Theorem 1.1", "error and time of the product", "kernel_product_time", baseline="the exact product", page="results-kernels.md"),
        Item("Algorithms 1-3", "run time against n, and the error", "kernel_product_time", baseline="the exact product", page="results-kernels.md"),
        statement("Section 1.2", "|Kx| >= |x|", "not", "test_002_a_kernel_matrix_of_queries_and_keys_need_not_expand", why="needs queries equal to keys, which the paper does not assume"),
        statement("Lemma 3.2", "large entries exactly, small ones dropped", "partly", "test_002_small_entries_are_dropped_at_a_larger_error", why="the proof has n^-3 for n^-1; the lemma survives for n >= 1/eps"),
        statement("Lemmas 2.1, 3.4", "hashing finds the heavy keys", "partly", "test_heavy_pairs_collide_with_probability_n_to_the_minus_alpha", "test_with_the_constants_of_the_proof_all_heavy_keys_are_found", why="with another hash family, by which far pairs collide more often: its time is not claimed"),
        statement("Theorem 2.2, Lemma 3.5", "density estimates and sampling of the light keys", "partly", "test_the_density_estimate_of_the_light_keys_is_unbiased", "test_002_the_buckets_are_too_many_for_their_threshold", why="the estimate is unbiased and the error is kept; the proof counts too few buckets"),
        statement("Lemma 4.1", "attention as a Gaussian kernel", "partly", "test_002_lemma_4_1_lacks_its_scale", "test_002_proof_of_lemma_4_1_takes_the_root_of_a_negative_number", why="the statement lacks a scale, the proof takes the root of a negative number"),
        Item("Figure 1", "largest ratios, BERT", "sparsity_prefixes", baseline="the paper's 4.6", page="results-kernels.md"),
        Item("Figure 2", "ratios of neighbouring entries", "sparsity_prefixes", baseline="the paper's 1 and 20"),
        Item("Figure 3", "largest ratios, RoBERTa and GPT", "sparsity_prefixes", baseline="the paper's 5.39 and 5.15"),
        Item("Figure 4", "the ratio against the length", "sparsity_prefixes", baseline="a constant"),
    )),
    Paper("003", "Rethinking Attention with Performers (Choromanski et al., 2021)", (
        statement("Lemmas 1, 2", "positive features are unbiased; errors of three estimators", "reproduced", "test_errors_equal_their_closed_form"),
        statement("Theorem 1", "the regularised softmax kernel", "reproduced", "test_regularized_ratio_lies_between_its_bounds_and_one", "test_regularized_ratio_is_the_series_of_the_paper"),
        statement("Theorems 2, 6", "what orthogonality takes off the error", "not", "test_003_theorem_2_promises_a_negative_error", "test_003_theorem_2_is_rejected_where_its_bound_is_positive", "test_orthogonal_gap_is_the_difference_of_the_errors", why="promises a negative error near y = -x; the corrected gap is in the library"),
        statement("Theorems 3, 5", "tails of orthogonal features", "not", "test_003_theorem_3_fails_in_one_dimension", "test_003_theorem_5_rests_on_a_false_inequality_in_every_dimension", "test_tail_bound_holds_and_is_not_trivial", why="the factor d/(d+2) is not there; without it the bound holds"),
        statement("Theorem 4", "features for a uniform error of the attention matrix", "partly", "test_the_uniform_planner_is_enough_at_any_length", why="the theorem leaves its constant open; with 1 the error is kept at every length tried, far from tightly"),
        Item("Algorithm 1", "orthogonal features; the bias of QR", "projection_bias", baseline="QR with signs as they come", page="which-map.md"),
        untried("Figure 1", "order of the products", DRAWING, "how-it-works.md"),
        Item("Figure 2", "positive against trigonometric features", "positive_variance", baseline="trig"),
        Item("Figure 3", "time of forward and backward passes", "train_speed", baseline=VALUES, page=SPEED, limits=ONE_THREAD),
        Item("Figure 4", "error of the attention output against m", "attention_output_error", baseline="trig, independent features"),
        Item("Figure 5", "weights of a Transformer in a Performer, then fine-tuned", "train_transfer", baseline="exact attention, a fresh Performer", page=TABLE),
        untried("Figure 6", "36-layer protein models", DAYS.format("1,024", "1.6", "20", "With 36 layers 100,000 such steps would take eleven days for each kernel"), TABLE),
        untried("Figure 7", "ImageNet64 and proteins of 8,192 tokens", DAYS.format("4,096", "6.7", "20", "For 8,192 letters 100,000 steps would take two weeks for each kernel. Small models do not yet need attention for proteins (Table 2). ImageNet64 is in no package registry")),
        untried("Figure 8", "the prefix sum", DRAWING, "how-it-works.md"),
        Item("Table 1", "statistics of the proteins", "protein_statistics", baseline="the printed statistics", limits="Swiss-Prot for TrEMBL"),
        Item("Figure 9", "distribution of the amino acids", "protein_statistics", baseline="the printed frequencies", limits="Swiss-Prot for TrEMBL"),
        Item("Table 2", "protein models: accuracy and perplexity", "train_table", "not tested", "small models are hardly better than copying the letters that are shown", baseline="exact attention, copying", page=TABLE),
        Item("Figure 10", "attention of a protein model", "protein_attention", baseline="the model before training", page=PROTEINS),
        Item("Figure 11", "two heads of it", "protein_attention", baseline="the model before training", page=PROTEINS),
        Item("Figure 12", "its first 25 tokens", "protein_attention", baseline="the model before training", page=PROTEINS),
        Item("Figure 13", "similarity of amino acids by its attention", "protein_attention", baseline="permuted letters", page=PROTEINS),
        Item("Figure 14", "error through the layers", "error_propagation", baseline="one replaced layer", limits="six layers of another model for twelve"),
        Item("Figure 15", "redrawing, ReLU, instability of trig", "train_kernels", baseline="exact attention, no attention, ReLU", page=PROTEINS),
        Item("Figure 16", "generalised kernels on proteins", "train_kernels", baseline="exact attention, no attention, ReLU", page=PROTEINS),
        Item("Figure 17", "generalised kernels, with and without normaliser", "train_kernels", baseline="exact attention, no attention, ReLU", page=PROTEINS),
        Item("Figure 18", "gradients of the Linear Transformer", "train_kernels", baseline="exact attention, no attention, ReLU", page=PROTEINS),
        Item("Figure 19", "Long Range Arena", "train_table", baseline="exact attention, seven peers", page=TABLE),
        Item("Figure 20", "time against layers and length", "train_speed", baseline=VALUES, page=SPEED, limits=ONE_THREAD),
        untried("Section 6", "attention outside transformers (GAT, HAN)", "the paper names graph attention as an outlook and gives no method, data or result that could be compared. Over the few neighbours of a node exact attention is linear already"),
        Item("Section A.6", "Linformer with random projections, redrawn", "linformer_random", baseline="learned projections, positive features, the mean of the values"),
    )),
    Paper("004", "On Learning the Transformer Kernel (Chowdhury et al., 2022)", (
        Item("Theorem 1", "a Turing machine in attention", "turing_machine", baseline="the machine itself"),
        statement("Eq. (4), (5), (10)", "kernels of Gaussian mixtures", "partly", "test_004_sigma_is_a_factor_and_not_a_covariance", "test_mixture_kernels_and_their_errors", why="Sigma is a covariance in one place and a factor of it in the others"),
        statement("Eq. (8), (9)", "positive features of learned kernels", "partly", "test_004_eq_8_starts_from_the_gaussian_kernel_and_not_from_softmax", why="the exponent starts from the Gaussian kernel, not from softmax"),
        statement("Lemma S.2", "the kernel of the features", "not", "test_004_lemma_s2_has_the_wrong_kernel", why="the wrong kernel"),
        statement("Lemma S.3", "an integral", "not", "test_004_eq_34_integrates_over_the_half_line", why="over the half line"),
        Item("Figure 1", "memory, accuracy and speed of efficient transformers", "train_speed", baseline=VALUES, page=SPEED, limits="no accuracy; " + ONE_THREAD),
        untried("Figure 2", "generative features", DRAWING, "which-map.md"),
        Item("Table 1", "complexity of the kernels", "kernel_complexity", baseline="the orders of growth that the table states", page=SPEED),
        Item("Table 2", "Long Range Arena", "train_table", baseline="exact attention, fixed kernels, seven peers", page=TABLE),
        Item("Figure 3, memory and speed", "the learned kernels", "train_speed", baseline=VALUES, page=SPEED, limits=ONE_THREAD),
        Item("Figure 3, accuracy", "the learned kernels against length", "train_length", baseline="exact attention, counts of bytes", page=SPEED),
        Item("Figure 4", "memory against length", "train_speed", baseline=VALUES, page=SPEED, limits=ONE_THREAD),
        untried("Table 3", "GLUE after pre-training on WikiText-103", NO_MODEL.format("GLUE and WikiText-103. A smaller form, `pretraining` and then `sentiment` or `nli`, can be run by `bochner train`")),
        untried("Table 4", "settings of the Long Range Arena", PARAMETERS),
        untried("Table 5", "numbers of random samples", PARAMETERS),
        Item("Figure 5", "memory across data sets", "train_speed", baseline=VALUES, page=SPEED, limits="one task at eight lengths"),
        untried("Table 6", "settings of GLUE", PARAMETERS),
        Item("Figure 6", "memory and accuracy on ListOps", "train_table", "not tested", "small models do without attention as well as with it on ListOps; memory is in Figure 4", baseline="exact attention, no attention, seven peers", page=TABLE),
        Item("Table 7", "Fastfood variants", "train_fastfood", baseline="nothing learned", page=TABLE, limits="our tasks instead of GLUE, of which `image` alone needs attention"),
    )),
)
# fmt: on

# Experiments of our own: title and page.
BEYOND = {
    "bandwidth_rules": ("which bandwidth each rule takes", "large-tables.md"),
    "certified_heads": ("attention with a bound, on real heads", "certificates.md"),
    "decoder_peers": ("a decoder's cache against those of others", "shrink-a-cache.md"),
    "decoder_texts": ("a decoder's cache on texts that no setting was chosen by", "shrink-a-cache.md"),
    "further_models": ("four models converted at first try", "speed-up-an-encoder.md"),
    "landmark_ablations": ("what each part of the landmark fit is worth", "which-map.md"),
    "landmark_frontier": ("features fitted to the heads", "which-map.md"),
    "long_context": ("a decoder over a whole book", "results-models.md"),
    "minilm_target": ("an encoder converted to a target", "speed-up-an-encoder.md"),
    "moments_frontier": ("moments, fitted to nothing", "which-map.md"),
    "needles": ("needles found with a smaller cache", "shrink-a-cache.md"),
    "recall": ("recall of pairs, predicted and measured", "results-attention.md"),
    "sampler_variance": ("what a draw of each sampler is worth", "sampling.md"),
    "fits_that_travel": ("maps fitted to one kind of text, or to three", "which-map.md"),
    "search_ablation": ("which damage of a head chooses best", "how-it-works.md"),
    "smollm_distilled": ("a small decoder, distilled", "results-models.md"),
    "smollm_rates": ("rates of a converted decoder", "results-models.md"),
    "smollm_recipes": ("a decoder converted without training", "results-models.md"),
    "smollm_target": ("a decoder converted to a target", "results-models.md"),
    "speech_encoder": ("a speech encoder made linear", "encoder-decoders.md"),
    "train_baselines": ("what can be had without learning", "results-attention.md"),
    "train_beside": ("softmax and kernels on six more tasks", "results-attention.md"),
    "train_recall": ("recall and copying by the trainer", "results-attention.md"),
    "train_tis": ("a published, trained Performer with our attention inside", "train-a-performer.md"),
}
# Pictures of experiments that have others, or more, than their own name.
PICTURES = {
    "landmark_frontier": ("landmark_frontier", "frontier"),
    "protein_attention": ("protein_heads", "protein_two_heads", "protein_attention"),
    "softmax_metrics": ("softmax_metrics", "softmax_lengths"),
    "train_speed": ("train_speed", "train_speed_papers", "train_memory"),
    "train_table": ("train_table", "listops_memory"),
}
