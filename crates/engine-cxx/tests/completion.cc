// One sequence after another: prompts, tokens, positions, trims.

#include <limits>

#include "support.h"

using namespace test;

TEST_CASE("the life of a sequence") {
    Loaded loaded;
    CotabbyInferenceEngine& engine = loaded.engine;
    const Tokens prompt = tokens_of(engine, "The quick brown fox");
    REQUIRE_FALSE(prompt.empty());
    const auto size = static_cast<int>(prompt.size());

    const int32_t first = loaded.sequence({8, 0.1F, 20, 0.7F, 0.08F, 1.05F, 42});
    CHECK(engine.sampleNext(first).is_eos);
    REQUIRE(decode(engine, first, prompt) == EngineStatus::ok);
    CHECK(engine.getKVPositionCount(first) == size);

    std::string text;
    int tokens = 0;
    for (; tokens < 4; ++tokens) {
        const SampleResult result = engine.sampleNext(first);
        REQUIRE_FALSE(result.was_cancelled);
        if (result.is_eos) {
            break;
        }
        REQUIRE(result.piece != nullptr);
        text.append(result.piece, static_cast<size_t>(result.piece_length));
        CHECK(engine.getKVPositionCount(first) == size + tokens);
    }
    CHECK_FALSE(text.empty());

    const int32_t second = loaded.sequence({60, 0.5F, 40, 0.95F, 0.05F, 1.4F, 0});
    CHECK(second != first);
    CHECK(engine.getKVPositionCount(second) == 0);
    CHECK(engine.getKVPositionCount(first) >= size);

    engine.destroySequence(second);
    engine.destroySequence(first);
    engine.destroySequence(first);
    CHECK(engine.getKVPositionCount(first) == 0);
    CHECK(engine.sampleNext(first).is_eos);
    CHECK(decode(engine, first, prompt) == EngineStatus::error);
    engine.unloadModel();
    CHECK_FALSE(engine.isModelLoaded());
}

TEST_CASE("the first token after a prompt costs no decode") {
    CotabbyEngineOptions exact = options(256, 64);
    exact.run_ahead_tokens = 0;
    CotabbyInferenceEngine engine;
    REQUIRE(engine.loadModelWithOptions(model_path(), exact) == EngineStatus::ok);
    const int32_t id = engine.createSequence(greedy());
    REQUIRE(decode(engine, id, tokens_of(engine, "The quick brown fox")) == EngineStatus::ok);
    const uint64_t steps = engine.getMetrics().steps;
    CHECK(steps > 0);
    REQUIRE_FALSE(engine.sampleNext(id).was_cancelled);
    CHECK(engine.getMetrics().steps == steps);
    REQUIRE_FALSE(engine.sampleNext(id).was_cancelled);
    CHECK(engine.getMetrics().steps == steps + 1);
}

TEST_CASE("a piece is the text of its token") {
    Loaded loaded;
    const int32_t id = loaded.sequence();
    REQUIRE(decode(loaded.engine, id, tokens_of(loaded.engine, "Once upon a time")) == EngineStatus::ok);
    for (int i = 0; i < 16; ++i) {
        const SampleResult result = loaded.engine.sampleNext(id);
        if (result.is_eos) {
            break;
        }
        const std::string piece(result.piece, static_cast<size_t>(result.piece_length));
        char text[256];
        const int size = loaded.engine.detokenize(result.token, text, sizeof text);
        REQUIRE(size >= 0);
        CHECK(piece == std::string(text, static_cast<size_t>(size)));
    }
}

TEST_CASE("interleaved sequences with one prompt give the same tokens") {
    Loaded loaded;
    const Tokens prompt = tokens_of(loaded.engine, "The quick brown fox jumps over the lazy dog.");
    const int32_t a = loaded.sequence({16, 0.0F, 0, 0.0F, 0.0F, 0.0F, 1});
    const int32_t b = loaded.sequence({16, 0.0F, 0, 0.0F, 0.0F, 0.0F, 2});
    REQUIRE(decode(loaded.engine, a, prompt) == EngineStatus::ok);
    REQUIRE(decode(loaded.engine, b, prompt) == EngineStatus::ok);
    Tokens of_a;
    Tokens of_b;
    for (int i = 0; i < 8; ++i) {
        const SampleResult from_a = loaded.engine.sampleNext(a);
        const SampleResult from_b = loaded.engine.sampleNext(b);
        REQUIRE_FALSE(from_a.was_cancelled);
        REQUIRE_FALSE(from_b.was_cancelled);
        of_a.push_back(from_a.token);
        of_b.push_back(from_b.token);
        if (from_a.is_eos || from_b.is_eos) {
            break;
        }
    }
    CHECK(of_a == of_b);
}

