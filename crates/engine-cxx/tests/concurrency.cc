// Many threads: shared steps, cancellation, and what ends while calls are in flight.

#include <algorithm>
#include <atomic>
#include <memory>
#include <thread>

#include "support.h"

using namespace test;
using std::chrono::microseconds;
using std::chrono::milliseconds;

namespace {

microseconds since(Clock::time_point begin) {
    return std::chrono::duration_cast<microseconds>(Clock::now() - begin);
}

// How long the model takes for a prompt of this many tokens, at its quickest: the first one finds everything cold.
microseconds time_of_prompt(Loaded& loaded, const Tokens& prompt) {
    microseconds quickest = microseconds::max();
    for (int i = 0; i < 3 && (i == 0 || quickest < milliseconds(500)); ++i) {
        const int32_t id = loaded.sequence();
        const auto begin = Clock::now();
        REQUIRE(decode(loaded.engine, id, prompt) == EngineStatus::ok);
        quickest = std::min(quickest, since(begin));
        loaded.engine.destroySequence(id);
    }
    return quickest;
}

// A model, a prompt that takes it a while, and how long.
struct InPrompt {
    Loaded loaded{1024, 64};
    CotabbyInferenceEngine& engine = loaded.engine;
    const Tokens prompt = long_prompt(engine, 500);
    const microseconds whole = time_of_prompt(loaded, prompt);
};

}  // namespace

