#!/usr/bin/env python3
"""Convert a model's pytorch_model.bin to model.safetensors, without torch.

    python3 scripts/convert_bin.py DIR

DIR holds pytorch_model.bin, or its shards and pytorch_model.bin.index.json. The result is written beside them:
model.safetensors, or as many shards and model.safetensors.index.json. Nothing that exists is overwritten, and files get their names
only when all of them are complete. Values and types stay as they are, but that F64, which flexgen does not read, is written as F32.

A .bin file is what torch.save writes: a zip of a pickle, which describes the tensors, and one uncompressed file for each
storage. A pickle is a program that may call anything, so the one here may only call what describing tensors takes;
everything else is refused, and so are values so large that they would take long to look at. Tensors are copied piece by piece: memory
does not grow with the model.

Needs only Python's standard library, 3.8 or later.
"""
import argparse
import collections
import errno
import io
import json
import math
import os
import pickle
import signal
import stat
import struct
import sys
import tempfile
import zipfile
import zlib

PIECE = 1 << 20          # bytes copied at a time
MAX_PICKLE = 64 << 20    # the description of a model's tensors is far smaller, and so is an index
MAX_TUPLE = 64           # torch has at most so many dimensions
MAX_STRIDED = 256 << 20  # a tensor that must be reordered is read whole
POINTER = b"version https://git-lfs.github.com/spec/"  # the short text by which Git-LFS stands in for a large file
SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP

# torch's storage classes: (safetensors dtype, bytes of an element, memoryview format)
STORAGES = {
    "FloatStorage": ("F32", 4, "I"), "HalfStorage": ("F16", 2, "H"), "BFloat16Storage": ("BF16", 2, "H"),
    "DoubleStorage": ("F64", 8, "Q"), "LongStorage": ("I64", 8, "Q"), "IntStorage": ("I32", 4, "I"),
    "ShortStorage": ("I16", 2, "H"), "CharStorage": ("I8", 1, "B"), "ByteStorage": ("U8", 1, "B"), "BoolStorage": ("BOOL", 1, "B"),
}


def written(tensor):
    """(safetensors dtype, bytes of an element) that a tensor is written as."""
    dtype, width, _ = STORAGES[tensor.storage.kind]
    return ("F32", 4) if dtype == "F64" else (dtype, width)


def narrowed(name, pieces):
    """F64 as F32."""
    for piece in pieces:
        count = len(piece) // 8
        try:
            yield struct.pack(f"<{count}f", *struct.unpack(f"<{count}d", piece))
        except OverflowError:
            raise Fault(f"tensor {name}: has a number beyond F32, as no model's weights do; is the file damaged?") from None


class Fault(Exception):
    """Something wrong outside this program: one line for a person."""


# ------------------------------------------------------------------ the pickle

Storage = collections.namedtuple("Storage", "kind key numel")
Tensor = collections.namedtuple("Tensor", "storage offset size stride")


def is_count(x):
    return type(x) is int and x >= 0


def is_counts(x):
    return type(x) is tuple and all(is_count(n) for n in x)


class RebuildTensor:
    """torch._utils._rebuild_tensor_v2. No attributes: a pickle may try to set some."""
    __slots__ = ()

    def __call__(self, storage, offset, size, stride, *_):
        if type(storage) is not Storage or not is_count(offset) or not is_counts(size) or not is_counts(stride) \
                or len(size) != len(stride):
            raise Fault("a tensor is described by something else than a storage, an offset, a size and strides")
        return Tensor(storage, offset, size, stride)


class RebuildParameter:
    """torch._utils._rebuild_parameter."""
    __slots__ = ()

    def __call__(self, data, *_):
        return data


class RebuildDict:
    """collections.OrderedDict, which gets its items afterwards."""
    __slots__ = ()

    def __call__(self):
        return StateDict()


class StateDict(dict):
    """What torch saves keeps its _metadata as an attribute; we do not need it."""
    __slots__ = ()

    def __setstate__(self, state):
        pass


