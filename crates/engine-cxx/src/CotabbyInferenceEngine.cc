// Adapts the class that hosts know to the bridge: raw pointers with sizes become slices, and no exception leaves. What
// can throw here is an allocation; each call then has its documented failure value.

#include "CotabbyInferenceEngine.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "engine-cxx/src/bridge.rs.h"

namespace bridge = cotabby::bridge;

static_assert(static_cast<int>(EngineStatus::ok) == static_cast<int>(bridge::Status::Ok));
static_assert(static_cast<int>(EngineStatus::error) == static_cast<int>(bridge::Status::Error));
static_assert(static_cast<int>(EngineStatus::cancelled) == static_cast<int>(bridge::Status::Cancelled));
static_assert(static_cast<int>(EngineStatus::not_loaded) == static_cast<int>(bridge::Status::NotLoaded));

struct CotabbyInferenceEngine::Impl {
    rust::Box<bridge::Host> host = bridge::new_host();
};

namespace {

using Bytes = rust::Slice<const uint8_t>;

// Runs a call on the state that a copy of the pointer keeps alive until it is over.
template <typename State, typename T, typename Call>
T on_host(const std::shared_ptr<State>& impl, T failure, Call call) {
    try {
        const std::shared_ptr<State> kept = impl;
        return kept ? call(*kept->host) : std::move(failure);
    } catch (...) {
        return failure;
    }
}

Bytes bytes(const char* text, size_t size) {
    return {reinterpret_cast<const uint8_t*>(text), size};
}

// Bytes written, or minus the size needed; 0 where there is nothing, or more than an int can say.
int copy_out(const rust::Vec<uint8_t>& from, char* buffer, int buffer_size) {
    const size_t size = from.size();
    if (size == 0 || size > static_cast<size_t>(INT32_MAX)) {
        return 0;
    }
    if (buffer == nullptr || buffer_size < 0 || static_cast<size_t>(buffer_size) < size) {
        return -static_cast<int>(size);
    }
    std::memcpy(buffer, from.data(), size);
    return static_cast<int>(size);
}

SampleResult ended() {
    return {-1, "", 0, true, false, 0.0F, false};
}

}  // namespace

CotabbyInferenceEngine::CotabbyInferenceEngine() {
    try {
        impl_ = std::make_shared<const Impl>();
    } catch (...) {
        // Without memory for it, the engine is as if it had been moved from.
    }
}

CotabbyInferenceEngine::~CotabbyInferenceEngine() {
    unloadModel();
}

CotabbyInferenceEngine::CotabbyInferenceEngine(CotabbyInferenceEngine&& other) noexcept = default;

EngineStatus CotabbyInferenceEngine::loadModel(const char* path, int gpu_layers, int context_window_tokens,
                                               int batch_size) {
    CotabbyEngineOptions options;
    options.gpu_layers = gpu_layers;
    options.context_window_tokens = context_window_tokens;
    options.batch_size = batch_size;
    return loadModelWithOptions(path, options);
}

EngineStatus CotabbyInferenceEngine::loadModelWithOptions(const char* path, const CotabbyEngineOptions& options) {
    return on_host(impl_, EngineStatus::error, [&](const bridge::Host& host) {
        if (path == nullptr) {
            bridge::refuse(host, "the model's path is null");
            return EngineStatus::error;
        }
        const bridge::Options all{options.gpu_layers,    options.context_window_tokens, options.batch_size,
                                  options.max_sequences, options.thread_count,          options.run_ahead_tokens};
        return static_cast<EngineStatus>(bridge::load_model(host, bytes(path, std::strlen(path)), all));
    });
}

void CotabbyInferenceEngine::unloadModel() {
    on_host(impl_, 0, [](const bridge::Host& host) {
        bridge::unload_model(host);
        return 0;
    });
}

bool CotabbyInferenceEngine::isModelLoaded() const {
    return on_host(impl_, false, [](const bridge::Host& host) { return bridge::is_model_loaded(host); });
}

