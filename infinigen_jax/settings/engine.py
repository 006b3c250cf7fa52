"""Settings of an engine that do not depend on JAX; `engine.settings` adds the policy."""

import dataclasses

from infinigen_jax.numeric import LARGEST_FACTOR, OneOf, Range, whole_number
from infinigen_jax.settings.pool import Pool
from infinigen_jax.settings.setting import Settings, setting

SCHEDULES = ("auto", "fused", "layerwise")
TRANSFERS = ("auto", "xla", "cuda")
ROW_FORMATS = ("auto", "int8", "int4")
WEIGHTS = ("device", "host")
WEIGHT_DTYPES = ("bfloat16", "int8", "int4")  # of `load`
CHUNK_UNIT = 64  # chunks of a prompt are multiples of it, or as long as `prefill_chunk`


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions(Settings):
    """Settings of an engine other than its policy.

    Attributes:
        dense_layers: the default depends on the policy: 2, or with InfiniGen those that need it,
            see `Model.dense_layers`.
        schedule: "auto" chooses layerwise for models of many layers on a CPU, where compiling a
            fused step takes longer with every layer, and fused otherwise.
        hot_set: at least 1, or 0 for none. By default 2 with the `cuda` transfer, and 0 with `xla`,
            where looking rows up costs more than moving them.
        weights: with "host" the layers' weights are moved for each step; results are equal. `load`
            takes it as well.
        lossless: see docs/lossless.md. Not with policy full or a pool.
        draft_weights: not for a model whose weights are int8 or int4.
        check: a NaN or an infinity ends a run with `decode.finite_check.NotFiniteError`. Uses
            the fused schedule.
        prefill_chunk: by default `prefill.prefill.longest_chunk`. With a pool, prompts are read
            in one piece.
    """

    dense_layers: int | None = setting(
        None,
        "first layers whose cache stays on the device (default: those that need it)",
        "N",
        whole_number(0),
    )
    schedule: str = setting(
        "auto", "auto, fused or layerwise; equal results", "S", OneOf(SCHEDULES)
    )
    transfer: str = setting(
        "auto", "how rows reach the device: auto, xla or cuda", "T", OneOf(TRANSFERS)
    )
    rows: str = setting(
        "auto", "format of rows on the host: auto (exact), int8 or int4", "T", OneOf(ROW_FORMATS)
    )
    hot_set: float | None = setting(
        None,
        "size of the device's cache of fetched rows, in multiples of the rows that a step may "
        "fetch per layer, at least 1; 0: no such cache (default: 2 with transfer cuda, else none)",
        "M",
        Range(1, LARGEST_FACTOR, or_zero=True),
    )
    pool: Pool | None = None
    weights: str = setting(
        "device", "memory that holds the layers' weights: device or host", "W", OneOf(WEIGHTS)
    )
    lossless: bool = setting(
        False, "verify the policy's tokens with the full cache; the result is that of policy full"
    )
    draft_tokens: int | None = setting(
        None,
        "maximum number of tokens drafted before a verification, with lossless "
        "(default: 15, or the policy's window)",
        "N",
        whole_number(1, 15),
    )
    draft_weights: str | None = setting(
        None,
        "copy of the weights for drafts, with lossless: none, bfloat16, int8 or int4 (default: "
        "int8 on a CPU or with weights host, unless the model's are int8 or int4; else none)",
        "T",
        OneOf(("none", *WEIGHT_DTYPES)),
    )
    check: bool = setting(False, "stop at a NaN or an infinity, and report where it occurred")
    prefill_chunk: int | None = setting(
        None,
        "prompt tokens processed at a time, at least 64 (default: 1024 on the CPU, else up to "
        "4096; a server: half of that)",
        "N",
        whole_number(CHUNK_UNIT),
    )
