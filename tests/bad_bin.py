#!/usr/bin/env python3
"""bad_bin.py DIR KIND...: in DIR/0, DIR/1 and so on a pytorch_model.bin, or shards and their index, each with a fault of its kind, for
which scripts/convert_bin.py is to refuse it. Those called "good", "shards" and "slow" have none."""
import json
import os
import pickle
import struct
import sys
import zipfile


def text(value):
    return pickle.BINUNICODE + struct.pack("<I", len(value)) + value.encode()


def number(value):
    return pickle.BININT + struct.pack("<i", value)


def tensor(size, stride, key="0", numel=4):
    """A call of _rebuild_tensor_v2: its arguments are storage, offset, size, stride, requires_grad, hooks."""
    storage = b"".join([pickle.MARK, text("storage"), b"ctorch\nFloatStorage\n", text(key), text("cpu"), number(numel),
                        pickle.TUPLE, pickle.BINPERSID])
    return b"".join([b"ctorch._utils\n_rebuild_tensor_v2\n", pickle.MARK, storage, number(0),
                     *(pickle.MARK + b"".join(map(number, values)) + pickle.TUPLE for values in (size, stride)),
                     pickle.NEWFALSE, b"ccollections\nOrderedDict\n", pickle.EMPTY_TUPLE, pickle.REDUCE, pickle.TUPLE, pickle.REDUCE])


def nested(depth):
    """A tuple of two references to a tuple of two references, and so on."""
    return pickle.EMPTY_TUPLE + b"".join(pickle.BINPUT + b"\0" + pickle.BINGET + b"\0" + pickle.TUPLE2 for _ in range(depth))


def write(folder, name, entries, more=()):
    with zipfile.ZipFile(os.path.join(folder, name), "w") as z:
        z.writestr("archive/data/0", struct.pack("<4f", 1, 2, 3, 4))
        for path, data in more:
            z.writestr(path, data, zipfile.ZIP_DEFLATED, 1)
        z.writestr("archive/data.pkl", b"".join([pickle.PROTO + b"\2", pickle.EMPTY_DICT,
                                                 *(key + value + pickle.SETITEM for key, value in entries), pickle.STOP]))


good = text("w"), tensor([2, 2], [2, 1])
entries = {
    "nested key": [good, (nested(60), pickle.NONE)],
    "nested value": [good, (text("v"), nested(60))],
    "dimensions": [good, (text("v"), tensor([1] * 200000, [1] * 200000))],
    "metadata": [good, (text("__metadata__"), tensor([4], [1]))],
    "long number": [(text("v"), b"L" + b"9" * (1 << 22) + b"L\n"), good],
}
shards = {
    "two names of one": ("pytorch_model-1.bin", "model-1.bin"),
    "one tensor in two": ("pytorch_model-1.bin", "pytorch_model-2.bin"),
    "shards": ("pytorch_model-1.bin", "pytorch_model-2.bin"),
    "missing shard": ("pytorch_model-1.bin", "pytorch_model-2.bin"),
    "bad second shard": ("pytorch_model-1.bin", "pytorch_model-2.bin"),
}

def make(folder, kind):
    if kind in shards:
        for count, name in enumerate(shards[kind]):
            key = text("w" if kind == "one tensor in two" else f"w{count}")
            write(folder, name, [(key, good[1])] if kind != "bad second shard" or not count else entries["nested value"])
        with open(os.path.join(folder, "pytorch_model.bin.index.json"), "w", encoding="utf-8") as f:
            json.dump({"weight_map": {f"w{n}": name for n, name in enumerate(shards[kind])}}, f)
        if kind == "missing shard":
            os.remove(os.path.join(folder, shards[kind][1]))
    elif kind in ("pointer", "pointer for an index"):
        with open(os.path.join(folder, "pytorch_model.bin" + ".index.json" * ("index" in kind)), "w", encoding="utf-8") as f:
            f.write("version https://git-lfs.github.com/spec/v1\noid sha256:0a\nsize 644\n")
    elif kind == "link":
        os.symlink("../blobs/0a", os.path.join(folder, "pytorch_model.bin"))
    elif kind == "adapter":
        write(folder, "adapter_model.bin", [good])
    elif kind == "hub":
        os.mkdir(os.path.join(folder, "snapshots"))
    elif kind == "pipe":
        os.mkfifo(os.path.join(folder, "pytorch_model.bin"))
    elif kind == "byteorder":
        write(folder, "pytorch_model.bin", [good], [("archive/byteorder", b"l" * (1 << 28))])
    elif kind == "pipe for an index":
        os.mkfifo(os.path.join(folder, "pytorch_model.bin.index.json"))
    elif kind == "slow":  # two million rows of one number, which are copied one by one
        rows = 1 << 21
        write(folder, "pytorch_model.bin", [(text("w"), tensor([rows, 1], [2, 1], "1", 2 * rows))])
        with zipfile.ZipFile(os.path.join(folder, "pytorch_model.bin"), "a") as z:
            z.writestr("archive/data/1", bytes(8 * rows))
    else:
        write(folder, "pytorch_model.bin", entries.get(kind, [good]))


for n, wanted in enumerate(sys.argv[2:]):
    place = os.path.join(sys.argv[1], str(n))
    os.mkdir(place)
    make(place, wanted)