int32_t CotabbyInferenceEngine::createSequence(SamplingConfig config) {
    return on_host(impl_, -1, [&](const bridge::Host& host) {
        const bridge::Sampling sampling{config.max_prediction_tokens, config.temperature, config.top_k,
                                        config.top_p,                 config.min_p,       config.repetition_penalty,
                                        config.seed,                  config.single_line};
        return bridge::create_sequence(host, sampling);
    });
}

void CotabbyInferenceEngine::destroySequence(int32_t sequence_id) {
    on_host(impl_, 0, [&](const bridge::Host& host) {
        bridge::destroy_sequence(host, sequence_id);
        return 0;
    });
}

std::vector<int32_t> CotabbyInferenceEngine::tokenize(const char* text, int text_length) const {
    return tokenizeWithOptions(text, text_length, true, false);
}

std::vector<int32_t> CotabbyInferenceEngine::tokenizeWithOptions(const char* text, int text_length, bool add_special,
                                                                 bool parse_special) const {
    return on_host(impl_, std::vector<int32_t>(), [&](const bridge::Host& host) {
        if (text == nullptr || text_length < 0) {
            return std::vector<int32_t>();
        }
        const auto tokens = bridge::tokenize(host, bytes(text, static_cast<size_t>(text_length)), add_special,
                                             parse_special);
        return std::vector<int32_t>(tokens.begin(), tokens.end());
    });
}

int CotabbyInferenceEngine::detokenize(int32_t token, char* buffer, int buffer_size) const {
    return on_host(impl_, 0, [&](const bridge::Host& host) {
        return copy_out(bridge::token_text(host, token), buffer, buffer_size);
    });
}

std::vector<uint8_t> CotabbyInferenceEngine::tokenPiece(int32_t token) const {
    return on_host(impl_, std::vector<uint8_t>(), [&](const bridge::Host& host) {
        const auto piece = bridge::token_piece(host, token);
        return std::vector<uint8_t>(piece.begin(), piece.end());
    });
}

bool CotabbyInferenceEngine::hasChatTemplate() const {
    return on_host(impl_, false, [](const bridge::Host& host) { return bridge::has_chat_template(host); });
}

int CotabbyInferenceEngine::applyChatTemplate(const char* system_text, const char* user_text, bool add_assistant,
                                              char* buffer, int buffer_size) const {
    return on_host(impl_, 0, [&](const bridge::Host& host) {
        if (user_text == nullptr) {
            bridge::refuse(host, "the user's text is null");
            return 0;
        }
        const bool has_system = system_text != nullptr;
        const Bytes system = has_system ? bytes(system_text, std::strlen(system_text)) : Bytes();
        return copy_out(bridge::apply_chat_template(host, system, has_system, bytes(user_text, std::strlen(user_text)),
                                                    add_assistant),
                        buffer, buffer_size);
    });
}

EngineStatus CotabbyInferenceEngine::decodePrompt(int32_t sequence_id, const int32_t* tokens, int token_count,
                                                  int start_position) {
    return on_host(impl_, EngineStatus::not_loaded, [&](const bridge::Host& host) {
        const int window = bridge::loaded(host).context_window_tokens;
        if (window == 0) {
            return EngineStatus::not_loaded;
        }
        // Of more tokens than the window has, one too many says as much; the others are not looked at.
        const int count = tokens == nullptr ? 0 : std::clamp(token_count, 0, window + 1);
        const auto prompt = count == 0 ? rust::Slice<const int32_t>()
                                       : rust::Slice<const int32_t>(tokens, static_cast<size_t>(count));
        return static_cast<EngineStatus>(bridge::decode_prompt(host, sequence_id, prompt, start_position));
    });
}

SampleResult CotabbyInferenceEngine::sampleNext(int32_t sequence_id) {
    return on_host(impl_, ended(), [&](const bridge::Host& host) {
        const bridge::Sample sample = bridge::sample_next(host, sequence_id);
        const bool has_piece = !sample.piece.empty();
        return SampleResult{sample.token,
                            has_piece ? reinterpret_cast<const char*>(sample.piece.data()) : "",
                            static_cast<int>(sample.piece.size()),
                            sample.is_eos,
                            sample.was_cancelled,
                            sample.logprob,
                            sample.argmax_is_eog};
    });
}

