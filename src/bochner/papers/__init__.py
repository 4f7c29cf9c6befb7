"""Algorithms of the papers that do not pay in practice: to study and to compare with. Import from the modules.

`kernel_product`: the sub-quadratic kernel product. `attention_kernel`: attention by kernel products.
`sketched_layer`, `taylor_layer`, `polyfit`: feed-forward layers as features.
"""
