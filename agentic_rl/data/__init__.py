"""Problems, their order, and packing of episodes and documents into rows. Importing it does not import jax."""

from agentic_rl.data.packing import Batch as Batch
from agentic_rl.data.packing import pack as pack
from agentic_rl.data.packing import pack_sequences as pack_sequences
from agentic_rl.data.problems import ProblemOrder as ProblemOrder
from agentic_rl.data.problems import fingerprint as fingerprint
from agentic_rl.data.problems import load_jsonl as load_jsonl
from agentic_rl.data.problems import load_tfds as load_tfds
