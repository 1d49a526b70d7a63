"""One rank of Awex's point-to-point transport over gloo, moving the shards that `syncline bench run` moves.

    python -m syncline.bench.measure.awex_peer '{"rank": 0, "train": 2, "infer": 2, "store": …, "tensors": …, …}'

Ranks below ``infer`` receive, the others send, with Awex's own plan and its own send and receive operations, straight into the
parameters. Rank 0 prints the seconds of each update, from a barrier to a barrier, as one JSON line; every receiver prints
whether all elements are right. Awex is not a dependency: it may live in an environment of its own.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from .shards import Shards


def _meta(shards: list[Shards], size: int) -> list[Any]:
    """Awex's description of tensors that are spread over ``size`` ranks."""
    from awex.meta.weight_meta import ParameterMeta, ParameterReplicaMeta, ParameterShardMeta
    from awex.sharding.param_sharding import ShardingType

    found = []
    for number, name in enumerate(shards[0].boxes):
        parts = [
            ParameterShardMeta(
                tp_rank=rank, attn_tp_rank=rank, pp_rank=0, ep_rank=0, ep_tp_rank=0, global_rank=rank, world_size=size,
                engine_rank=0, name=name, shape=shard.boxes[name].size, numel=shard.get_parameter(name).numel(),
                dtype=torch.float32, global_offset=shard.boxes[name].start, sharding_type=ShardingType.TP_SHARDING,
                num_shards=size, sharding_dim=number % 2,
            )
            for rank, shard in enumerate(shards)
        ]  # fmt: skip
        shape = shards[0].boxes[name].shape
        found.append(
            ParameterMeta(
                name=name, global_numel=shape[0] * shape[1], global_shape=shape, dtype=torch.float32, shards=parts,
                replicas=[ParameterReplicaMeta(shards=parts)],
            )
        )  # fmt: skip
    return found


def main() -> None:
    """Entry point of one rank."""
    from awex.transfer.nccl_comm import batch_send_recv, nccl_build_recv_ops, nccl_build_send_ops
    from awex.transfer.transfer_plan import TransferPlanBuilder

    logging.disable(logging.INFO)
    args: dict[str, Any] = json.loads(sys.argv[1])
    rank, infer, train = args["rank"], args["infer"], args["train"]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{args['store']}", rank=rank, world_size=infer + train)
    receives = rank < infer
    with torch.device("meta"):
        sides = [[Shards(args["tensors"], args["rows"], rank=r, size=n) for r in range(n)] for n in (infer, train)]
    mine = Shards(args["tensors"], args["rows"], rank=rank if receives else rank - infer, size=infer if receives else train)
    if not receives:
        mine.stamp(1)
    plan = TransferPlanBuilder(infer, train).build_local_transfer_plan(_meta(sides[0], infer), _meta(sides[1], train), rank)
    params = {name: param.detach() for name, param in mine.named_parameters()}
    group = dist.group.WORLD
    seconds = []
    for _ in range(args["repeat"]):
        dist.barrier()
        began = time.perf_counter()
        if receives:
            operations, strided, _ = nccl_build_recv_ops(params, plan, group)
            batch_send_recv(send_ops=[], recv_ops=operations, blocking=True, use_group=True)
            for tensor, received in strided:
                tensor.copy_(received)
        else:
            operations, _, _ = nccl_build_send_ops(params, plan, group, -1)
            batch_send_recv(send_ops=operations, recv_ops=[], blocking=True, use_group=True)
        dist.barrier()
        seconds.append(time.perf_counter() - began)
    answer: dict[str, Any] = {"seconds": seconds} if rank == 0 else {}
    if receives:
        answer["ok"] = mine.is_stamped(1)
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
