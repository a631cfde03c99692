"""llama.cpp's server until stdin ends: llama_cpp_server.py TARGET [MODE DRAFTER K], by a Python that has xllamacpp.

It prints its URL. MODE: SIMPLE or EAGLE3; K: tokens of a draft. The cache is in float32.
"""

import os
import sys

import xllamacpp

params, draft = xllamacpp.CommonParams(), sys.argv[2:]
params.model.path, params.n_ctx, params.n_parallel, params.cache_ram_mib = sys.argv[1], 2048, 1, 0
threads = len(os.sched_getaffinity(0))
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
if draft:
    mode, place, count = draft
    params.speculative.types = [getattr(xllamacpp.common_speculative_type, f"COMMON_SPECULATIVE_TYPE_DRAFT_{mode}")]
    own = params.speculative.draft
    own.mparams.path, own.n_max, own.p_min = place, int(count), 0.0
    own.cpuparams.n_threads = own.cpuparams_batch.n_threads = threads
    own.cache_type_k = own.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
sys.stdin.read()
