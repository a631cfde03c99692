"""llama.cpp's server until stdin ends: llama_cpp_server.py TARGET MODE DRAFTER K, by a Python that has xllamacpp.

It prints its URL. MODE: SIMPLE, EAGLE3, DSPARK or DFLASH; K: tokens of a draft. The cache is in float32.
"""

import os
import sys

import xllamacpp

target, mode, drafter, count = sys.argv[1:]
params = xllamacpp.CommonParams()
draft = params.speculative.draft
params.model.path, params.n_ctx, params.n_parallel, params.cache_ram_mib = target, 2048, 1, 0
params.speculative.types = [getattr(xllamacpp.common_speculative_type, f"COMMON_SPECULATIVE_TYPE_DRAFT_{mode}")]
draft.mparams.path, draft.n_max, draft.p_min = drafter, int(count), 0.0
for part in (params, draft):
    part.cpuparams.n_threads = part.cpuparams_batch.n_threads = len(os.sched_getaffinity(0))
    part.cache_type_k = part.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
sys.stdin.read()
