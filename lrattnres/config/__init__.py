"""Every setting of the project: its type, what it means, its default."""

from __future__ import annotations

from lrattnres.config.commands import EvalConfig as EvalConfig
from lrattnres.config.data import CorpusName as CorpusName
from lrattnres.config.data import DataConfig as DataConfig
from lrattnres.config.data import TokenizeConfig as TokenizeConfig
from lrattnres.config.data import TokenizerConfig as TokenizerConfig
from lrattnres.config.data import TokenizerName as TokenizerName
from lrattnres.config.machine import AC as AC
from lrattnres.config.machine import AttentionBackend as AttentionBackend
from lrattnres.config.machine import ClusterConfig as ClusterConfig
from lrattnres.config.machine import Compile as Compile
from lrattnres.config.machine import Device as Device
from lrattnres.config.machine import Kernels as Kernels
from lrattnres.config.machine import ParallelConfig as ParallelConfig
from lrattnres.config.machine import ParallelMode as ParallelMode
from lrattnres.config.machine import Precision as Precision
from lrattnres.config.model import BlockScale as BlockScale
from lrattnres.config.model import DepthConfig as DepthConfig
from lrattnres.config.model import LogitScale as LogitScale
from lrattnres.config.model import ModelConfig as ModelConfig
from lrattnres.config.model import QKNorm as QKNorm
from lrattnres.config.model import RopeKind as RopeKind
from lrattnres.config.model import RopeScaling as RopeScaling
from lrattnres.config.model import Routing as Routing
from lrattnres.config.model import Sources as Sources
from lrattnres.config.schema import ConfigError as ConfigError
from lrattnres.config.schema import defaults as defaults
from lrattnres.config.schema import expected as expected
from lrattnres.config.schema import fields_of as fields_of
from lrattnres.config.schema import flatten as flatten
from lrattnres.config.schema import leaf_of as leaf_of
from lrattnres.config.schema import option as option
from lrattnres.config.schema import parse as parse
from lrattnres.config.schema import parse_options as parse_options
from lrattnres.config.schema import plain as plain
from lrattnres.config.schema import values_of as values_of
from lrattnres.config.training import CheckpointConfig as CheckpointConfig
from lrattnres.config.training import EvaluationConfig as EvaluationConfig
from lrattnres.config.training import InstrumentsConfig as InstrumentsConfig
from lrattnres.config.training import LoggerConfig as LoggerConfig
from lrattnres.config.training import LoggerName as LoggerName
from lrattnres.config.training import OptimizerConfig as OptimizerConfig
from lrattnres.config.training import Orthogonalizer as Orthogonalizer
from lrattnres.config.training import TrainConfig as TrainConfig
