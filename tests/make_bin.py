#!/usr/bin/env python3
"""make_bin.py DIR: pytorch_model.bin of DIR/model.safetensors, whose tensors are F32 or F16, as torch.save would write it: the first
tensor in doubles, the second in floats, the third in halfs, and so on. Without torch: what its pickle names stands here."""
import collections
import json
import pickle
import struct
import sys
import types
import zipfile


def _rebuild_tensor_v2(*_):
    pass


class Tensor(list):  # of the arguments of that function
    def __reduce__(self):
        return _rebuild_tensor_v2, tuple(self)


class Storage(tuple):
    pass


class Pickler(pickle.Pickler):
    def persistent_id(self, value):
        return tuple(value) if type(value) is Storage else None


KINDS = [(type(name, (), {"__module__": "torch"}), code)
         for name, code in (("DoubleStorage", "d"), ("FloatStorage", "f"), ("HalfStorage", "e"))]
FORMS = {"F32": ("f", 4), "F16": ("e", 2)}
torch, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")
sys.modules.update({"torch": torch, "torch._utils": utils})
for kind, _ in KINDS:
    setattr(torch, kind.__name__, kind)
_rebuild_tensor_v2.__module__, utils._rebuild_tensor_v2 = "torch._utils", _rebuild_tensor_v2

folder = sys.argv[1]
with open(f"{folder}/model.safetensors", "rb") as f:
    header = json.loads(f.read(struct.unpack("<Q", f.read(8))[0]))
    data = f.read()
header.pop("__metadata__", None)
with zipfile.ZipFile(f"{folder}/pytorch_model.bin", "w") as z:
    state = {}
    for key, (name, entry) in enumerate(header.items()):
        kind, code = KINDS[key % 3]
        begin, end = entry["data_offsets"]
        form, width = FORMS[entry["dtype"]]
        values = struct.unpack(f"<{(end - begin) // width}{form}", data[begin:end])
        shape = tuple(entry["shape"])
        storage = Storage(("storage", kind, str(key), "cpu", len(values)))
        state[name] = Tensor([storage, 0, shape, (*shape[1:], 1), False, collections.OrderedDict()])
        z.writestr(f"archive/data/{key}", struct.pack(f"<{len(values)}{code}", *values))
    with z.open("archive/data.pkl", "w") as out:
        Pickler(out, 2).dump(state)