TEST_CASE("four threads at once get what they get alone, in shared steps") {
    Loaded loaded;
    CotabbyInferenceEngine& engine = loaded.engine;
    const std::string texts[] = {"The quick brown fox", "Once upon a time", "In the beginning", "Dear Sir or Madam"};
    std::vector<Tokens> alone;
    for (const std::string& text : texts) {
        const int32_t id = loaded.sequence();
        REQUIRE(decode(engine, id, tokens_of(engine, text)) == EngineStatus::ok);
        alone.push_back(sample(engine, id, 4));
        engine.destroySequence(id);
    }
    const CotabbyEngineMetrics before = engine.getMetrics();
    std::vector<Tokens> together(4);
    std::vector<std::thread> threads;
    for (size_t i = 0; i < 4; ++i) {
        threads.emplace_back([&, i] {
            const int32_t id = engine.createSequence(greedy(64));
            if (decode(engine, id, tokens_of(engine, texts[i])) == EngineStatus::ok) {
                together[i] = sample(engine, id, 64);
            }
            engine.destroySequence(id);
        });
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
    for (size_t i = 0; i < 4; ++i) {
        // Only the first few: equality across batch compositions is not promised.
        REQUIRE(together[i].size() >= alone[i].size());
        CHECK(Tokens(together[i].begin(), together[i].begin() + static_cast<long>(alone[i].size())) == alone[i]);
    }
    const CotabbyEngineMetrics after = engine.getMetrics();
    CHECK(after.decode_rows - before.decode_rows > after.decode_steps - before.decode_steps);
}

TEST_CASE("a cancelled sequence answers so until it is trimmed") {
    Loaded loaded;
    CotabbyInferenceEngine& engine = loaded.engine;
    const Tokens prompt = tokens_of(engine, "Hello");
    const int32_t id = loaded.sequence();
    const int32_t other = loaded.sequence();
    REQUIRE(decode(engine, id, prompt) == EngineStatus::ok);
    REQUIRE(decode(engine, other, prompt) == EngineStatus::ok);
    const Tokens expected = sample(engine, id, 2);
    engine.cancelSequence(id);
    engine.cancelSequence(id);
    for (int i = 0; i < 3; ++i) {
        const SampleResult result = engine.sampleNext(id);
        CHECK(result.was_cancelled);
        CHECK_FALSE(result.is_eos);
        CHECK(result.piece_length == 0);
        CHECK(decode(engine, id, prompt, engine.getKVPositionCount(id)) == EngineStatus::cancelled);
        CHECK(decode(engine, id, prompt, -1) == EngineStatus::cancelled);
        CHECK(engine.decodePrompt(id, nullptr, 1, 0) == EngineStatus::cancelled);
        CHECK(decode(engine, id, Tokens(2000, prompt[0])) == EngineStatus::cancelled);
    }
    CHECK(sample(engine, other, 2) == expected);
    REQUIRE(engine.trimKV(id, 0));
    REQUIRE(decode(engine, id, prompt) == EngineStatus::ok);
    CHECK(sample(engine, id, 2) == expected);
}

TEST_CASE_FIXTURE(InPrompt, "a prompt is cancelled in its middle") {
    const int32_t id = loaded.sequence();
    EngineStatus status = EngineStatus::ok;
    std::thread decoding([&] { status = decode(engine, id, prompt); });
    std::this_thread::sleep_for(whole / 10);
    // Had it waited for the prompt, that would have come to its end.
    engine.cancelSequence(id);
    decoding.join();
    CHECK(status == EngineStatus::cancelled);
    CHECK(engine.sampleNext(id).was_cancelled);
    CHECK(engine.getKVPositionCount(id) < 500);

    REQUIRE(engine.trimKV(id, 0));
    const Tokens brief = tokens_of(engine, "The quick brown fox");
    REQUIRE(decode(engine, id, brief) == EngineStatus::ok);
    const int32_t fresh = loaded.sequence();
    REQUIRE(decode(engine, fresh, brief) == EngineStatus::ok);
    CHECK(sample(engine, id, 8) == sample(engine, fresh, 8));
}

TEST_CASE("calls on one sequence run one after another") {
    Loaded loaded;
    CotabbyInferenceEngine& engine = loaded.engine;
    const Tokens prompt = tokens_of(engine, "Once upon a time");
    const int32_t alone = loaded.sequence();
    REQUIRE(decode(engine, alone, prompt) == EngineStatus::ok);
    const Tokens expected = sample(engine, alone, 8);
    REQUIRE(expected.size() == 8);
    const int32_t shared = loaded.sequence();
    REQUIRE(decode(engine, shared, prompt) == EngineStatus::ok);
    std::atomic<int> sampled{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) {
        threads.emplace_back([&] { sampled += static_cast<int>(sample(engine, shared, 2).size()); });
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
    CHECK(sampled == 8);
    CHECK(engine.getKVPositionCount(shared) == engine.getKVPositionCount(alone));
}

TEST_CASE_FIXTURE(InPrompt, "a sequence that is destroyed in its prompt gives its slot back at once") {
    std::vector<int32_t> ids;
    for (int i = 0; i < 4; ++i) {
        ids.push_back(loaded.sequence());
    }
    EngineStatus status = EngineStatus::ok;
    std::thread decoding([&] { status = decode(engine, ids[0], prompt); });
    std::this_thread::sleep_for(whole / 10);
    engine.destroySequence(ids[0]);
    CHECK(engine.createSequence(greedy()) > ids[3]);
    decoding.join();
    // Cancelled; or an error, where the sequence was gone before the call began.
    CHECK(status != EngineStatus::ok);
    CHECK(status != EngineStatus::not_loaded);
}

TEST_CASE_FIXTURE(InPrompt, "a text that is being read does not keep the engine of an unloaded model at work") {
    const int32_t id = loaded.sequence();
    std::string text;
    while (text.size() < 4000000) {
        text += "The quick brown fox jumps over the lazy dog. ";
    }
    size_t read = 0;
    std::thread reading([&] { read = tokens_of(engine, text).size(); });
    EngineStatus status = EngineStatus::ok;
    std::thread decoding([&] { status = decode(engine, id, prompt); });
    std::this_thread::sleep_for(whole / 5);
    engine.unloadModel();
    decoding.join();
    CHECK(status == EngineStatus::not_loaded);
    reading.join();
    CHECK(read > 0);
}

TEST_CASE("calls in flight end when the model is unloaded, loaded anew, or the engine destroyed") {
    enum class End { unload, reload, destroy };
    for (const End end : {End::unload, End::reload, End::destroy}) {
        CAPTURE(static_cast<int>(end));
        auto loaded = std::make_unique<Loaded>(1024, 64);
        CotabbyInferenceEngine& engine = loaded->engine;
        const Tokens prompt = long_prompt(engine, 500);
        const microseconds whole = time_of_prompt(*loaded, prompt);
        const int32_t prompting = loaded->sequence();
        const int32_t sampling = loaded->sequence(greedy(1000000));
        REQUIRE(decode(engine, sampling, tokens_of(engine, "The")) == EngineStatus::ok);

        std::atomic<int> begun{0};
        EngineStatus status = EngineStatus::ok;
        std::thread decoding([&] {
            ++begun;
            status = decode(engine, prompting, prompt);
        });
        SampleResult last{};
        // Where the object goes away, the thread may not call it again: it is in a prompt then, too.
        std::thread sampler([&] {
            if (end == End::destroy) {
                ++begun;
                last.is_eos = decode(engine, sampling, prompt, engine.getKVPositionCount(sampling)) != EngineStatus::ok;
                return;
            }
            ++begun;
            do {
                last = engine.sampleNext(sampling);
            } while (!last.is_eos && !last.was_cancelled);
        });
        while (begun < 2) {
            std::this_thread::yield();
        }
        std::this_thread::sleep_for(whole / 10);
        const auto begin = Clock::now();
        switch (end) {
            case End::unload:
                engine.unloadModel();
                break;
            case End::reload:
                CHECK(engine.loadModel(model_path(), -1, 512, 128) == EngineStatus::ok);
                break;
            case End::destroy:
                loaded.reset();
                break;
        }
        decoding.join();
        sampler.join();
        const std::string why = loaded ? last_error(engine) : "";
        CAPTURE(why);
        CHECK(status == EngineStatus::not_loaded);
        CHECK(last.is_eos);
        CHECK(since(begin) < whole * 3 + milliseconds(2000));
    }
}
