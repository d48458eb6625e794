// Compiled, never run: what the source of existing hosts does with the header, under each standard and compiler.

#include "CotabbyInferenceEngine.h"

#include <cstddef>
#include <type_traits>
#include <utility>

static_assert(std::is_aggregate_v<SamplingConfig>);
static_assert(std::is_standard_layout_v<SamplingConfig>);
static_assert(offsetof(SamplingConfig, max_prediction_tokens) < offsetof(SamplingConfig, temperature));
static_assert(offsetof(SamplingConfig, temperature) < offsetof(SamplingConfig, top_k));
static_assert(offsetof(SamplingConfig, top_k) < offsetof(SamplingConfig, top_p));
static_assert(offsetof(SamplingConfig, top_p) < offsetof(SamplingConfig, min_p));
static_assert(offsetof(SamplingConfig, min_p) < offsetof(SamplingConfig, repetition_penalty));
static_assert(offsetof(SamplingConfig, repetition_penalty) < offsetof(SamplingConfig, seed));
static_assert(offsetof(SamplingConfig, seed) < offsetof(SamplingConfig, single_line));
static_assert(std::is_same_v<decltype(SamplingConfig::max_prediction_tokens), int>);
static_assert(std::is_same_v<decltype(SamplingConfig::temperature), float>);
static_assert(std::is_same_v<decltype(SamplingConfig::top_k), int>);
static_assert(std::is_same_v<decltype(SamplingConfig::seed), uint32_t>);

static_assert(std::is_trivially_copyable_v<SampleResult>);
static_assert(offsetof(SampleResult, token) < offsetof(SampleResult, piece));
static_assert(offsetof(SampleResult, piece) < offsetof(SampleResult, piece_length));
static_assert(offsetof(SampleResult, piece_length) < offsetof(SampleResult, is_eos));
static_assert(offsetof(SampleResult, is_eos) < offsetof(SampleResult, was_cancelled));
static_assert(offsetof(SampleResult, was_cancelled) < offsetof(SampleResult, logprob));
static_assert(offsetof(SampleResult, logprob) < offsetof(SampleResult, argmax_is_eog));
static_assert(std::is_same_v<decltype(SampleResult::token), int32_t>);
static_assert(std::is_same_v<decltype(SampleResult::piece), const char*>);
static_assert(std::is_same_v<decltype(SampleResult::piece_length), int>);
static_assert(std::is_same_v<decltype(SampleResult::logprob), float>);

static_assert(std::is_same_v<std::underlying_type_t<EngineStatus>, int>);
static_assert(static_cast<int>(EngineStatus::ok) == 0);
static_assert(static_cast<int>(EngineStatus::error) == 1);
static_assert(static_cast<int>(EngineStatus::cancelled) == 2);
static_assert(static_cast<int>(EngineStatus::not_loaded) == 3);

static_assert(offsetof(CacheDiagnostics, decoded_token_count) < offsetof(CacheDiagnostics, last_restore_replayed_tokens));
static_assert(offsetof(CacheDiagnostics, last_restore_replayed_tokens) <
              offsetof(CacheDiagnostics, uses_partial_checkpoint));
static_assert(offsetof(CacheDiagnostics, uses_partial_checkpoint) < offsetof(CacheDiagnostics, checkpoint_bytes));
static_assert(std::is_same_v<decltype(CacheDiagnostics::decoded_token_count), int32_t>);
static_assert(std::is_same_v<decltype(CacheDiagnostics::last_restore_replayed_tokens), int32_t>);
static_assert(std::is_same_v<decltype(CacheDiagnostics::uses_partial_checkpoint), bool>);
static_assert(std::is_same_v<decltype(CacheDiagnostics::checkpoint_bytes), uint64_t>);

using Engine = CotabbyInferenceEngine;
static_assert(std::is_default_constructible_v<Engine>);
static_assert(std::is_nothrow_move_constructible_v<Engine>);
static_assert(std::is_nothrow_destructible_v<Engine>);
static_assert(!std::is_copy_constructible_v<Engine>);
static_assert(!std::is_copy_assignable_v<Engine>);
static_assert(!std::is_move_assignable_v<Engine>);

template <typename Type>
constexpr void same(Type, Type) {}

// The exact types of all calls of the contract.
[[maybe_unused]] static constexpr void signatures() {
    same<EngineStatus (Engine::*)(const char*, int, int, int)>(&Engine::loadModel, nullptr);
    same<void (Engine::*)()>(&Engine::unloadModel, nullptr);
    same<bool (Engine::*)() const>(&Engine::isModelLoaded, &Engine::hasChatTemplate);
    same<int32_t (Engine::*)(SamplingConfig)>(&Engine::createSequence, nullptr);
    same<void (Engine::*)(int32_t)>(&Engine::destroySequence, &Engine::cancelSequence);
    same<std::vector<int32_t> (Engine::*)(const char*, int) const>(&Engine::tokenize, nullptr);
    same<std::vector<int32_t> (Engine::*)(const char*, int, bool, bool) const>(&Engine::tokenizeWithOptions, nullptr);
    same<int (Engine::*)(int32_t, char*, int) const>(&Engine::detokenize, nullptr);
    same<std::vector<uint8_t> (Engine::*)(int32_t) const>(&Engine::tokenPiece, nullptr);
    same<int (Engine::*)(const char*, const char*, bool, char*, int) const>(&Engine::applyChatTemplate, nullptr);
    same<EngineStatus (Engine::*)(int32_t, const int32_t*, int, int)>(&Engine::decodePrompt, nullptr);
    same<SampleResult (Engine::*)(int32_t)>(&Engine::sampleNext, nullptr);
    same<bool (Engine::*)(int32_t, int)>(&Engine::trimKV, nullptr);
    same<int (Engine::*)(int32_t) const>(&Engine::getKVPositionCount, nullptr);
    same<void (Engine::*)(int32_t, bool)>(&Engine::setForceWordContinuation, &Engine::setComputeLogprob);
    same<void (Engine::*)(int32_t, const uint8_t*, int)>(&Engine::setCompletionPrefix, nullptr);
    same<size_t (Engine::*)(int32_t) const>(&Engine::snapshotSize, nullptr);
    same<size_t (Engine::*)(int32_t, uint8_t*, size_t)>(&Engine::snapshotSequence, nullptr);
    same<bool (Engine::*)(int32_t, const uint8_t*, size_t, int)>(&Engine::restoreSequence, nullptr);
    same<CacheDiagnostics (Engine::*)(int32_t) const>(&Engine::getCacheDiagnostics, nullptr);
    same<int (Engine::*)() const>(&Engine::getContextWindowTokens, &Engine::getBatchSize);
    same<int (Engine::*)() const>(&Engine::getThreadCount, &Engine::getGPULayerCount);
}

[[maybe_unused]] static SamplingConfig as_hosts_write_it() {
    const SamplingConfig seven{8, 0.1F, 20, 0.7F, 0.08F, 1.05F, 42};
    const SamplingConfig eight{8, 0.1F, 20, 0.7F, 0.08F, 1.05F, 42, true};
    SamplingConfig assigned;
    assigned.max_prediction_tokens = seven.max_prediction_tokens;
    assigned.temperature = eight.temperature;
    assigned.top_k = 20;
    assigned.top_p = 0.7F;
    assigned.min_p = 0.08F;
    assigned.repetition_penalty = 1.05F;
    assigned.seed = 42;
    return assigned;
}

[[maybe_unused]] static Engine engines_are_moved() {
    Engine engine;
    Engine moved(std::move(engine));
    return moved;
}
