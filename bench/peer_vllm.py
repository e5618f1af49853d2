"""vLLM on CPU, run by its own Python: commands on stdin, answers on stdout, a JSON line each.

Nothing of Outrider is imported here. The only argument is a JSON object: model, cpus,
context_len, max_sessions, eager, cache. All else is as vLLM has it by default: its engine runs
in a process of its own, for which it sets up OpenMP and the allocator.
"""

import importlib
import json
import os
import sys
import time
from typing import Any


def environment(settings: dict[str, Any]) -> dict[str, str]:
    """What vLLM reads when it is imported; one thread is bound to each of the CPUs."""
    cpus = ",".join(str(cpu) for cpu in settings["cpus"])
    return {
        "VLLM_CPU_OMP_THREADS_BIND": cpus,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CACHE_ROOT": settings["cache"],
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def load(settings: dict[str, Any]) -> Any:
    """The model, float32."""
    vllm = importlib.import_module("vllm")
    return vllm.LLM(
        model=settings["model"],
        dtype="float32",
        max_model_len=settings["context_len"],
        max_num_seqs=settings["max_sessions"],
        enable_prefix_caching=False,
        enforce_eager=settings["eager"],
        disable_log_stats=True,
    )


def complete(llm: Any, command: dict[str, Any]) -> dict[str, Any]:
    """Continue the prompts together, greedily, to exactly that many tokens."""
    vllm = importlib.import_module("vllm")
    prompts = [{"prompt_token_ids": ids} for ids in command["prompts"]]
    params = vllm.SamplingParams(
        temperature=0.0, max_tokens=command["new_tokens"], ignore_eos=True, detokenize=False
    )
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "token_ids": [list(o.outputs[0].token_ids) for o in outputs]}


def main() -> None:
    """Load, say so, then answer commands until stdin ends."""
    # Answers alone go to the real stdout; whatever libraries print goes to stderr.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    settings = json.loads(sys.argv[1])
    os.environ.update(environment(settings))
    os.environ.pop("OMP_NUM_THREADS", None)  # vLLM goes by the CPUs that it gets
    llm = load(settings)
    version = importlib.import_module("vllm").__version__
    print(json.dumps({"version": version}), file=answers, flush=True)
    for line in sys.stdin:
        try:
            answer = complete(llm, json.loads(line))
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
