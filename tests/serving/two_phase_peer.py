"""The other side of the two-phase document, written from the document alone: http.client and torch.distributed.

Imports nothing of syncline. Reads one JSON command a line from stdin, answers with one JSON line on stdout.

    {"do": "host", "group": …, "world_size": …, "https": [[host, port], …], "init": {…}}
                                                      rank 0: posts init to every server while it makes the group
    {"do": "join", "group": …, "port": …, "rank": …, "world_size": …}    another rank of a group
    {"do": "post", "http": [host, port], "path": …, "body": {…}}
    {"do": "load", "file": safetensors}               weights to broadcast
    {"do": "send", "names": […]}                      broadcasts from rank 0, one by one
    {"do": "take", "metas": [[dtype, shape], …], "file": safetensors}    receives as many, and keeps them
    {"do": "leave"}                                   destroys the group
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import sys
import threading
from datetime import timedelta

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world, rendezvous

TIMEOUT_S = 30


def post(where, path, body, answers=None, raw=None):
    """Status and decoded body of a call."""
    connection = http.client.HTTPConnection(*where, timeout=TIMEOUT_S)
    data = json.dumps(body).encode() if raw is None else raw.encode()
    connection.request("POST", path, body=data, headers={"Content-Type": "application/json"})
    response = connection.getresponse()
    answer = [response.status, json.loads(response.read())]
    connection.close()
    if answers is not None:
        answers.append(answer)
    return answer


def custom_group(name, port, rank, world_size, timeout_s=TIMEOUT_S):
    """The function that trainers and engines have copied from one another."""
    timeout = timedelta(seconds=timeout_s)
    store, rank, world_size = next(rendezvous(f"tcp://127.0.0.1:{port}", rank, world_size, timeout=timeout))
    store.set_timeout(timeout)
    store = PrefixStore(name, store)
    group, _ = _new_process_group_helper(world_size, rank, [], Backend("gloo"), store, group_name=name, timeout=timeout)
    _world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group


def free_port():
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:
        return listener.getsockname()[1]


class Peer:
    def __init__(self):
        self.group = None
        self.weights = {}

    def host(self, group, world_size, https=(), init=None):
        port, answers, asking = free_port(), [], []
        for number, where in enumerate(https):
            body = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1 + number, "world_size": world_size}
            body |= {"group_name": group, "backend": "gloo"} | (init or {})
            asking.append(threading.Thread(target=post, args=(where, "/init_weights_update_group", body, answers)))
            asking[-1].start()
        self.group = custom_group(group, port, 0, world_size)
        for thread in asking:
            thread.join()
        return answers

    def join(self, group, port, rank, world_size):
        self.group = custom_group(group, port, rank, world_size)
        return "joined"

    def post(self, http, path, body=None, raw=None):
        return post(http, path, body, raw=raw)

    def load(self, file):
        self.weights = load_file(file)
        return len(self.weights)

    def send(self, names):
        for name in names:
            dist.broadcast(self.weights[name], src=0, group=self.group)
        return len(names)

    def take(self, metas, file):
        taken = {}
        for number, (dtype, shape) in enumerate(metas):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            dist.broadcast(tensor, src=0, group=self.group)
            taken[str(number)] = tensor
        save_file(taken, file)
        return len(taken)

    def leave(self):
        if self.group is not None:
            dist.destroy_process_group(self.group)
        self.group = None
        return "left"


def main():
    peer = Peer()
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = {"ok": getattr(peer, command.pop("do"))(**command)}
        except Exception as error:  # noqa: BLE001 - the test is told
            answer = {"error": repr(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    assert not any(name.startswith("syncline") for name in sys.modules)
    main()
