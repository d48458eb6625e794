// A C++ host for the bridge's bench: one engine, one sequence.
#pragma once

#include <cstdint>
#include <memory>

#include "CotabbyInferenceEngine.h"
#include "rust/cxx.h"

class CxxHost {
public:
    explicit CxxHost(rust::Str model);
    // Decodes the prompt anew, and takes its seed token.
    bool prompt(rust::Slice<const int32_t> tokens);
    // Takes tokens one by one; true if all were there.
    bool sample(uint32_t count);
    // What a call costs that has nothing to do: the sequence is unknown.
    bool cross(uint32_t count);

private:
    CotabbyInferenceEngine engine_;
    int32_t id_ = -1;
};

std::unique_ptr<CxxHost> new_host(rust::Str model);
