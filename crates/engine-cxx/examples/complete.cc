// Completes several prompts at once, a thread and a sequence each, as an app with several text fields would.
//
// usage: complete MODEL [PROMPT...]

#include <CotabbyInferenceEngine.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr int max_tokens = 32;

struct Completion {
    std::string text;
    int tokens = 0;
    EngineStatus status = EngineStatus::ok;
};

Completion complete(CotabbyInferenceEngine& engine, const std::string& prompt) {
    SamplingConfig config{max_tokens, 0.0F, 40, 0.95F, 0.05F, 1.1F, 42};
    config.single_line = true;
    const int32_t id = engine.createSequence(config);
    if (id < 0) {
        return {"", 0, EngineStatus::error};
    }
    const std::vector<int32_t> tokens = engine.tokenize(prompt.data(), static_cast<int>(prompt.size()));
    Completion completion;
    completion.status = engine.decodePrompt(id, tokens.data(), static_cast<int>(tokens.size()), 0);
    while (completion.status == EngineStatus::ok && completion.tokens < max_tokens) {
        const SampleResult result = engine.sampleNext(id);
        if (result.is_eos || result.was_cancelled) {
            break;
        }
        completion.text.append(result.piece, static_cast<size_t>(result.piece_length));
        ++completion.tokens;
    }
    engine.destroySequence(id);
    return completion;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 2) {
        std::fprintf(stderr, "usage: %s MODEL [PROMPT...]\n", argv[0]);
        return EXIT_FAILURE;
    }
    std::vector<std::string> prompts(argv + 2, argv + argc);
    if (prompts.empty()) {
        prompts = {"The capital of France is", "Once upon a time", "Dear colleagues, I am writ", "To make pancakes, you"};
    }

    CotabbyEngineOptions options;
    options.max_sequences = static_cast<int>(prompts.size());
    CotabbyInferenceEngine engine;
    if (engine.loadModelWithOptions(argv[1], options) != EngineStatus::ok) {
        char message[512] = {};
        engine.lastErrorMessage(message, sizeof message - 1);
        std::fprintf(stderr, "cannot load %s: %s\n", argv[1], message);
        return EXIT_FAILURE;
    }

    std::vector<Completion> completions(prompts.size());
    std::vector<std::thread> threads;
    for (size_t i = 0; i < prompts.size(); ++i) {
        threads.emplace_back([&, i] { completions[i] = complete(engine, prompts[i]); });
    }
    for (std::thread& thread : threads) {
        thread.join();
    }

    bool good = true;
    for (size_t i = 0; i < prompts.size(); ++i) {
        std::printf("%s|%s\n", prompts[i].c_str(), completions[i].text.c_str());
        good = good && completions[i].status == EngineStatus::ok && completions[i].tokens > 0;
    }
    const CotabbyEngineMetrics metrics = engine.getMetrics();
    if (metrics.decode_steps > 0) {
        std::printf("%.1f sequences shared a step, on average\n",
                    static_cast<double>(metrics.decode_rows) / static_cast<double>(metrics.decode_steps));
    }
    return good ? EXIT_SUCCESS : EXIT_FAILURE;
}
