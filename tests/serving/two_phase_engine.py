"""A server that speaks only the two-phase document: its pseudocode over http.server and torch.distributed.

Imports nothing of syncline. Besides the document's paths: ``/save`` writes the weights that it has to a file, ``/be`` makes it
misbehave from now on: {"refuse": text, "fail": text, "count": n, "die_after": buckets, "die_in_complete": bool}.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world, rendezvous

MODEL = load_file(sys.argv[1])
GROUPS = {}
STATE = {"thread": None, "received": {}, "error": None, "flushed": 0, "prepared": []}
BEHAVIOUR = {}


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def init_weights_update_group(body):
    name, timeout = body["group_name"], timedelta(seconds=30)
    url = f"tcp://{body['master_address']}:{body['master_port']}"
    store, rank, size = next(rendezvous(url, body["rank_offset"], body["world_size"], timeout=timeout))
    store.set_timeout(timeout)
    store = PrefixStore(name, store)
    group, _ = _new_process_group_helper(size, rank, [], Backend(body["backend"]), store, group_name=name, timeout=timeout)
    _world.pg_group_ranks[group] = {i: i for i in range(size)}
    GROUPS[name] = group
    return {"success": True, "message": ""}


def destroy_weights_update_group(body):
    group = GROUPS.pop(body["group_name"], None)
    if group is None:
        return {"success": False, "message": "The group to be destroyed does not exist."}
    dist.destroy_process_group(group)
    return {"success": True, "message": ""}


def prepare_weights_update(body):
    group = GROUPS.get(body["group_name"])
    if group is None:
        return {"status": "error", "message": "Process group not initialized"}
    if "refuse" in BEHAVIOUR:
        return {"status": "error", "message": BEHAVIOUR["refuse"]}
    STATE.update(received={}, error=None, prepared=body["buckets"])

    def recv_loop():
        try:
            for index, meta in enumerate(body["buckets"]):
                if BEHAVIOUR.get("die_after") == index:
                    die()
                tensors = []
                for name, dtype, shape in zip(meta["names"], meta["dtypes"], meta["shapes"], strict=False):
                    tensor = torch.empty(shape, dtype=getattr(torch, dtype))
                    dist.broadcast(tensor, src=0, group=group)
                    tensors.append((name, tensor))
                STATE["received"][index] = tensors
        except Exception as error:  # noqa: BLE001 - told by complete
            STATE["error"] = str(error)

    STATE["thread"] = threading.Thread(target=recv_loop, daemon=True)
    STATE["thread"].start()
    return {"status": "ready", "message": f"Started recv loop for {body['num_buckets']} buckets"}


def complete_weights_update(body):
    if BEHAVIOUR.get("die_in_complete"):
        die()
    if STATE["thread"] is not None:
        STATE["thread"].join(timeout=30)
        if STATE["thread"].is_alive():
            return {"success": False, "message": "Recv thread timed out"}
    if STATE["error"]:
        return {"success": False, "message": STATE["error"]}
    if "fail" in BEHAVIOUR:
        return {"success": False, "message": BEHAVIOUR["fail"]}
    count = len(STATE["received"])
    for index in sorted(STATE["received"]):
        for name, tensor in STATE["received"][index]:
            MODEL[name].copy_(tensor)
    if body.get("flush_cache"):
        STATE["flushed"] += 1
    STATE.update(received={}, thread=None)
    return {"success": True, "num_buckets_received": BEHAVIOUR.get("count", count), "message": ""}


def save(body):
    save_file(MODEL, body["file"])
    return {"flushed": STATE["flushed"], "buckets": STATE["prepared"]}


def be(body):
    BEHAVIOUR.clear()
    BEHAVIOUR.update(body)
    return {}


PATHS = {
    f"/{function.__name__}": function
    for function in (
        init_weights_update_group, destroy_weights_update_group, prepare_weights_update, complete_weights_update, save, be,
    )
}  # fmt: skip


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = json.dumps(PATHS[self.path](body)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *args):
        pass


if __name__ == "__main__":
    assert not any(name.startswith("syncline") for name in sys.modules)
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()
