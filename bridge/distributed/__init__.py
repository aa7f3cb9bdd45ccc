"""Past one device. The engine is ``torch.distributed``; this package fits chains and their state to it."""

from bridge.distributed.amaxes import AmaxAgreement, agree_amaxes
from bridge.distributed.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from bridge.distributed.experts import ExpertParallel
from bridge.distributed.sharded_weight import ShardedWeight, gather_in_fp8, precompute_scales
from bridge.distributed.start import check_same_on_all_ranks, initialize
from bridge.distributed.tensor_parallelism import parallelize_plan, tensor_parallel

__all__ = [
    "AmaxAgreement",
    "ExpertParallel",
    "ShardedWeight",
    "agree_amaxes",
    "check_same_on_all_ranks",
    "gather_in_fp8",
    "initialize",
    "latest_checkpoint",
    "load_checkpoint",
    "parallelize_plan",
    "precompute_scales",
    "save_checkpoint",
    "tensor_parallel",
]