TEST_CASE("a trim to the prompt and one token again are a cold start") {
    Loaded loaded;
    CotabbyInferenceEngine& engine = loaded.engine;
    const Tokens prompt = tokens_of(engine, "The quick brown fox jumps over");
    const auto size = static_cast<int>(prompt.size());
    const SamplingConfig config{64, 0.8F, 40, 0.95F, 0.0F, 1.3F, 42};

    const int32_t cold = loaded.sequence(config);
    REQUIRE(decode(engine, cold, prompt) == EngineStatus::ok);
    const Tokens expected = sample(engine, cold, 24);
    REQUIRE(expected.size() > 4);
    // Alive, it would share steps with the next one, and equal tokens are promised for equal batches only.
    engine.destroySequence(cold);
    const int32_t reused = loaded.sequence(config);
    REQUIRE(decode(engine, reused, prompt) == EngineStatus::ok);
    REQUIRE(sample(engine, reused, 11).size() > 4);

    const int held = engine.getKVPositionCount(reused);
    if (engine.trimKV(reused, size - 1)) {
        CHECK(engine.getKVPositionCount(reused) == size - 1);
        CHECK(engine.sampleNext(reused).is_eos);
        REQUIRE(decode(engine, reused, {prompt.back()}, size - 1) == EngineStatus::ok);
    } else {
        // This memory cannot be cut there: nothing has changed, and a cut to nothing is always possible.
        CHECK(engine.getKVPositionCount(reused) == held);
        REQUIRE(engine.trimKV(reused, 0));
        CHECK(engine.getKVPositionCount(reused) == 0);
        REQUIRE(decode(engine, reused, prompt) == EngineStatus::ok);
    }
    CHECK(sample(engine, reused, 24) == expected);
}

TEST_CASE("a trim that is refused leaves the completion as it was") {
    Loaded loaded;
    const Tokens prompt = tokens_of(loaded.engine, "The quick brown fox");
    const int32_t plain = loaded.sequence();
    const int32_t disturbed = loaded.sequence();
    REQUIRE(decode(loaded.engine, plain, prompt) == EngineStatus::ok);
    REQUIRE(decode(loaded.engine, disturbed, prompt) == EngineStatus::ok);
    const Tokens expected = sample(loaded.engine, plain, 12);
    Tokens got = sample(loaded.engine, disturbed, 4);
    CHECK_FALSE(loaded.engine.trimKV(disturbed, -1));
    CHECK_FALSE(loaded.engine.trimKV(disturbed, std::numeric_limits<int>::min()));
    CHECK_FALSE(loaded.engine.trimKV(999999, 0));
    for (const int32_t token : sample(loaded.engine, disturbed, 8)) {
        got.push_back(token);
    }
    CHECK(got == expected);
}

TEST_CASE("a prompt that cannot be is an error, and a fresh one works") {
    Loaded loaded(256, 64);
    CotabbyInferenceEngine& engine = loaded.engine;
    const Tokens prompt = tokens_of(engine, "The quick brown fox");
    const int32_t id = loaded.sequence();
    const int huge = std::numeric_limits<int>::max();
    CHECK(engine.decodePrompt(id, nullptr, 4, 0) == EngineStatus::error);
    CHECK(engine.decodePrompt(id, prompt.data(), 0, 0) == EngineStatus::error);
    CHECK(engine.decodePrompt(id, prompt.data(), -1, 0) == EngineStatus::error);
    CHECK(engine.decodePrompt(id, prompt.data(), huge, 0) == EngineStatus::error);
    CHECK(decode(engine, id, prompt, -1) == EngineStatus::error);
    CHECK(decode(engine, id, prompt, 3) == EngineStatus::error);
    CHECK(decode(engine, id, prompt, huge) == EngineStatus::error);
    CHECK(decode(engine, id, {prompt[0], -1}) == EngineStatus::error);
    CHECK(decode(engine, id, {prompt[0], huge}) == EngineStatus::error);
    CHECK(decode(engine, id, long_prompt(engine, 257)) == EngineStatus::error);
    CHECK(decode(engine, -1, prompt) == EngineStatus::error);
    CHECK(decode(engine, 999999, prompt) == EngineStatus::error);
    CHECK_FALSE(last_error(engine).empty());
    CHECK(engine.sampleNext(id).is_eos);

    CHECK(engine.trimKV(id, 0));
    REQUIRE(decode(engine, id, prompt) == EngineStatus::ok);
    const Tokens got = sample(engine, id, 8);
    const int32_t fresh = loaded.sequence();
    REQUIRE(decode(engine, fresh, prompt) == EngineStatus::ok);
    CHECK(got == sample(engine, fresh, 8));
}

TEST_CASE("a full window ends the completion, and the others go on") {
    Loaded loaded(64, 64);
    CotabbyInferenceEngine& engine = loaded.engine;
    const int32_t full = loaded.sequence(greedy(1000));
    const int32_t other = loaded.sequence(greedy(1000));
    REQUIRE(decode(engine, full, long_prompt(engine, 60)) == EngineStatus::ok);
    REQUIRE(decode(engine, other, tokens_of(engine, "The")) == EngineStatus::ok);
    CHECK(sample(engine, full, 1000).size() <= 5);
    CHECK(engine.getKVPositionCount(full) <= 64);
    CHECK(engine.sampleNext(full).is_eos);
    CHECK(sample(engine, other, 8).size() == 8);
    REQUIRE(engine.trimKV(full, 0));
    REQUIRE(decode(engine, full, tokens_of(engine, "The")) == EngineStatus::ok);
    CHECK(sample(engine, full, 8).size() == 8);
}
