#!/usr/bin/env python3
"""make_bin.py DIR: pytorch_model.bin of DIR/model.safetensors, whose tensors are F32, as torch.save would write it: the first
tensor in doubles, the second in floats, the third in halfs, and so on. Without torch: what its pickle names stands here."""
import array
import collections
import json
import pickle
import struct
import sys
import types
import zipfile

torch, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")
sys.modules.update({"torch": torch, "torch._utils": utils})
KINDS = [("DoubleStorage", "d"), ("FloatStorage", "f"), ("HalfStorage", "e")]
for kind, _ in KINDS:
    setattr(torch, kind, type(kind, (), {"__module__": "torch"}))


def _rebuild_tensor_v2(*_):
    pass


_rebuild_tensor_v2.__module__ = "torch._utils"
utils._rebuild_tensor_v2 = _rebuild_tensor_v2


class Tensor:
    def __init__(self, key, kind, count, shape):
        self.pid = ("storage", getattr(torch, kind), str(key), "cpu", count)
        self.shape = shape

    def __reduce__(self):
        stride = (self.shape[1], 1) if len(self.shape) > 1 else (1,)
        return _rebuild_tensor_v2, (Storage(self.pid), 0, self.shape, stride, False, collections.OrderedDict())


class Storage:
    def __init__(self, pid):
        self.pid = pid


class Pickler(pickle.Pickler):
    def persistent_id(self, value):
        return value.pid if type(value) is Storage else None


folder = sys.argv[1]
with open(f"{folder}/model.safetensors", "rb") as f:
    header = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
    data = f.read()
with zipfile.ZipFile(f"{folder}/pytorch_model.bin", "w") as z, z.open("archive/data.pkl", "w") as out:
    state = {}
    for key, (name, entry) in enumerate(header.items()):
        values = array.array("f", data[slice(*entry["data_offsets"])])
        state[name] = Tensor(key, KINDS[key % 3][0], len(values), tuple(entry["shape"]))
    Pickler(out, 2).dump(state)
    out.close()
    for key, entry in enumerate(header.values()):
        values = array.array("f", data[slice(*entry["data_offsets"])])
        z.writestr(f"archive/data/{key}", struct.pack(f"<{len(values)}{KINDS[key % 3][1]}", *values))
