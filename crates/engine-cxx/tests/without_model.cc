// What the calls answer when there is no model, or no engine behind the object any more.

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <utility>

#include "support.h"

using namespace test;

namespace {

void check_all_calls_without_a_model(CotabbyInferenceEngine& engine) {
    CHECK_FALSE(engine.isModelLoaded());
    engine.unloadModel();
    engine.unloadModel();
    CHECK_FALSE(engine.isModelLoaded());
    CHECK(engine.createSequence(greedy()) == -1);
    CHECK(engine.tokenize("hello", 5).empty());
    CHECK(engine.tokenizeWithOptions("hello", 5, false, true).empty());
    CHECK(engine.tokenizeWithOptions(nullptr, 5, true, true).empty());
    CHECK(engine.tokenPiece(1).empty());
    CHECK_FALSE(engine.hasChatTemplate());
    char buffer[256];
    CHECK(engine.applyChatTemplate("You complete text.", "The quick brown", true, buffer, sizeof buffer) == 0);
    CHECK(engine.detokenize(1, buffer, sizeof buffer) == 0);
    CHECK(engine.detokenize(1, nullptr, -1) == 0);
    const int32_t tokens[] = {1, 2, 3};
    for (const int32_t id : {1, 0, -1, 999, std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max()}) {
        CHECK(engine.decodePrompt(id, tokens, 3, 0) == EngineStatus::not_loaded);
        CHECK(engine.decodePrompt(id, nullptr, -3, -1) == EngineStatus::not_loaded);
        const SampleResult result = engine.sampleNext(id);
        CHECK(result.is_eos);
        CHECK_FALSE(result.was_cancelled);
        CHECK(result.piece_length == 0);
        REQUIRE(result.piece != nullptr);
        CHECK(result.piece[0] == '\0');
        CHECK_FALSE(engine.trimKV(id, 0));
        CHECK(engine.getKVPositionCount(id) == 0);
        engine.setForceWordContinuation(id, true);
        engine.setComputeLogprob(id, false);
        engine.setCompletionPrefix(id, nullptr, -1);
        CHECK(engine.snapshotSize(id) == 0);
        CHECK(engine.snapshotSequence(id, nullptr, 0) == 0);
        CHECK_FALSE(engine.restoreSequence(id, nullptr, 0, 0));
        const CacheDiagnostics diagnostics = engine.getCacheDiagnostics(id);
        CHECK(diagnostics.decoded_token_count == 0);
        CHECK(diagnostics.last_restore_replayed_tokens == 0);
        CHECK_FALSE(diagnostics.uses_partial_checkpoint);
        CHECK(diagnostics.checkpoint_bytes == 0);
        engine.cancelSequence(id);
        engine.destroySequence(id);
    }
    CHECK(engine.getContextWindowTokens() == 0);
    CHECK(engine.getBatchSize() == 0);
    CHECK(engine.getThreadCount() == 0);
    CHECK(engine.getGPULayerCount() == 0);
    CHECK(engine.getMaxSequences() == 0);
    CHECK(engine.getMetrics().steps == 0);
}

}  // namespace

TEST_CASE("an engine begins without a model") {
    CotabbyInferenceEngine engine;
    check_all_calls_without_a_model(engine);
}

TEST_CASE("what is no model is an error, and leaves none loaded") {
    const std::string directory = std::getenv("TMPDIR") ? std::getenv("TMPDIR") : "/tmp";
    const std::string other = directory + "/cotabby-no-model-" + std::to_string(Clock::now().time_since_epoch().count());
    std::ofstream(other) << "this is not a model, but it is longer than a GGUF header needs to be";
    CotabbyInferenceEngine engine;
    for (const char* path : {"/nonexistent/path.gguf", "", directory.c_str(), other.c_str()}) {
        CHECK(engine.loadModel(path, -1, 2048, 512) == EngineStatus::error);
        CHECK_FALSE(last_error(engine).empty());
        CHECK_FALSE(engine.isModelLoaded());
    }
    CHECK(engine.loadModel(nullptr, -1, 2048, 512) == EngineStatus::error);
    CHECK(std::remove(other.c_str()) == 0);
    check_all_calls_without_a_model(engine);
}

TEST_CASE("an engine that was moved from has no model and loads none") {
    Loaded loaded;
    const int32_t id = loaded.sequence();
    CotabbyInferenceEngine moved(std::move(loaded.engine));
    check_all_calls_without_a_model(loaded.engine);
    CHECK(loaded.engine.loadModel(model_path(), -1, 1024, 256) == EngineStatus::error);
    CHECK(loaded.engine.lastErrorMessage(nullptr, 0) == 0);
    check_all_calls_without_a_model(loaded.engine);

    CHECK(moved.isModelLoaded());
    REQUIRE(decode(moved, id, tokens_of(moved, "The quick brown fox")) == EngineStatus::ok);
    CHECK(sample(moved, id, 4).size() == 4);
}

TEST_CASE("an engine that was unloaded is as one that never had a model") {
    Loaded loaded;
    const int32_t id = loaded.sequence();
    REQUIRE(decode(loaded.engine, id, tokens_of(loaded.engine, "The quick")) == EngineStatus::ok);
    loaded.engine.unloadModel();
    CHECK(loaded.engine.sampleNext(id).is_eos);
    CHECK(loaded.engine.getKVPositionCount(id) == 0);
    check_all_calls_without_a_model(loaded.engine);
    CHECK(loaded.engine.loadModel(model_path(), -1, 1024, 256) == EngineStatus::ok);
    CHECK(loaded.engine.sampleNext(id).is_eos);
}
