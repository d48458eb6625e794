// What all tests use. The model comes from COTABBY_TEST_MODEL_PATH; without it nothing runs and the run fails.
#pragma once

#include <doctest/doctest.h>

#include <chrono>
#include <string>
#include <vector>

#include "CotabbyInferenceEngine.h"

namespace test {

using Clock = std::chrono::steady_clock;
using Tokens = std::vector<int32_t>;

// The model under test.
const char* model_path();

inline SamplingConfig greedy(int max_prediction_tokens = 32) {
    return {max_prediction_tokens, 0.0F, 0, 0.0F, 0.0F, 0.0F, 0};
}

inline SamplingConfig hot(uint32_t seed) {
    return {64, 1.8F, 0, 1.0F, 0.0F, 1.0F, seed};
}

inline Tokens tokens_of(const CotabbyInferenceEngine& engine, const std::string& text) {
    return engine.tokenize(text.data(), static_cast<int>(text.size()));
}

inline EngineStatus decode(CotabbyInferenceEngine& engine, int32_t id, const Tokens& tokens, int start = 0) {
    return engine.decodePrompt(id, tokens.data(), static_cast<int>(tokens.size()), start);
}

inline std::string last_error(const CotabbyInferenceEngine& engine) {
    std::string message(1024, '\0');
    const int size = engine.lastErrorMessage(message.data(), static_cast<int>(message.size()));
    message.resize(size > 0 ? static_cast<size_t>(size) : 0);
    return message;
}

// Up to `count` tokens; fewer where the completion ends.
inline Tokens sample(CotabbyInferenceEngine& engine, int32_t id, int count) {
    Tokens sampled;
    while (static_cast<int>(sampled.size()) < count) {
        const SampleResult result = engine.sampleNext(id);
        if (result.is_eos || result.was_cancelled) {
            break;
        }
        sampled.push_back(result.token);
    }
    return sampled;
}

// A prompt of exactly `count` tokens.
inline Tokens long_prompt(const CotabbyInferenceEngine& engine, size_t count) {
    std::string text;
    Tokens tokens;
    while (tokens.size() < count) {
        for (int i = 0; i < 64; ++i) {
            text += "The quick brown fox jumps over the lazy dog. ";
        }
        tokens = tokens_of(engine, text);
    }
    tokens.resize(count);
    return tokens;
}

// One thread a step: with more of them than free cores, the small models' steps are mostly waits.
inline CotabbyEngineOptions options(int window, int batch) {
    CotabbyEngineOptions options;
    options.context_window_tokens = window;
    options.batch_size = batch;
    options.thread_count = 1;
    return options;
}

// An engine with the model under test.
struct Loaded {
    explicit Loaded(int window = 1024, int batch = 256) {
        REQUIRE(engine.loadModelWithOptions(model_path(), options(window, batch)) == EngineStatus::ok);
    }
    int32_t sequence(SamplingConfig config = greedy()) {
        const int32_t id = engine.createSequence(config);
        REQUIRE(id > 0);
        return id;
    }
    CotabbyInferenceEngine engine;
};

}  // namespace test
