"""The embedded models with their first layers alone, in folders like theirs.

Commands are tested with their default model. Compilation takes most of the time and grows with the
layers; half of them suffice if a test does not depend on the model's text.
"""

import hashlib
import json
import re
import shutil
from pathlib import Path

from safetensors.numpy import load_file, save_file

LAYERS = 3  # two that may be dense, and one whose rows are fetched
OF_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def make_shallow(source: Path, target: Path, layers: int = LAYERS) -> None:
    """Write a converted folder with the first layers of another one."""
    shutil.copytree(source, target)
    config = json.loads((source / "config.json").read_text())
    number = config["num_hidden_layers"]
    (target / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    for path in target.glob("*.safetensors"):
        tensors = {}
        for name, tensor in load_file(path).items():
            layer = OF_LAYER.search(name)
            if layer is not None and int(layer[1]) >= layers:
                continue
            of_all = path.name == "infinigen.safetensors" and name != "row_shares"
            assert not of_all or len(tensor) == number
            tensors[name] = tensor[:layers] if of_all else tensor
        save_file(tensors, path, {"format": "pt"})
    manifest = json.loads((target / "infinigen.json").read_text())
    for name in manifest["files"]:
        data = (target / name).read_bytes()
        manifest["files"][name] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    (target / "infinigen.json").write_text(json.dumps(manifest))
