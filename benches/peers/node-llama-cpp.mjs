// One run of node-llama-cpp: N sequences of one context, greedy, side by side. Prints the result as a line of JSON.
//   node node-llama-cpp.mjs '{"model": "…", "num_sequences": 2, "prompt_tokens": 256, …}'

import {readFileSync} from "node:fs";
import {getLlama} from "node-llama-cpp";

const options = JSON.parse(process.argv[2]);
const {num_sequences: n, sample_tokens: samples, settle_tokens: settle} = options;

const llama = await getLlama({build: "never", gpu: options.gpu_layers === 0 ? false : "auto", logLevel: "error"});
const model = await llama.loadModel({
    modelPath: options.model,
    gpuLayers: options.gpu_layers < 0 ? "max" : options.gpu_layers
});
const context = await model.createContext({
    sequences: n,
    contextSize: options.ctx_size,
    batchSize: options.batch_size,
    threads: options.threads
});
const text = options.sentence.repeat(options.prompt_tokens);
const prompt = model.tokenize(text.slice(0, 16 * options.prompt_tokens)).slice(0, options.prompt_tokens);
if (prompt.length !== options.prompt_tokens) throw new Error(`the prompt has only ${prompt.length} tokens`);

// Everybody waits here until all have their first token.
let waiting = 0;
let open;
const barrier = new Promise((resolve) => (open = resolve));
const runs = Array.from({length: n}, async () => {
    const tokens = context.getSequence().evaluate(prompt, {temperature: 0, yieldEogToken: true});
    const take = async () => {
        const {done} = await tokens.next();
        if (done) throw new Error("a sequence ended early");
    };
    await take();
    if (++waiting === n) open();
    await barrier;
    for (let i = 0; i < settle; i++) await take();
    const started = performance.now();
    for (let i = 1; i < samples; i++) await take();
    return {started, ended: performance.now()};
});
const times = await Promise.all(runs);
const elapsed = Math.max(...times.map(({ended}) => ended)) - Math.min(...times.map(({started}) => started));
const about = new URL("node_modules/node-llama-cpp/package.json", import.meta.url);
const {version} = JSON.parse(readFileSync(about, "utf8"));
console.log(JSON.stringify({elapsed_seconds: elapsed / 1000, version}));
process.exit(0);
