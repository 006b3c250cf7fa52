"""llama.cpp on the same GGUF file, through the server in the wheel `xllamacpp`.

    python -m benchmarks.llama_cpp FILE NAME PROMPT

loads a GGUF file as one of CACHES and draws the first token after a prompt, token ids in JSON, for
`benchmarks.startup`.

Each round decodes after the prompt, whose rows the server keeps, so the context does not grow from
round to round as it does in the other systems. Times are the server's own, without HTTP.
"""

import concurrent.futures
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

# Name of a system -> type of its cache, and of its weights unless these are the file's.
CACHES = {"llama.cpp": "F16", "llama.cpp-f16": "F16", "llama.cpp-f32": "F32"}
GGUF_COPIES = Path(tempfile.gettempdir())  # copies of files with other weights, made once


class LlamaCpp:
    """Generation in progress with a GGUF file, as one of CACHES."""

    def __init__(self, path: Path, name: str, prompts: list[list[int]], new_tokens: int):
        self.prompts, self.drawn = prompts, []
        context = len(prompts[0]) + new_tokens + 1
        self.server = start_server(path, name, len(prompts), context)
        first = self._complete(1)
        self.prefill_seconds = max(each["prompt_ms"] for each in first) / 1e3

    def warm_up(self, rounds: int, tokens: int) -> None:
        for _ in range(rounds):
            self.round(tokens)

    def round(self, tokens: int) -> float:
        # The prompt's last token yields the first one, which the predicted time excludes.
        return max(each["predicted_ms"] for each in self._complete(tokens + 1)) / 1e3

    def step(self) -> Any:
        from benchmarks.systems import StepTime  # imports JAX, which would count as a start's time

        return StepTime(self.round(1))

    def facts(self) -> dict[str, Any]:
        import xllamacpp  # pyright: ignore[reportMissingImports]

        return {"prefill_seconds": self.prefill_seconds, "build": xllamacpp.__version__}

    def _complete(self, tokens: int) -> list[dict[str, float]]:
        """Decode after every prompt concurrently; return the server's times."""

        def one(prompt: list[int]) -> dict[str, float]:
            request = {"prompt": prompt, "n_predict": tokens, "temperature": 0}
            request |= {"ignore_eos": True, "cache_prompt": True}
            answer = self.server.handle_completions(request)
            answer = json.loads(answer) if isinstance(answer, str) else answer
            return answer["timings"]

        with concurrent.futures.ThreadPoolExecutor(len(self.prompts)) as pool:
            return list(pool.map(one, self.prompts))


def start_server(path: Path, name: str, rows: int, context: int, folder: Path = GGUF_COPIES) -> Any:
    """Return llama.cpp's server, on a loopback socket, for `rows` sequences of `context` tokens."""
    import xllamacpp  # pyright: ignore[reportMissingImports]

    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(converted(path, name, folder))
    parameters.n_ctx, parameters.n_parallel = rows * context, rows
    parameters.warmup = parameters.ctx_shift = False
    parameters.verbosity = 0
    cache = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{CACHES[name]}")
    parameters.cache_type_k = parameters.cache_type_v = cache
    kind = xllamacpp.llama_flash_attn_type
    parameters.flash_attn_type = kind.LLAMA_FLASH_ATTN_TYPE_ENABLED
    for threads in (parameters.cpuparams, parameters.cpuparams_batch):
        threads.n_threads = len(os.sched_getaffinity(0))
    return xllamacpp.Server(parameters)


def converted(path: Path, name: str, folder: Path = GGUF_COPIES) -> Path:
    """Return the file that a system of CACHES loads: the given one, or a copy, made once."""
    if name == "llama.cpp":
        return path
    import gguf
    import numpy as np

    found = path.stat()
    copy = folder / f"{path.stem}-{found.st_size}-{found.st_mtime_ns}-{CACHES[name]}.gguf"
    if copy.exists():
        return copy
    part = copy.with_suffix(".part")
    reader = gguf.GGUFReader(path)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(part, architecture)
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key in ("general.architecture", "general.file_type"):
            continue
        kinds = field.types
        inner = kinds[-1] if kinds[0] is gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), kinds[0], sub_type=inner)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        half = CACHES[name] == "F16" and values.ndim > 1  # llama.cpp wants vectors in float32
        writer.add_tensor(tensor.name, values.astype(np.float16 if half else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.replace(copy)
    return copy


if __name__ == "__main__":
    gguf_file, kind, prompt_file = sys.argv[1:]
    LlamaCpp(Path(gguf_file), kind, [json.loads(Path(prompt_file).read_text())], 1)
