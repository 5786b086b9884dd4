"""The former name of :mod:`gramscope.linalg.cuda_graph`."""

from gramscope.linalg.cuda_graph import Replay as Replay
from gramscope.linalg.cuda_graph import Tensors as Tensors
