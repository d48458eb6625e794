// What may be sampled, and what is told about it.

#include <array>
#include <cctype>
#include <cmath>

#include "support.h"

using namespace test;

TEST_CASE("a forced word continuation does not begin with whitespace, once") {
    Loaded loaded;
    const Tokens prompt = tokens_of(loaded.engine, "I am writ");
    for (const uint32_t seed : {1U, 2U, 3U, 4U, 5U, 6U, 7U, 8U}) {
        const int32_t id = loaded.sequence(hot(seed));
        loaded.engine.setForceWordContinuation(id, true);
        REQUIRE(decode(loaded.engine, id, prompt) == EngineStatus::ok);
        const SampleResult result = loaded.engine.sampleNext(id);
        if (!result.is_eos) {
            REQUIRE(result.piece_length > 0);
            CHECK_FALSE(std::isspace(static_cast<unsigned char>(result.piece[0])));
        }
        loaded.engine.destroySequence(id);
    }

    // Cleared by the first prompt: a second one gives what an unforced sequence gives.
    const int32_t forced = loaded.sequence();
    const int32_t plain = loaded.sequence();
    loaded.engine.setForceWordContinuation(forced, true);
    REQUIRE(decode(loaded.engine, forced, prompt) == EngineStatus::ok);
    REQUIRE(loaded.engine.trimKV(forced, 0));
    REQUIRE(decode(loaded.engine, forced, prompt) == EngineStatus::ok);
    REQUIRE(decode(loaded.engine, plain, prompt) == EngineStatus::ok);
    CHECK(sample(loaded.engine, forced, 4) == sample(loaded.engine, plain, 4));
}

TEST_CASE("log-probabilities are finite, and 0 when they are off") {
    Loaded loaded;
    const Tokens prompt = tokens_of(loaded.engine, "The quick brown fox");
    const int32_t with = loaded.sequence();
    const int32_t without = loaded.sequence();
    loaded.engine.setComputeLogprob(without, false);
    REQUIRE(decode(loaded.engine, with, prompt) == EngineStatus::ok);
    REQUIRE(decode(loaded.engine, without, prompt) == EngineStatus::ok);
    float sum = 0;
    for (int i = 0; i < 8; ++i) {
        const SampleResult on = loaded.engine.sampleNext(with);
        const SampleResult off = loaded.engine.sampleNext(without);
        CHECK(on.token == off.token);
        CHECK(std::isfinite(on.logprob));
        CHECK(on.logprob <= 0.0001F);
        CHECK(off.logprob == 0.0F);
        sum += on.logprob;
        if (on.is_eos) {
            break;
        }
    }
    CHECK(sum < 0.0F);
    loaded.engine.setComputeLogprob(999, false);
    loaded.engine.setComputeLogprob(-1, true);
}

TEST_CASE("no chat marker in 64 hot samples") {
    Loaded loaded;
    const std::array<const char*, 14> markers = {
        "<|im_start|>",        "<|im_end|>",        "<|user|>",      "<|assistant|>", "<|system|>",
        "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",    "<|end|>",       "<|endoftext|>",
        "<start_of_turn>",     "<end_of_turn>",     "[INST]",        "[/INST]",
    };
    const std::string bait = "<|im_start|>user\nWrite a reply<|im_end|>\n<|im_start|>assistant\n";
    for (const uint32_t seed : {7U, 8U}) {
        const int32_t id = loaded.sequence(hot(seed));
        REQUIRE(decode(loaded.engine, id, tokens_of(loaded.engine, bait)) == EngineStatus::ok);
        for (int i = 0; i < 64; ++i) {
            const SampleResult result = loaded.engine.sampleNext(id);
            REQUIRE_FALSE(result.was_cancelled);
            const std::string piece(result.piece, static_cast<size_t>(result.piece_length));
            for (const char* marker : markers) {
                CHECK(piece != marker);
            }
            if (result.is_eos) {
                break;
            }
        }
        loaded.engine.destroySequence(id);
    }
}

TEST_CASE("no line break when single_line") {
    Loaded loaded;
    for (const uint32_t seed : {1U, 2U, 3U}) {
        SamplingConfig config = hot(seed);
        config.single_line = true;
        const int32_t id = loaded.sequence(config);
        REQUIRE(decode(loaded.engine, id, tokens_of(loaded.engine, "A list:\n- one\n- two\n")) == EngineStatus::ok);
        for (int i = 0; i < 64; ++i) {
            const SampleResult result = loaded.engine.sampleNext(id);
            const std::string piece(result.piece, static_cast<size_t>(result.piece_length));
            CHECK(piece.find_first_of("\r\n") == std::string::npos);
            if (result.is_eos) {
                break;
            }
        }
        loaded.engine.destroySequence(id);
    }
}

TEST_CASE("argmax_is_eog is what a greedy choice ends with") {
    Loaded loaded;
    SamplingConfig config = greedy();
    config.repetition_penalty = 1.0F;
    int steps = 0;
    for (const char* text : {"The capital of France is", "Hello", "The end."}) {
        const int32_t id = loaded.sequence(config);
        REQUIRE(decode(loaded.engine, id, tokens_of(loaded.engine, text)) == EngineStatus::ok);
        for (int i = 0; i < 24; ++i) {
            const SampleResult result = loaded.engine.sampleNext(id);
            REQUIRE_FALSE(result.was_cancelled);
            CHECK(result.argmax_is_eog == result.is_eos);
            ++steps;
            if (result.is_eos) {
                CHECK(result.token >= 0);
                break;
            }
        }
        loaded.engine.destroySequence(id);
    }
    CHECK(steps > 0);
}

TEST_CASE("a seed gives the same tokens, another one others") {
    Loaded loaded;
    const Tokens prompt = tokens_of(loaded.engine, "Once upon a time");
    const auto draw = [&](uint32_t seed) {
        const int32_t id = loaded.sequence(hot(seed));
        REQUIRE(decode(loaded.engine, id, prompt) == EngineStatus::ok);
        const Tokens tokens = sample(loaded.engine, id, 24);
        loaded.engine.destroySequence(id);
        return tokens;
    };
    const Tokens first = draw(42);
    CHECK(first == draw(42));
    CHECK((first != draw(43) || first != draw(44)));
}
