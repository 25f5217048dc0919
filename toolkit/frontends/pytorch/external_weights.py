# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Export large modules by TorchScript without a second copy of the weights in memory.

That exporter would serialize all weights into one message. For a large module it writes the graph
alone, with every weight as an input; the weights are then written from the module's memory to an
external data file, and the inputs become initializers that refer to it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx

from toolkit.frontends.pytorch.call_signature import to_numpy
from toolkit.storage.atomic_write import sidecar_of
from toolkit.storage.weights import set_reference

LARGE = 1 << 28
"""Above this size in bytes, weights bypass the exporter, which may otherwise fold operators into
them: a transposed weight is stored transposed."""


def weights_of(module: Any) -> dict[str, Any]:
    """Return parameters and buffers by name, shared ones under each of their names."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def is_large(module: Any) -> bool:
    return sum(tensor.nbytes for tensor in weights_of(module).values()) > LARGE


def attach(path: Path, module: Any) -> None:
    """Turn the graph inputs that are weights into initializers with external data."""
    weights = weights_of(module)
    proto = onnx.load(path, load_external_data=False)
    sidecar = sidecar_of(path)
    kept = [value for value in proto.graph.input if value.name not in weights]
    named = [value.name for value in proto.graph.input if value.name in weights]
    with sidecar.open("wb") as file:
        for name in named:
            array = to_numpy(weights[name], copy=False)
            tensor = proto.graph.initializer.add()
            tensor.name = name
            tensor.data_type = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
            tensor.dims.extend(array.shape)
            start = file.tell()
            file.write(array.reshape(-1).view(np.uint8).data)
            set_reference(tensor, sidecar.name, start, file.tell() - start)
    del proto.graph.input[:]
    proto.graph.input.extend(kept)
    path.write_bytes(proto.SerializeToString())