GLOBALS = {
    ("collections", "OrderedDict"): RebuildDict(),
    ("torch._utils", "_rebuild_tensor_v2"): RebuildTensor(),
    ("torch._utils", "_rebuild_parameter"): RebuildParameter(),
    **{("torch", name): name for name in STORAGES},
}


# What torch.save writes; no other operation is carried out. Those that are left out make numbers of any length, sets, objects.
OPERATIONS = """PROTO FRAME MARK STOP MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1
    BINFLOAT BINUNICODE SHORT_BINUNICODE EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS EMPTY_DICT SETITEM
    SETITEMS GLOBAL STACK_GLOBAL BINPERSID REDUCE BUILD""".split()


def checked(name):
    """The function that carries out an operation, with a check of the values that it finds. Sixty tuples, each of two references
    to the one before, have 2^60 members for whoever walks through them, as hashing and printing do. So a tuple is short, and the
    tuples in it have none in them; and keys are texts."""
    load = pickle._Unpickler.dispatch[getattr(pickle, name)[0]]

    def load_checked(unpickler):
        if name.startswith("SETITEM") and any(type(key) is not str for key in unpickler.stack[-2 if name == "SETITEM" else 0::2]):
            raise Fault("the pickle has a dictionary whose keys are not names: it holds no weights of a model")
        load(unpickler)
        made = unpickler.stack[-1] if "TUPLE" in name else ()
        if len(made) > MAX_TUPLE or any(type(inner) is tuple for part in made if type(part) is tuple for inner in part):
            raise Fault("the pickle has a tuple that describes no tensor: it is damaged or hostile")
    return load_checked if name.startswith("SETITEM") or "TUPLE" in name else load


class Unpickler(pickle._Unpickler):  # the one in Python: its memory is bounded by the file, the one in C trusts indices
    dispatch = {getattr(pickle, name)[0]: checked(name) for name in OPERATIONS}

    def find_class(self, module, name):
        if (module, name) not in GLOBALS:
            raise Fault(f"the pickle asks for {module}.{name}, which no model's tensors need: it is damaged or hostile")
        return GLOBALS[module, name]

    def persistent_load(self, pid):
        if type(pid) is not tuple or len(pid) < 5 or pid[0] != "storage" or type(pid[1]) is not str or pid[1] not in STORAGES \
                or type(pid[2]) is not str or not is_count(pid[4]):
            raise Fault("the pickle refers to something that is not a storage of a known type")
        return Storage(pid[1], pid[2], pid[4])


def unpickle(data):
    try:
        state = Unpickler(io.BytesIO(data)).load()
    except Fault:
        raise
    except Exception as e:  # damaged pickles raise nearly anything
        raise Fault(f"data.pkl cannot be read ({type(e).__name__}); is the download complete?") from None
    if not isinstance(state, dict) or not state:
        raise Fault("holds no dictionary of tensors; expected the weights of a model, as torch.save(model.state_dict()) writes them")
    for name, tensor in state.items():
        if type(name) is not str or type(tensor) is not Tensor:
            raise Fault(f"entry {str(name)[:100]!r} is not a tensor; expected the weights of a model and nothing else")
    if "__metadata__" in state:
        raise Fault("tensor __metadata__: a file of safetensors has no tensor of this name; save the model without it")
    return state


# ------------------------------------------------------------------ the zip

def open_regular(path):
    """Opens a file to read it. Opening a pipe waits for one who writes it, and a device may have no end."""
    if not os.path.exists(path):
        raise Fault(f"is a link to {os.readlink(path)}, which is missing; download it again" if os.path.islink(path)
                    else "is missing; download it")
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise Fault("is no regular file")
    file = open(path, "rb")
    if file.read(len(POINTER)) == POINTER:
        raise Fault("is a Git-LFS pointer, which stands for the file; run git lfs pull, or download the file")
    file.seek(0)
    return file


