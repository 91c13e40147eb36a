"""Streams that run their work in any order their events allow."""

from __future__ import annotations

import numpy as np
import torch

from llmctl.plugins.backends.cuda.queue import DeviceQueue
from llmctl.runtime.engines.host_blocks import HostBlocks
from llmctl.runtime.kv_cache import CopyKind

LAYERS, LAYER_BYTES = 2, 8


OFFLOAD, ONBOARD, WITHIN = CopyKind.OFFLOAD, CopyKind.ONBOARD, CopyKind.WITHIN


class Mark:
    def __init__(self):
        self.is_passed = False

    def query(self):
        return self.is_passed


class Stream:
    """Work that has been given, and has not been done."""

    def __init__(self, device):
        self.device = device
        self.waiting = []
        device.streams.append(self)

    def run(self, work):
        self.waiting.append(work)

    def mark(self):
        mark = Mark()
        self.waiting.append(mark)
        return mark

    def wait(self, mark):
        self.waiting.append((mark,))

    def advance(self):
        """Do the next piece of work; False where there is none or it has to wait."""
        if not self.waiting:
            return False
        item = self.waiting[0]
        if isinstance(item, tuple):
            if not item[0].is_passed:
                return False
        elif isinstance(item, Mark):
            item.is_passed = True
        else:
            item()
        self.waiting.pop(0)
        return True


class Device:
    """Lanes that run at random; `favour` them unequally."""

    def __init__(self, seed=0):
        self.random = np.random.default_rng(seed)
        self.streams = []
        self.main, self.out, self.inward = (Stream(self) for _ in range(3))
        self.favour = self.random.dirichlet([0.5] * 3)

    def advance(self, count):
        for _ in range(count):
            self.streams[self.random.choice(3, p=self.favour)].advance()

    def finish(self):
        while sum(stream.advance() for stream in self.streams):
            pass
        assert not any(stream.waiting for stream in self.streams), "streams wait for each other"

    def host_blocks(self, num_blocks):
        streams = (self.main, self.out, self.inward)
        return HostBlocks(DeviceQueue("cpu"), num_blocks, LAYERS, LAYER_BYTES, streams)


def content(value):
    return torch.full((LAYERS, LAYER_BYTES), value, dtype=torch.uint8)


def empty_cache(num_blocks):
    return torch.zeros((LAYERS, num_blocks, LAYER_BYTES), dtype=torch.uint8)
