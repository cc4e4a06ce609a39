"""Advantages, losses and their aggregation: pure functions on arrays.

A new one is a function of a few dozen lines with `@ADVANTAGES.register`, `@POLICY_LOSSES.register` or
`@AGGREGATIONS.register` above it, in a file that is imported here.
"""

from agentic_rl.algorithms.advantages import ADVANTAGES as ADVANTAGES
from agentic_rl.algorithms.aggregation import AGGREGATIONS as AGGREGATIONS
from agentic_rl.algorithms.aggregation import token_weights as token_weights
from agentic_rl.algorithms.groups import group_ids_of as group_ids_of
from agentic_rl.algorithms.losses import POLICY_LOSSES as POLICY_LOSSES
from agentic_rl.algorithms.losses import clipped_policy_loss as clipped_policy_loss
from agentic_rl.algorithms.losses import nll_loss as nll_loss
from agentic_rl.algorithms.selection import group_filter as group_filter
from agentic_rl.algorithms.selection import group_fractions as group_fractions