class Archive:
    """A torch.save file: its tensors by name, and their bytes."""

    def __init__(self, path):
        self.file = open_regular(path)
        try:
            self.zip = zipfile.ZipFile(self.file)
        except zipfile.BadZipFile:
            raise Fault("is no zip file; expected the format that torch.save has written since torch 1.6; "
                        "an older file must be loaded and saved again with torch; or is the download incomplete?") from None
        pickles = [n for n in self.zip.namelist() if n.endswith("/data.pkl") and n.count("/") == 1]
        if len(pickles) != 1:
            raise Fault("holds no data.pkl; expected a file written by torch.save")
        self.root = pickles[0][:-len("data.pkl")]
        if self.root + "byteorder" in self.zip.namelist() and self.small(self.root + "byteorder", PIECE) != b"little":
            raise Fault("was written on a big-endian machine; expected little-endian numbers")
        self.tensors = unpickle(self.small(pickles[0], MAX_PICKLE))

    def small(self, name, most):
        """The bytes of an entry that is no tensor's."""
        size = self.zip.getinfo(name).file_size
        if size > most:
            raise Fault(f"its {name} has {size} bytes; expected at most {most}: it is damaged or hostile")
        return self.zip.read(name)

    def place(self, name):
        """(first byte in the file, bytes of a storage element) of a tensor, after checking that it is all there."""
        tensor = self.tensors[name]
        width = STORAGES[tensor.storage.kind][1]
        try:
            info = self.zip.getinfo(f"{self.root}data/{tensor.storage.key}")
        except KeyError:
            raise Fault(f"tensor {name}: its storage {tensor.storage.key!r} is not in the file; is the download complete?") from None
        last = tensor.offset + sum((n - 1) * s for n, s in zip(tensor.size, tensor.stride))
        if 0 not in tensor.size and (last >= tensor.storage.numel or (last + 1) * width > info.file_size):
            raise Fault(f"tensor {name}: reaches element {last} of a storage of {info.file_size // width}")
        if info.compress_type != zipfile.ZIP_STORED:
            raise Fault(f"tensor {name}: its storage is compressed; torch.save never does that")
        self.file.seek(info.header_offset)
        header = self.file.read(30)
        if len(header) != 30 or header[:4] != b"PK\3\4":
            raise Fault(f"tensor {name}: its storage has no zip header; is the download complete?")
        names, extra = struct.unpack("<2H", header[26:])
        return info.header_offset + 30 + names + extra + tensor.offset * width, width

    def pieces(self, name):
        """The bytes of a tensor in row-major order."""
        tensor = self.tensors[name]
        start, width = self.place(name)
        count = math.prod(tensor.size)
        if count == 0:
            return
        if contiguous(tensor):
            crc = 0
            for piece in self.read(start, count * width):
                crc = zlib.crc32(piece, crc)
                yield piece
            info = self.zip.getinfo(f"{self.root}data/{tensor.storage.key}")
            if count * width == info.file_size and crc != info.CRC:
                raise Fault(f"tensor {name}: its checksum is wrong; download the file again")
        else:
            span = 1 + sum((n - 1) * s for n, s in zip(tensor.size, tensor.stride))
            if max(span, count) * width > MAX_STRIDED:
                raise Fault(f"tensor {name}: is not contiguous and has more than 256 MB; save it again with torch after .contiguous()")
            data = memoryview(b"".join(self.read(start, span * width))).cast(STORAGES[tensor.storage.kind][2])
            yield from strided(data, 0, tensor.size, tensor.stride)

    def read(self, start, size):
        self.file.seek(start)
        while size > 0:
            piece = self.file.read(min(size, PIECE))
            if not piece:
                raise Fault("ends inside a tensor; is the download complete?")
            size -= len(piece)
            yield piece


