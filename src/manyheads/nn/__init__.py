"""How heads attend: the attention function, masks, positions, statistics, the module and the transformers."""
