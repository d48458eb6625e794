// A load of threads that do everything at random, for the sanitizers: create, prompt, sample, trim, cancel, destroy,
// unload, load. It checks what holds in any order; the sanitizers see the rest.
//
// usage: stress MODEL SECONDS SEED THREADS

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "CotabbyInferenceEngine.h"

namespace {

using Clock = std::chrono::steady_clock;

struct Shared {
    const char* model;
    Clock::time_point deadline;
    CotabbyInferenceEngine engine;
    std::mutex mutex;
    std::vector<int32_t> ids;    // guarded by mutex
    std::set<int32_t> ever;      // guarded by mutex
    std::atomic<uint64_t> calls{0};
    std::atomic<uint64_t> tokens{0};
    std::atomic<uint64_t> prompts{0};
};

[[noreturn]] void fail(const char* what) {
    std::fprintf(stderr, "stress: %s\n", what);
    std::abort();
}

void load(Shared& shared) {
    CotabbyEngineOptions options;
    options.context_window_tokens = 256;
    options.batch_size = 64;
    options.thread_count = 1;
    if (shared.engine.loadModelWithOptions(shared.model, options) != EngineStatus::ok) {
        char message[512] = {};
        shared.engine.lastErrorMessage(message, sizeof message - 1);
        std::fprintf(stderr, "stress: %s\n", message);
        fail("the model did not load");
    }
}

class Worker {
public:
    Worker(Shared& shared, unsigned seed) : shared_(shared), random_(seed) {}

    void run() {
        while (Clock::now() < shared_.deadline) {
            act(below(100));
            ++shared_.calls;
        }
    }

private:
    int below(int limit) { return std::uniform_int_distribution<int>(0, limit - 1)(random_); }

    int32_t any_id() {
        const std::lock_guard<std::mutex> guard(shared_.mutex);
        if (shared_.ids.empty() || below(20) == 0) {
            return below(1000) - 500;
        }
        return shared_.ids[static_cast<size_t>(below(static_cast<int>(shared_.ids.size())))];
    }

    void act(int choice) {
        CotabbyInferenceEngine& engine = shared_.engine;
        const int32_t id = any_id();
        if (choice < 12) {
            create();
        } else if (choice < 27) {
            prompt(id);
        } else if (choice < 67) {
            samples(id);
        } else if (choice < 74) {
            engine.trimKV(id, below(80));
        } else if (choice < 80) {
            engine.cancelSequence(id);
        } else if (choice < 86) {
            destroy(id);
        } else if (choice < 90) {
            engine.setComputeLogprob(id, below(2) == 0);
            engine.setForceWordContinuation(id, below(2) == 0);
        } else if (choice < 94) {
            if (engine.getKVPositionCount(id) > 256) {
                fail("more positions than the window has");
            }
            engine.getMetrics();
            engine.getThreadCount();
            engine.isModelLoaded();
        } else if (choice < 98) {
            char buffer[64];
            for (const int32_t token : engine.tokenize("Some text, some more", below(20))) {
                engine.detokenize(token, buffer, below(64));
            }
            engine.applyChatTemplate("system", "user", true, buffer, sizeof buffer);
        } else if (below(12) == 0) {
            engine.unloadModel();
        } else {
            load(shared_);
        }
    }

    void create() {
        const SamplingConfig config{below(32), below(2) == 0 ? 0.0F : 1.0F, 40, 0.95F, 0.05F, 1.1F, 7, below(2) == 0};
        const int32_t id = shared_.engine.createSequence(config);
        if (id == -1) {
            return;
        }
        const std::lock_guard<std::mutex> guard(shared_.mutex);
        if (id <= 0 || !shared_.ever.insert(id).second) {
            fail("an id was used twice");
        }
        shared_.ids.push_back(id);
    }

    void destroy(int32_t id) {
        shared_.engine.destroySequence(id);
        const std::lock_guard<std::mutex> guard(shared_.mutex);
        for (size_t i = 0; i < shared_.ids.size(); ++i) {
            if (shared_.ids[i] == id) {
                shared_.ids.erase(shared_.ids.begin() + static_cast<long>(i));
                break;
            }
        }
    }

    void prompt(int32_t id) {
        std::string text;
        for (int i = below(100) + 1; i > 0; --i) {
            text += static_cast<char>('a' + below(26));
        }
        const std::vector<int32_t> tokens = shared_.engine.tokenize(text.data(), static_cast<int>(text.size()));
        const int start = below(4) == 0 ? below(300) - 20 : shared_.engine.getKVPositionCount(id);
        if (shared_.engine.decodePrompt(id, tokens.data(), static_cast<int>(tokens.size()), start) == EngineStatus::ok) {
            ++shared_.prompts;
        }
    }

    void samples(int32_t id) {
        for (int i = below(8); i >= 0; --i) {
            const SampleResult result = shared_.engine.sampleNext(id);
            if (result.is_eos && result.was_cancelled) {
                fail("a result is both ended and cancelled");
            }
            // Reads each byte, while other threads go on with the same sequence.
            for (int k = 0; k < result.piece_length; ++k) {
                sink_ = static_cast<char>(sink_ ^ result.piece[k]);
            }
            if (result.is_eos || result.was_cancelled) {
                return;
            }
            ++shared_.tokens;
        }
    }

    Shared& shared_;
    std::mt19937 random_;
    char sink_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
    if (argc != 5) {
        std::fprintf(stderr, "usage: %s MODEL SECONDS SEED THREADS\n", argv[0]);
        return EXIT_FAILURE;
    }
    Shared shared;
    shared.model = argv[1];
    shared.deadline = Clock::now() + std::chrono::seconds(std::atoi(argv[2]));
    const unsigned seed = static_cast<unsigned>(std::atoi(argv[3]));
    load(shared);
    std::vector<Worker> workers;
    for (int i = 0; i < std::atoi(argv[4]); ++i) {
        workers.emplace_back(shared, seed * 1000 + static_cast<unsigned>(i));
    }
    std::vector<std::thread> threads;
    for (Worker& worker : workers) {
        threads.emplace_back([&worker] { worker.run(); });
    }
    for (std::thread& thread : threads) {
        thread.join();
    }

    // Whatever happened, a new sequence works.
    for (const int32_t id : shared.ids) {
        shared.engine.destroySequence(id);
    }
    load(shared);
    const std::vector<int32_t> tokens = shared.engine.tokenize("The end", 7);
    const int32_t id = shared.engine.createSequence({8, 0.0F, 0, 0.0F, 0.0F, 0.0F, 0});
    if (id <= 0 ||
        shared.engine.decodePrompt(id, tokens.data(), static_cast<int>(tokens.size()), 0) != EngineStatus::ok ||
        shared.engine.sampleNext(id).was_cancelled) {
        fail("the engine does not work after the load");
    }
    std::printf("seed %u: %llu calls, %llu prompts, %llu tokens\n", seed,
                static_cast<unsigned long long>(shared.calls.load()),
                static_cast<unsigned long long>(shared.prompts.load()),
                static_cast<unsigned long long>(shared.tokens.load()));
    return shared.tokens.load() > 0 && shared.prompts.load() > 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
