// Text completion with many sequences at once over one model, for C++ and Swift hosts.
//
// Every call may come from any thread. Calls on one sequence run one after another; calls on different sequences run at
// the same time and share decode steps. No call throws, and no call aborts the process for an argument: a null pointer,
// a negative size, an unknown id, a missing model or a moved-from engine has the result that is written at the call.
// A pointer with a size must point to that many bytes (or tokens).
#ifndef COTABBY_INFERENCE_ENGINE_H
#define COTABBY_INFERENCE_ENGINE_H

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#if defined(__has_include)
#if __has_include(<swift/bridging>)
#include <swift/bridging>
#endif
#endif
// Tells Swift that the borrowed pointer in a result may be used without a lifetime check.
#ifndef SWIFT_SELF_CONTAINED
#define SWIFT_SELF_CONTAINED
#endif

#if defined(__GNUC__)
#define COTABBY_API __attribute__((visibility("default")))
#else
#define COTABBY_API
#endif

/// How a sequence chooses its tokens. The order is: masks, repetition penalty over the last 64 tokens of the completion,
/// then, with temperature > 0: temperature, top-k, min-p, top-p and a seeded draw; otherwise the most likely token.
struct SamplingConfig {
    /// Tokens that the host means to take from one prompt; 0 and below: unknown. It ends nothing: it tells the engine how
    /// far ahead sampling is of use.
    int max_prediction_tokens;
    /// 0 and below: greedy. Values above 100 count as 100.
    float temperature;
    /// Keep this many of the most likely tokens; 0 and below: all.
    int top_k;
    /// Keep the most likely tokens that together reach this share; 1 and above: all; 0 and below: the most likely one.
    float top_p;
    /// Keep tokens at least this likely against the most likely one; 0 and below: all. Values above 1 count as 1.
    float min_p;
    /// 1 and below: off. Values above 100 count as 100.
    float repetition_penalty;
    /// Seed of the draws; 0: a random one for each prompt.
    uint32_t seed;
    /// Never sample a token with a line break in it.
    bool single_line = false;
};

/// What `sampleNext` answers.
struct SWIFT_SELF_CONTAINED SampleResult {
    /// The token, or -1 where there is none.
    int32_t token;
    /// The token's bytes, not always whole characters, never null. Borrowed: valid until the next call on the same
    /// sequence.
    const char* piece;
    /// Bytes in `piece`.
    int piece_length;
    /// The completion is over: an end-of-generation token (then `token` says which), no room left, no prompt, an unknown
    /// sequence, no model, or a decode that failed.
    bool is_eos;
    /// The sequence was cancelled.
    bool was_cancelled;
    /// The token's log-probability under the raw distribution; 0 when it is off.
    float logprob;
    /// Whether the most likely token of the raw distribution ends generation.
    bool argmax_is_eog;
};

/// How a call went.
enum class EngineStatus : int {
    ok = 0,
    error = 1,
    cancelled = 2,
    not_loaded = 3,
};

/// What prefix reuse did for a sequence.
struct CacheDiagnostics {
    int32_t decoded_token_count = 0;
    int32_t last_restore_replayed_tokens = 0;
    bool uses_partial_checkpoint = false;
    uint64_t checkpoint_bytes = 0;
};

/// What `loadModelWithOptions` takes. A later version may add members at the end.
struct CotabbyEngineOptions {
    /// Layers to keep on a GPU; negative: all.
    int gpu_layers = -1;
    /// Tokens that each sequence can hold, at least 8.
    int context_window_tokens = 2048;
    /// The most rows in one decode step, at least 1; raised to `max_sequences` where it is less.
    int batch_size = 512;
    /// Sequences that can be alive at once, 1 to 256.
    int max_sequences = 4;
    /// CPU threads for a step; 0: the machine's physical cores.
    int thread_count = 0;
    /// Tokens that the engine may sample before the host asks for them, 0 to 64.
    int run_ahead_tokens = 4;
};

/// Counters since the model was loaded.
struct CotabbyEngineMetrics {
    /// Decode steps, and the rows in all of them.
    uint64_t steps = 0;
    uint64_t rows = 0;
    /// Steps with at least one sampling sequence, and the rows of those sequences. `decode_rows / decode_steps` is the
    /// mean number of sequences that shared a step.
    uint64_t decode_steps = 0;
    uint64_t decode_rows = 0;
    /// Tokens sampled, and how many of them were sampled ahead and then not wanted.
    uint64_t sampled = 0;
    uint64_t discarded = 0;
    /// Decodes that llama.cpp refused.
    uint64_t decode_failures = 0;
    /// Seconds spent in steps.
    double step_seconds = 0;
};

/// One model, one shared context, and the sequences that complete text with it.
class COTABBY_API CotabbyInferenceEngine {
public:
    CotabbyInferenceEngine();
    /// Unloads. Calls that other threads have in flight end with the result that they would have without a model.
    ~CotabbyInferenceEngine();
    /// The other engine is then one without a model that cannot load any. No call may be in flight on it.
    CotabbyInferenceEngine(CotabbyInferenceEngine&& other) noexcept;
    CotabbyInferenceEngine& operator=(CotabbyInferenceEngine&&) = delete;
    CotabbyInferenceEngine(const CotabbyInferenceEngine&) = delete;
    CotabbyInferenceEngine& operator=(const CotabbyInferenceEngine&) = delete;

