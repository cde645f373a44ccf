"""Which heads are alike, which differ, and how they work together."""

from manyheads.heads.diversity.measure import MEASURES as MEASURES
from manyheads.heads.diversity.measure import diversity as diversity
from manyheads.heads.diversity.summary import Layer as Layer
from manyheads.heads.diversity.summary import layers as layers
