"""Fix a bug in a real Python package whose own tests say whether it is fixed."""

from treadle.env.repair.bench import TestBench, open_bench
from treadle.env.repair.packages import PACKAGES, Package
from treadle.env.repair.session import RepairEnvironment, RepairSession
from treadle.env.repair.solver import Solver, solver_script
from treadle.env.repair.tasks import Pool, PoolSize, build_pool, make_tasks, probes

__all__ = [
    "PACKAGES",
    "Package",
    "Pool",
    "PoolSize",
    "RepairEnvironment",
    "RepairSession",
    "Solver",
    "TestBench",
    "build_pool",
    "make_tasks",
    "open_bench",
    "probes",
    "solver_script",
]