def contiguous(tensor):
    expected = 1
    for n, stride in zip(reversed(tensor.size), reversed(tensor.stride)):
        if n > 1 and stride != expected:
            return False
        expected *= n
    return True


def strided(data, at, size, stride):
    """The elements of a view, row by row."""
    if not size:
        yield data[at:at + 1].tobytes()
    elif len(size) > 1:
        for i in range(size[0]):
            yield from strided(data, at + i * stride[0], size[1:], stride[1:])
    elif stride[0] == 0:
        yield data[at:at + 1].tobytes() * size[0]
    else:
        yield data[at:at + (size[0] - 1) * stride[0] + 1:stride[0]].tobytes()


# ------------------------------------------------------------------ safetensors

def drop_tied_head(tensors):
    """An lm_head that is the token table itself is left out: that is how a tied model is written."""
    tables = [t for n, t in tensors.items() if n.endswith("decoder.embed_tokens.weight")]
    return {n: t for n, t in tensors.items() if n != "lm_head.weight" or t not in tables}


class Outputs:
    """New files, which get their names together when all are written. On any fault none of them is left, and whatever else has
    one of their names stays as it is."""

    def __init__(self):
        self.written = {}  # final path: temporary one
        self.said = []     # a line for each, for when it has its name

    def __enter__(self):
        return self

    def __exit__(self, fault, *_):
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # what is left takes no time, and is done as a whole
        named = []
        try:
            for path, temporary in self.written.items() if fault is None else ():
                give_name(temporary, path)
                named.append(path)
        except BaseException:
            for path in named:
                os.remove(path)
            raise
        finally:
            for temporary in self.written.values():
                if os.path.lexists(temporary):
                    os.remove(temporary)

    def write(self, path, pieces):
        """Writes a file under a name that nobody can guess. Returns its bytes."""
        check_absent(path)
        handle, self.written[path] = tempfile.mkstemp(prefix=os.path.basename(path) + ".tmp-", dir=os.path.dirname(path))
        with open(handle, "wb") as f:
            for piece in pieces:
                f.write(piece)
            f.flush()
            os.fsync(f.fileno())
            mask = os.umask(0)
            os.umask(mask)
            os.fchmod(f.fileno(), 0o666 & ~mask)
            return f.tell()


def check_absent(path):
    if os.path.lexists(path):
        raise Fault(f"{path}: is already there; remove it to convert again")


def give_name(temporary, path):
    """Gives a file its name, unless that is taken. Some file systems have no links: there we can only look before."""
    try:
        os.link(temporary, path)
    except OSError:
        check_absent(path)
        os.rename(temporary, path)


