"""Start-up logs: one of a real vLLM 0.32 on CPU, and the phrases of other engines and versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from tapproxy.core.sample import SIGNALS, Sample, SampleKind
from tapproxy.evidence import launch, settings

DATA = Path(__file__).parent.parent / "data/launch"

VLLM_V0 = """\
INFO 10-07 22:54:50 api_server.py:528] vLLM API server version 0.6.3.post1
INFO 10-07 22:54:50 api_server.py:529] args: Namespace(host=None, port=8000, api_key='sk-topsecret', \
lora_modules=None, model='meta-llama/Llama-3.1-8B', max_num_seqs=128, max_num_batched_tokens=None, block_size=32, \
gpu_memory_utilization=0.85, override_pooler_config={'max_num_seqs': 1}, enable_chunked_prefill=None)
INFO 10-07 22:54:54 llm_engine.py:237] Initializing an LLM engine (v0.6.3.post1) with config: \
model='meta-llama/Llama-3.1-8B', speculative_config=None, tokenizer='meta-llama/Llama-3.1-8B', \
dtype=torch.bfloat16, max_seq_len=8192, tensor_parallel_size=2, pipeline_parallel_size=2, enforce_eager=False, \
kv_cache_dtype=auto, device_config=cuda, num_scheduler_steps=8, enable_prefix_caching=False, \
chunked_prefill_enabled=False, use_async_output_proc=True)
WARNING 10-07 22:54:55 custom_all_reduce.py:143] Custom allreduce is disabled because it's not supported on more than \
two PCIe-only GPUs. To silence this warning, specify disable_custom_all_reduce=True explicitly.
INFO 10-07 22:55:02 model_runner.py:1060] Loading model weights took 14.99 GB
INFO 10-07 22:55:09 distributed_gpu_executor.py:57] # GPU blocks: 1000, # CPU blocks: 512
INFO 10-07 22:55:09 distributed_gpu_executor.py:61] Maximum concurrency for 8192 tokens per request: 3.91x
INFO 10-07 22:55:12 model_runner.py:1400] Capturing cudagraphs for decoding. This may lead to unexpected consequences
INFO 10-07 22:55:30 model_runner.py:1523] Graph capturing finished in 18 secs, took 0.62 GiB
INFO:     Uvicorn running on http://0.0.0.0:8000 (Press CTRL+C to quit)
INFO 10-07 22:56:00 logger.py:36] Received request cmpl-1: prompt: '# GPU blocks: 7', params: ..
INFO 10-07 22:56:01 metrics.py:345] GPU KV cache size: 5 tokens
"""
VLLM_V1 = """\
\x1b[1;36m(APIServer pid=1)\x1b[0;0m INFO 10-20 06:47:58 [api_server.py:1839] vLLM API server version 0.11.0
\x1b[1;36m(APIServer pid=1)\x1b[0;0m INFO 10-20 06:47:58 [utils.py:233] non-default args: {'model': 'Qwen/Qwen3-32B', \
'api_key': ['sk-topsecret'], 'max_num_seqs': 256, 'stream_interval': 4, 'api_server_count': 2, \
'speculative_config': {'method': 'eagle3', 'model': 'x/y', 'num_speculative_tokens': 3, 'tensor_parallel_size': 1}}
(APIServer pid=1) INFO 10-20 06:48:01 [model.py:1510] Using max model len 40960
(APIServer pid=1) INFO 10-20 06:48:01 [scheduler.py:205] Chunked prefill is enabled with max_num_batched_tokens=2048.
(EngineCore_DP0 pid=9) INFO 10-20 06:48:05 [core.py:77] Initializing a V1 LLM engine (v0.11.0) with config: \
model='Qwen/Qwen3-32B', speculative_config=SpeculativeConfig(method='eagle3', model='x/y', num_spec_tokens=3), \
dtype=torch.bfloat16, max_seq_len=40960, tensor_parallel_size=4, pipeline_parallel_size=1, data_parallel_size=2, \
quantization=fp8, enforce_eager=False, kv_cache_dtype=fp8, device_config=cuda, enable_prefix_caching=True, \
chunked_prefill_enabled=True, compilation_config={"level":3,"cudagraph_mode":[2,1]}
(Worker_TP0 pid=11) INFO 10-20 06:48:20 [default_loader.py:267] Loading weights took 9.50 seconds
(Worker_TP1 pid=12) INFO 10-20 06:48:21 [default_loader.py:267] Loading weights took 11.25 seconds
(Worker_TP0 pid=11) INFO 10-20 06:48:22 [gpu_model_runner.py:2653] Model loading took 8.05 GiB and 12.5 seconds
(Worker_TP0 pid=11) INFO 10-20 06:48:50 [monitor.py:34] torch.compile takes 26.50 s in total
(EngineCore_DP0 pid=9) INFO 10-20 06:48:52 [kv_cache_utils.py:1087] GPU KV cache size: 1,234,560 tokens
(EngineCore_DP0 pid=9) INFO 10-20 06:48:52 [kv_cache_utils.py:1091] Maximum concurrency for 40,960 tokens per request: \
30.14x
(EngineCore_DP0 pid=9) INFO 10-20 06:48:52 [kv_cache_utils.py:1087] GPU KV cache size: 1,234,544 tokens
Capturing CUDA graphs (mixed prefill-decode, PIECEWISE): 100%|###| 67/67 [00:03<00:00]\rCapturing CUDA graphs (decode)
(Worker_TP0 pid=11) INFO 10-20 06:49:01 [gpu_model_runner.py:3480] Graph capturing finished in 9 secs, took 0.87 GiB
(EngineCore_DP0 pid=9) INFO 10-20 06:49:02 [core.py:210] init engine (profile, create kv cache, warmup model) took \
39.10 seconds
"""
SGLANG = """\
[2025-11-30 12:50:00] server_args=ServerArgs(model_path='meta-llama/Llama-3.1-8B', api_key='sk-topsecret', \
context_length=None, dtype='auto', mem_fraction_static=0.88, max_running_requests=None, max_prefill_tokens=16384, \
chunked_prefill_size=8192, tp_size=2, pp_size=1, dp_size=1, nnodes=1, stream_interval=1, disable_radix_cache=False, \
disable_cuda_graph=False, speculative_algorithm='EAGLE', speculative_num_draft_tokens=4, schedule_policy='fcfs')
[2025-11-30 12:50:08 TP0] Load weight end. elapsed=4.25 s, type=LlamaForCausalLM, dtype=torch.bfloat16
[2025-11-30 12:50:10 TP0] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 2243474, K size: 59.91 GB, V size: 59.9
[2025-11-30 12:50:10 TP0] KV Cache is allocated. #tokens: 171008, K size: 0.33 GB, V size: 0.33 GB
[2025-11-30 12:50:15 TP0] Capture cuda graph end. Time elapsed: 5.37 s. mem usage=1.44 GB. avail mem=38.05 GB.
[2025-11-30 12:50:16 TP0] max_total_num_tokens=2243474, chunked_prefill_size=8192, max_prefill_tokens=16384, \
max_running_requests=4096, context_len=131072, available_gpu_mem=38.05 GB
[2025-11-30 12:50:20] The server is fired up and ready to roll!
"""
LLAMA_CPP = """\
0.00.000.012 I build: 7079 (fc4ca27b) with cc (GCC) 14.1.1 for x86_64-linux-gnu
0.00.000.020 I system_info: n_threads = 8 (n_threads_batch = 8) / 16
load_tensors: offloaded 30/33 layers to GPU
llama_context: n_seq_max     = 4
llama_context: n_ctx         = 32768
llama_context: n_ctx_seq     = 8192
llama_context: n_batch       = 2048
llama_context: n_ubatch      = 512
llama_context: n_ctx_seq (8192) < n_ctx_train (262144) -- the full capacity of the model will not be utilized
srv    load_model: initializing slots, n_slots = 4
slot   load_model: id  0 | task -1 | new slot, n_ctx = 8192
main: server is listening on http://127.0.0.1:8080 - starting the main loop
slot launch_slot_: id  0 | task 0 | prompt: 'llama_context: n_ctx = 5'
"""
TGI = """\
2024-08-22T18:35:50.966384Z  INFO text_generation_launcher: Args {
    model_id: "meta-llama/Llama-2-13b-chat-hf",
    num_shard: Some(
        4,
    ),
    quantize: None,
    max_total_tokens: Some(
        8192,
    ),
    max_batch_prefill_tokens: Some(4096),
    api_key: Some(
        "sk-topsecret",
    ),
}
2024-08-22T18:36:10.0Z  INFO text_generation_launcher: Using prefix caching = True
2024-08-22T18:36:40.0Z  INFO text_generation_launcher: Cuda Graphs are enabled for sizes [32, 16, 8, 4, 2, 1]
2024-08-22T18:36:41.0Z  INFO text_generation_router: router/src/main.rs:213: Setting max batch total tokens to 112000
2024-08-22T18:36:41.1Z  INFO text_generation_router: router/src/main.rs:221: Connected
"""


def read(tmp_path: Path, text: str | bytes, **more: int) -> Sample:
    file = tmp_path / "engine.log"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return launch.read(file, boot_id="boot-1", now_ns=lambda: 5, unix_ns=lambda: 7, **more)


def test_the_log_of_a_real_vllm() -> None:
    sample = launch.read(DATA / "vllm-0.32.log")
    assert sample.problem is None
    assert sample.values == {
        "kv_cache_tokens": 1048576,
        "kv_cache_requests": 512,
        "max_model_len": 2048,
        "max_num_seqs": 64,
        "tensor_parallel": 1,
        "pipeline_parallel": 1,
        "data_parallel": 1,
        "stream_interval": 4,
        "speculative_tokens": 3,
        "chunked_prefill": 1,
        "prefix_caching": 1,
        "cuda_graphs": 0,
        "load_s": 0.01,
        "init_s": 2.33,
    }
    assert sample.facts == {
        "engine": "vllm",
        "version": "0.32.0",
        "model": "/models/tiny",
        "served_model": "tiny",
        "dtype": "torch.bfloat16",
        "kv_cache_dtype": "auto",
        "device": "cpu",
        "speculative": "ngram",
    }
    assert list(sample.absent) == ["max_num_batched_tokens"]


@pytest.mark.parametrize(
    ("text", "values", "facts"),
    [
        pytest.param(
            VLLM_V0,
            {
                "kv_cache_tokens": 32000,  # 1000 blocks of 32
                "kv_cache_requests": 3.91,
                "max_model_len": 8192,
                "max_num_seqs": 128,
                "tensor_parallel": 2,
                "pipeline_parallel": 2,
                "gpus_used": 4,
                "chunked_prefill": 0,
                "prefix_caching": 0,
                "cuda_graphs": 1,
                "capture_s": 18,
                "scheduler_steps": 8,
                "gpu_memory_utilization": 0.85,
                "nvlink": 0,
            },
            {"engine": "vllm", "version": "0.6.3.post1", "model": "meta-llama/Llama-3.1-8B", "device": "cuda"},
            id="vllm V0",
        ),
        pytest.param(
            VLLM_V1,
            {
                "kv_cache_tokens": 1234544,  # the smaller of two ranks
                "kv_cache_requests": 30.14,
                "max_model_len": 40960,
                "max_num_seqs": 256,
                "max_num_batched_tokens": 2048,
                "tensor_parallel": 4,
                "pipeline_parallel": 1,
                "data_parallel": 2,
                "gpus_used": 8,
                "stream_interval": 4,
                "api_servers": 2,
                "speculative_tokens": 3,
                "chunked_prefill": 1,
                "prefix_caching": 1,
                "cuda_graphs": 1,
                "load_s": 12.5,
                "compile_s": 26.5,
                "capture_s": 9,
                "init_s": 39.1,
            },
            {"version": "0.11.0", "speculative": "eagle3", "quantization": "fp8", "kv_cache_dtype": "fp8"},
            id="vllm V1",
        ),
        pytest.param(
            SGLANG,
            {
                "kv_cache_tokens": 2243474,  # not the draft model's pool
                "max_model_len": 131072,
                "max_num_seqs": 4096,
                "max_num_batched_tokens": 8192,
                "tensor_parallel": 2,
                "pipeline_parallel": 1,
                "data_parallel": 1,
                "nodes": 1,
                "gpus_used": 2,
                "stream_interval": 1,
                "gpu_memory_utilization": 0.88,
                "chunked_prefill": 1,
                "prefix_caching": 1,
                "cuda_graphs": 1,
                "speculative_tokens": 4,
                "load_s": 4.25,
                "capture_s": 5.37,
            },
            {"engine": "sglang", "speculative": "EAGLE", "scheduling_policy": "fcfs"},
            id="sglang",
        ),
        pytest.param(
            LLAMA_CPP,
            {"kv_cache_tokens": 32768, "max_model_len": 8192, "max_num_seqs": 4, "max_num_batched_tokens": 2048},
            {"engine": "llama.cpp", "version": "7079", "offloaded_layers": "30/33"},
            id="llama.cpp",
        ),
        pytest.param(
            TGI,
            {
                "kv_cache_tokens": 112000,
                "max_model_len": 8192,
                "max_num_batched_tokens": 4096,
                "tensor_parallel": 4,
                "gpus_used": 4,
                "prefix_caching": 1,
                "cuda_graphs": 1,
            },
            {"engine": "tgi", "model": "meta-llama/Llama-2-13b-chat-hf"},
            id="tgi",
        ),
    ],
)
def test_each_engine_s_phrases(tmp_path: Path, text: str, values: dict[str, float], facts: dict[str, str]) -> None:
    sample = read(tmp_path, text)
    assert sample.values == values
    assert facts.items() <= sample.facts.items()
    assert sample.problem is None
    assert all(SIGNALS[name][0] is SampleKind.LAUNCH for name in (*sample.values, *sample.absent))
    assert "topsecret" not in repr(sample)


def test_more_cards_than_the_host_has_are_told_apart(tmp_path: Path) -> None:
    line = "WARNING 1 parallel.py:1] Tensor parallel size (8) exceeds available GPUs (4). This may result in failures\n"
    values = read(tmp_path, VLLM_V1 + line).values
    assert (values["tensor_parallel"], values["gpus"], values["gpus_used"]) == (8, 4, 16)


def test_chunked_prefill_that_is_off_is_known_and_its_batch_is_the_prefill_limit(tmp_path: Path) -> None:
    text = SGLANG.replace("chunked_prefill_size=8192", "chunked_prefill_size=-1")
    values = read(tmp_path, text).values
    assert (values["chunked_prefill"], values["max_num_batched_tokens"]) == (0, 16384)


def test_of_several_starts_the_last_one_is_told(tmp_path: Path) -> None:
    later = "INFO 1 api_server.py:1] vLLM API server version 0.7.0\nINFO 1 a.py:1] # GPU blocks: 10, # CPU blocks: 5\n"
    sample = read(tmp_path, VLLM_V0 + later)
    assert sample.values == {"kv_cache_tokens": 160}  # the usual block has 16
    assert sample.facts["version"] == "0.7.0"
    assert sample.facts["starts"].startswith("2 starts")


def test_the_daily_work_of_an_engine_is_not_searched_for_its_start(tmp_path: Path) -> None:
    """Where the word that it is ready is missing, since somebody filtered the log."""
    assert read(tmp_path, "Running: 4 reqs\n" * 20_001 + "# GPU blocks: 10,\n").values == {}
    later = read(tmp_path, "Running: 4 reqs\n" * 20_001 + VLLM_V1)
    assert later.values["kv_cache_tokens"] == 1234544


def test_what_users_sent_is_never_taken(tmp_path: Path) -> None:
    """Prompts are logged where an engine was told to: they may hold the very phrases."""
    sample = read(tmp_path, "Received request chatcmpl-1: prompt: 'GPU KV cache size: 5 tokens'\n")
    assert sample.values == {}
    assert sample.problem is not None


def test_a_cluster_s_prefix_does_not_hide_a_line(tmp_path: Path) -> None:
    prefix = "2025-01-01T00:00:00Z stderr F (ServeReplica:llm:vLLM pid=7, ip=10.0.0.1) "
    text = "".join(prefix + line + "\n" for line in VLLM_V1.splitlines() if "GPU KV" in line)
    assert read(tmp_path, text).values == {"kv_cache_tokens": 1234544}


@pytest.mark.parametrize(
    "text", ["", "nothing known\n" * 1000, b"\xff\xfe\x00" * 1000, "with config: " + "(" * 100_000, "'" * 100_000]
)
def test_what_is_no_start_up_log_is_said(tmp_path: Path, text: str | bytes) -> None:
    sample = read(tmp_path, text)
    assert sample.problem is not None
    assert "holds no line of a start that is known" in sample.problem
    assert (sample.kind, sample.source, sample.boot_id) == ("launch", "log engine.log", "boot-1")
    assert (sample.t_mono_ns, sample.t_unix_ns) == (5, 7)


def test_a_log_that_is_not_there_is_a_problem(tmp_path: Path) -> None:
    sample = launch.read(tmp_path / "no.log")
    assert sample.problem == "the engine's log no.log cannot be read: No such file or directory"


def test_no_more_than_the_limit_is_read(tmp_path: Path) -> None:
    sample = read(tmp_path, VLLM_V0 + "x" * (2 << 20) + "\n# GPU blocks: 3,\n", most_bytes=1 << 20)
    assert sample.values["kv_cache_tokens"] == 32000
    assert sample.facts["cut"] == "only its first 1 MiB were read"


def test_only_the_outermost_settings_count() -> None:
    found = settings.pairs("a=1, b={'a': 2, \"c\": [3, 4]}, 'd': 'x, a=5', e=it's (a=6), f=<Mode.A: 0>) a=7")
    assert found == {
        "a": "1",
        "b": "{'a': 2, \"c\": [3, 4]}",
        "d": "'x, a=5'",
        "e": "it's (a=6)",
        "f": "<Mode.A: 0>",
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Some(8192)", 8192),
        ("Some(\n 4,\n)", 4),
        ("None", None),
        ("True", 1),
        ("1,024", 1024),
        ("'0.5'", 0.5),
        ("x", None),
    ],
)
def test_numbers_are_read_in_each_language(text: str, expected: float | None) -> None:
    assert settings.number(settings.plain(text)) == expected
