// Models and slots: what loading, reloading, creating and destroying do.

#include <cmath>
#include <cstdio>
#include <fstream>
#include <limits>
#include <set>

#include "support.h"

using namespace test;

TEST_CASE("the getters say what was loaded") {
    Loaded loaded(1024, 256);
    CHECK(loaded.engine.isModelLoaded());
    CHECK(loaded.engine.getContextWindowTokens() == 1024);
    CHECK(loaded.engine.getBatchSize() == 256);
    CHECK(loaded.engine.getThreadCount() > 0);
    CHECK(loaded.engine.getGPULayerCount() >= 0);
    CHECK(loaded.engine.getMaxSequences() == 4);
}

TEST_CASE("loading the same again changes nothing") {
    CotabbyInferenceEngine engine;
    REQUIRE(engine.loadModel(model_path(), -1, 1024, 256) == EngineStatus::ok);
    const int32_t id = engine.createSequence(greedy());
    const Tokens prompt = tokens_of(engine, "The quick brown fox");
    REQUIRE(decode(engine, id, prompt) == EngineStatus::ok);
    CHECK(engine.loadModel(model_path(), -1, 1024, 256) == EngineStatus::ok);
    CHECK(engine.getKVPositionCount(id) == static_cast<int>(prompt.size()));
    CHECK(sample(engine, id, 3).size() == 3);
}

TEST_CASE("loading with other numbers unloads first") {
    Loaded loaded;
    const int32_t id = loaded.sequence();
    CHECK(loaded.engine.loadModel(model_path(), -1, 512, 128) == EngineStatus::ok);
    CHECK(loaded.engine.getContextWindowTokens() == 512);
    CHECK(loaded.engine.getBatchSize() == 128);
    CHECK(loaded.engine.sampleNext(id).is_eos);
    CHECK(loaded.sequence() > id);
}

TEST_CASE("numbers that cannot be are an error, and the loaded model stays") {
    Loaded loaded;
    const int32_t id = loaded.sequence();
    const int huge = std::numeric_limits<int>::max();
    const int tiny = std::numeric_limits<int>::min();
    for (const int window : {0, -1, 7, huge, tiny}) {
        CHECK(loaded.engine.loadModel(model_path(), -1, window, 256) == EngineStatus::error);
    }
    for (const int batch : {0, -1, huge, tiny}) {
        CHECK(loaded.engine.loadModel(model_path(), -1, 1024, batch) == EngineStatus::error);
        CHECK(last_error(loaded.engine).find("batch_size") != std::string::npos);
    }
    CHECK(loaded.engine.loadModel(nullptr, -1, 1024, 256) == EngineStatus::error);
    CHECK(loaded.engine.isModelLoaded());
    REQUIRE(decode(loaded.engine, id, tokens_of(loaded.engine, "Still here")) == EngineStatus::ok);
}

TEST_CASE("a batch smaller than the sequences is raised to them") {
    Loaded loaded(256, 1);
    CHECK(loaded.engine.getBatchSize() == 4);
    const int32_t id = loaded.sequence();
    REQUIRE(decode(loaded.engine, id, long_prompt(loaded.engine, 50)) == EngineStatus::ok);
    CHECK(sample(loaded.engine, id, 3).size() == 3);
}

TEST_CASE("a truncated model is an error, and the one before it is unloaded") {
    Loaded loaded;
    const std::string cut = "cut-" + std::to_string(Clock::now().time_since_epoch().count()) + ".gguf";
    {
        std::ifstream from(model_path(), std::ios::binary | std::ios::ate);
        const auto size = static_cast<size_t>(from.tellg());
        std::string bytes(size / 2, '\0');
        from.seekg(0).read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
        std::ofstream(cut, std::ios::binary) << bytes;
    }
    CHECK(loaded.engine.loadModel(cut.c_str(), -1, 1024, 256) == EngineStatus::error);
    CHECK(std::remove(cut.c_str()) == 0);
    CHECK_FALSE(loaded.engine.isModelLoaded());
    CHECK(loaded.engine.loadModel(model_path(), -1, 1024, 256) == EngineStatus::ok);
}

TEST_CASE("all options reach the engine") {
    CotabbyEngineOptions all = options(256, 64);
    all.max_sequences = 2;
    all.run_ahead_tokens = 0;
    CotabbyInferenceEngine engine;
    REQUIRE(engine.loadModelWithOptions(model_path(), all) == EngineStatus::ok);
    CHECK(engine.getContextWindowTokens() == 256);
    CHECK(engine.getBatchSize() == 64);
    CHECK(engine.getMaxSequences() == 2);
    CHECK(engine.getThreadCount() == 1);
    CHECK(engine.createSequence(greedy()) > 0);
    CHECK(engine.createSequence(greedy()) > 0);
    CHECK(engine.createSequence(greedy()) == -1);
    for (int CotabbyEngineOptions::* member : {&CotabbyEngineOptions::max_sequences, &CotabbyEngineOptions::thread_count,
                                               &CotabbyEngineOptions::run_ahead_tokens}) {
        CotabbyEngineOptions wrong = all;
        wrong.*member = -1;
        CHECK(engine.loadModelWithOptions(model_path(), wrong) == EngineStatus::error);
    }
    CHECK(engine.isModelLoaded());
}

TEST_CASE("slots come back, ids do not") {
    Loaded loaded;
    std::set<int32_t> seen;
    for (int round = 0; round < 20; ++round) {
        std::vector<int32_t> alive;
        for (int i = 0; i < 4; ++i) {
            alive.push_back(loaded.sequence());
            CHECK(seen.insert(alive.back()).second);
            CHECK(loaded.engine.getKVPositionCount(alive.back()) == 0);
        }
        CHECK(loaded.engine.createSequence(greedy()) == -1);
        CHECK_FALSE(last_error(loaded.engine).empty());
        for (const int32_t id : alive) {
            loaded.engine.destroySequence(id);
            loaded.engine.destroySequence(id);
        }
    }
    Loaded second;
    CHECK(seen.insert(second.sequence()).second);
}

TEST_CASE("a sampling number that is none is refused") {
    Loaded loaded;
    const float nan = std::numeric_limits<float>::quiet_NaN();
    SamplingConfig config = hot(1);
    config.temperature = nan;
    CHECK(loaded.engine.createSequence(config) == -1);
    config = hot(1);
    config.top_p = nan;
    CHECK(loaded.engine.createSequence(config) == -1);
    config = hot(1);
    config.repetition_penalty = nan;
    CHECK(loaded.engine.createSequence(config) == -1);
    config = {-5, -1.0F, -7, -1.0F, -1.0F, -1.0F, 0};
    CHECK(loaded.engine.createSequence(config) > 0);
    const float infinity = std::numeric_limits<float>::infinity();
    config = {std::numeric_limits<int>::max(), 1e9F, std::numeric_limits<int>::max(), 1e9F, 7.0F, infinity, 0xFFFFFFFF};
    CHECK(loaded.engine.createSequence(config) > 0);
}