bool CotabbyInferenceEngine::trimKV(int32_t sequence_id, int keep_positions) {
    return on_host(impl_, false, [&](const bridge::Host& host) { return bridge::trim(host, sequence_id, keep_positions); });
}

int CotabbyInferenceEngine::getKVPositionCount(int32_t sequence_id) const {
    return on_host(impl_, 0, [&](const bridge::Host& host) { return bridge::position_count(host, sequence_id); });
}

void CotabbyInferenceEngine::setForceWordContinuation(int32_t sequence_id, bool enabled) {
    on_host(impl_, 0, [&](const bridge::Host& host) {
        bridge::set_force_word_continuation(host, sequence_id, enabled);
        return 0;
    });
}

void CotabbyInferenceEngine::setComputeLogprob(int32_t sequence_id, bool enabled) {
    on_host(impl_, 0, [&](const bridge::Host& host) {
        bridge::set_compute_logprob(host, sequence_id, enabled);
        return 0;
    });
}

void CotabbyInferenceEngine::setCompletionPrefix(int32_t, const uint8_t*, int byte_count) {
    on_host(impl_, 0, [&](const bridge::Host& host) {
        if (byte_count > 0) {
            bridge::refuse(host, "completion prefixes are not built yet: this one is ignored");
        }
        return 0;
    });
}

size_t CotabbyInferenceEngine::snapshotSize(int32_t) const {
    return 0;
}

size_t CotabbyInferenceEngine::snapshotSequence(int32_t, uint8_t*, size_t) {
    return 0;
}

bool CotabbyInferenceEngine::restoreSequence(int32_t, const uint8_t*, size_t, int) {
    return false;
}

CacheDiagnostics CotabbyInferenceEngine::getCacheDiagnostics(int32_t) const {
    return {};
}

void CotabbyInferenceEngine::cancelSequence(int32_t sequence_id) {
    on_host(impl_, 0, [&](const bridge::Host& host) {
        bridge::cancel_sequence(host, sequence_id);
        return 0;
    });
}

namespace {

template <typename State>
bridge::Loaded loaded(const std::shared_ptr<State>& impl) {
    return on_host(impl, bridge::Loaded(), [](const bridge::Host& host) { return bridge::loaded(host); });
}

}  // namespace

int CotabbyInferenceEngine::getContextWindowTokens() const {
    return loaded(impl_).context_window_tokens;
}

int CotabbyInferenceEngine::getBatchSize() const {
    return loaded(impl_).batch_size;
}

int CotabbyInferenceEngine::getThreadCount() const {
    return loaded(impl_).thread_count;
}

int CotabbyInferenceEngine::getGPULayerCount() const {
    return loaded(impl_).gpu_layers;
}

int CotabbyInferenceEngine::getMaxSequences() const {
    return loaded(impl_).max_sequences;
}

CotabbyEngineMetrics CotabbyInferenceEngine::getMetrics() const {
    return on_host(impl_, CotabbyEngineMetrics(), [](const bridge::Host& host) {
        const bridge::Metrics from = bridge::metrics(host);
        CotabbyEngineMetrics metrics;
        metrics.steps = from.steps;
        metrics.rows = from.rows;
        metrics.decode_steps = from.decode_steps;
        metrics.decode_rows = from.decode_rows;
        metrics.sampled = from.sampled;
        metrics.discarded = from.discarded;
        metrics.decode_failures = from.decode_failures;
        metrics.step_seconds = from.step_seconds;
        return metrics;
    });
}

int CotabbyInferenceEngine::lastErrorMessage(char* buffer, int buffer_size) const {
    return on_host(impl_, 0, [&](const bridge::Host& host) {
        return copy_out(bridge::last_error(host), buffer, buffer_size);
    });
}
