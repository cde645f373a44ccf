"""Claims about multi-head attention: each is a module here, which runs, draws and judges one claim.

The names stand in the order in which a beginner should read them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from manyheads.studies.study import Study

NAMES: tuple[str, ...] = (
    "several_heads",
    "heads_in_translation",
    "head_width",
    "splitting_is_free",
    "batched_heads",
    "scaled_scores",
    "weight_sums",
    "equal_start",
    "head_gradients",
    "head_orthogonality",
    "forced_orthogonality",
    "normalised_weights",
    "far_context",
    "output_mixing",
    "head_ensemble",
    "redundant_heads",
    "outlier_heads",
    "diversity_by_layer",
    "reach_by_layer",
    "kinds_of_heads",
    "roles_of_important_heads",
    "few_heads_matter",
    "heads_or_parameters",
    "rankings_on_other_data",
    "importance_methods",
    "attention_cost",
    "sight_across_chunks",
    "checkpointed_length",
    "residual_connections",
    "norm_position",
    "position_encodings",
    "picture_heads",
)


def find(name: str) -> Study:
    """The study of this name.

    >>> find("several_heads").claim.sentence.en
    'Several heads beat one head at the same number of parameters, but more is not always better.'
    >>> find("one_head")
    Traceback (most recent call last):
    ValueError: study: there is no 'one_head'; expected one of several_heads, ...
    """
    if name not in NAMES:
        raise ValueError(f"study: there is no {name!r}; expected one of {', '.join(NAMES)}")
    return cast("Study", import_module(f"{__name__}.{name}"))
