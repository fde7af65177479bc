"""OPT, the models of the paper's experiments."""

from models.opt.config import OptConfig
from models.opt.modeling import Opt
from models.opt.params import OPT

__all__ = ["OPT", "Opt", "OptConfig"]