    // --- The model ---

    /// Loads a GGUF file for up to four sequences. The same path and numbers as the loaded model's: `ok`, and nothing
    /// happens. Otherwise the loaded model is unloaded first. `error`: a null path or a number out of range (the loaded
    /// model then stays), or a file that is missing or cannot be loaded (then there is no model). `gpu_layers = -1`: all.
    EngineStatus loadModel(const char* path, int gpu_layers, int context_window_tokens, int batch_size);
    /// Does nothing without a model. Calls in flight on other threads end as they would without one.
    void unloadModel();
    bool isModelLoaded() const;

    // --- Sequences ---

    /// A new id, above 0 and never used before in this process; -1: no model, no free slot, or NaN for a number in
    /// `config`.
    int32_t createSequence(SamplingConfig config);
    /// Cancels what is in flight on the sequence, waits for it and frees the slot. Unknown ids are ignored.
    void destroySequence(int32_t sequence_id);

    // --- Text and tokens ---

    /// BOS as the model's metadata says; special tokens' text as plain text. Any bytes are allowed. Empty for a null
    /// pointer, a negative length, or without a model.
    std::vector<int32_t> tokenize(const char* text, int text_length) const;
    /// The caller decides whether BOS and EOS are added and whether special tokens' text becomes those tokens.
    std::vector<int32_t> tokenizeWithOptions(const char* text, int text_length, bool add_special,
                                             bool parse_special) const;
    /// Writes the token's text, which is empty for control tokens. Bytes written, or minus the size needed; 0 for an
    /// unknown token or without a model.
    int detokenize(int32_t token, char* buffer, int buffer_size) const;
    /// The token's exact bytes, control tokens' too. Empty for an unknown token or without a model.
    std::vector<uint8_t> tokenPiece(int32_t token) const;
    bool hasChatTemplate() const;
    /// Renders a system turn (left out when null) and a user turn. > 0: bytes written; < 0: minus the size needed; 0: no
    /// model, no template, or a failure: use the raw text.
    int applyChatTemplate(const char* system_text, const char* user_text, bool add_assistant, char* buffer,
                          int buffer_size) const;

    // --- Completion ---

    /// Decodes the tokens from `start_position` on, which is where the sequence ends, and samples the first token of the
    /// completion. `error`: null, no tokens, a token or a position that cannot be, too long for the window, an unknown
    /// sequence, or a decode that failed.
    EngineStatus decodePrompt(int32_t sequence_id, const int32_t* tokens, int token_count, int start_position);
    /// The next token. The first after a prompt was sampled by `decodePrompt` and costs no decode.
    SampleResult sampleNext(int32_t sequence_id);
    /// Keeps the first positions of the sequence; what was sampled is void until the next `decodePrompt`. Re-arms a
    /// cancelled sequence. False, and nothing changed: an unknown sequence, a negative number, or a memory that cannot be
    /// cut there.
    bool trimKV(int32_t sequence_id, int keep_positions);
    /// Positions that the sequence holds; 0 for an unknown one.
    int getKVPositionCount(int32_t sequence_id) const;
    /// The next completion's first token may not begin with whitespace; then it clears.
    void setForceWordContinuation(int32_t sequence_id, bool enabled);
    /// Whether `SampleResult::logprob` is computed. On in a new sequence; off, it is 0 and costs nothing.
    void setComputeLogprob(int32_t sequence_id, bool enabled);
    /// Token healing: the next completion first reproduces exactly these bytes. Not built yet: ignored,
    /// which `lastErrorMessage` then says.
    void setCompletionPrefix(int32_t sequence_id, const uint8_t* bytes, int byte_count);

    // --- A sequence's state, out and in. Not built yet: 0, 0 and false ---

    size_t snapshotSize(int32_t sequence_id) const;
    size_t snapshotSequence(int32_t sequence_id, uint8_t* destination, size_t capacity);
    bool restoreSequence(int32_t sequence_id, const uint8_t* source, size_t size, int position_count);
    /// Not built yet: all zero.
    CacheDiagnostics getCacheDiagnostics(int32_t sequence_id) const;

    // --- Cancellation ---

    /// Never blocks. `sampleNext` and `decodePrompt` answer cancelled, the one in flight too, until a successful `trimKV`
    /// or `restoreSequence`. Unknown ids are ignored.
    void cancelSequence(int32_t sequence_id);

    // --- What was loaded; 0 without a model ---

    /// Per sequence.
    int getContextWindowTokens() const;
    int getBatchSize() const;
    int getThreadCount() const;
    /// Those that were asked for on a GPU; without one they are on the processor all the same.
    int getGPULayerCount() const;

    // --- Additions to the first API ---

    /// As `loadModel`, with everything that can be set.
    EngineStatus loadModelWithOptions(const char* path, const CotabbyEngineOptions& options);
    int getMaxSequences() const;
    CotabbyEngineMetrics getMetrics() const;
    /// Why the latest call that failed did, on whichever thread. Bytes written, or minus the size needed; 0: none failed.
    int lastErrorMessage(char* buffer, int buffer_size) const;

private:
    struct Impl;
    // Shared with the calls in flight, so that destruction leaves them something to end on.
    std::shared_ptr<const Impl> impl_;
};

#endif