def safetensors(archive, tensors):
    """The bytes of a safetensors file."""
    order = sorted(tensors, key=lambda name: -written(tensors[name])[1])  # so that all are aligned
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name in order:
        dtype, width = written(tensors[name])
        archive.place(name)
        size = math.prod(tensors[name].size) * width
        header[name] = {"dtype": dtype, "shape": tensors[name].size, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for name in order:
        double = tensors[name].storage.kind == "DoubleStorage"
        yield from narrowed(name, archive.pieces(name)) if double else archive.pieces(name)


def convert_file(source, target, outputs):
    """Converts one file; returns the names of its tensors and their bytes."""
    try:
        archive = Archive(source)
        with archive.file:
            tensors = drop_tied_head(archive.tensors)
            size = outputs.write(target, safetensors(archive, tensors))
    except Fault as fault:
        raise Fault(f"{source}: {fault}") from None
    except Exception as e:  # a damaged zip, too, raises nearly anything; a full disk and the like are not the file's fault
        if isinstance(e, OSError) and e.errno != errno.EINVAL:
            raise
        raise Fault(f"{source}: is damaged ({e}); is the download complete?") from None
    doubles = sum(t.storage.kind == "DoubleStorage" for t in tensors.values())
    outputs.said.append(f"{target}: {len(tensors)} tensors, {size} bytes" +
                        (f"; {doubles} of F64 written as F32" if doubles else ""))
    return tensors, sum(math.prod(t.size) * written(t)[1] for t in tensors.values())


def shard_names(path):
    """{name.bin: name.safetensors} of an index."""
    try:
        with open_regular(path) as f:
            text = f.read(MAX_PICKLE + 1)
        if len(text) > MAX_PICKLE:
            raise Fault(f"has more than {MAX_PICKLE} bytes; expected an index")
        names = sorted(set(json.loads(text)["weight_map"].values()))
    except Fault as fault:
        raise Fault(f"{path}: {fault}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise Fault(f"{path}: has no weight_map from tensor names to file names; is the download complete?") from None
    targets = {}
    for name in names:
        if type(name) is not str or os.path.basename(name) != name or not name.endswith(".bin"):
            raise Fault(f"{path}: weight_map names {name!r}; expected .bin files in the same directory")
        target = name[:-4].replace("pytorch_model", "model", 1) + ".safetensors"
        if target in targets.values():
            raise Fault(f"{path}: weight_map names two files that would both become {target}; rename one of them")
        targets[name] = target
    return targets


def convert_shards(directory, binary, outputs):
    """Converts all shards, and writes their index last: without it, they are no model."""
    weight_map, total = {}, 0
    targets = {name: os.path.join(directory, target) for name, target in shard_names(binary + ".index.json").items()}
    for target in targets.values():
        check_absent(target)
    for name, target in targets.items():
        tensors, size = convert_file(os.path.join(directory, name), target, outputs)
        for tensor in tensors:
            if tensor in weight_map:
                raise Fault(f"tensor {tensor}: is in two shards, {weight_map[tensor]} and {os.path.basename(target)}")
            weight_map[tensor] = os.path.basename(target)
        total += size
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1)
    outputs.write(os.path.join(directory, "model.safetensors.index.json"), [text.encode()])


def convert(directory):
    binary = os.path.join(directory, "pytorch_model.bin")
    for name in ("model.safetensors", "model.safetensors.index.json"):
        check_absent(os.path.join(directory, name))
    with Outputs() as outputs:
        if os.path.lexists(binary):
            convert_file(binary, os.path.join(directory, "model.safetensors"), outputs)
        elif os.path.lexists(binary + ".index.json"):
            convert_shards(directory, binary, outputs)
        elif os.path.isdir(os.path.join(directory, "snapshots")):
            raise Fault(f"{directory}: is the root of a hub's cache; give the directory in its snapshots that its refs/main names")
        elif os.path.lexists(os.path.join(directory, "adapter_model.bin")):
            raise Fault(f"{directory}: has neither pytorch_model.bin nor its index; an adapter (adapter_model.bin) is no model: "
                        "save what merge_and_unload() of peft returns")
        else:
            raise Fault(f"{directory}: has neither pytorch_model.bin nor pytorch_model.bin.index.json; "
                        "expected the directory of a model")
    print("\n".join(outputs.said), file=sys.stderr)


def interrupt(*_):
    """Ends the program as Ctrl-C does, so that what is not complete is removed."""
    raise KeyboardInterrupt


def main():
    parser = argparse.ArgumentParser(description="Convert a model's pytorch_model.bin to model.safetensors, without torch.")
    parser.add_argument("directory", metavar="DIR", help="the directory of the model")
    for number in SIGNALS:
        signal.signal(number, interrupt)
    try:
        convert(parser.parse_args().directory)
    except Fault as fault:
        sys.exit(f"convert_bin.py: {fault}")
    except OSError as e:
        sys.exit(f"convert_bin.py: {e.filename or 'output'}: {e.strerror}")
    except MemoryError:
        sys.exit("convert_bin.py: out of memory: the file is damaged or hostile")
    except KeyboardInterrupt:
        sys.exit("convert_bin.py: interrupted; nothing incomplete is left")


if __name__ == "__main__":
    main()
