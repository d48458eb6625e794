#include "bridge.h"

#include <string>

CxxHost::CxxHost(rust::Str model) {
    CotabbyEngineOptions options;
    options.thread_count = 1;
    if (engine_.loadModelWithOptions(std::string(model).c_str(), options) == EngineStatus::ok) {
        id_ = engine_.createSequence({0, 0.0F, 0, 0.0F, 0.0F, 0.0F, 0});
    }
}

bool CxxHost::prompt(rust::Slice<const int32_t> tokens) {
    return engine_.trimKV(id_, 0) &&
           engine_.decodePrompt(id_, tokens.data(), static_cast<int>(tokens.size()), 0) == EngineStatus::ok && sample(1);
}

bool CxxHost::sample(uint32_t count) {
    bool all = true;
    for (uint32_t i = 0; i < count; ++i) {
        const SampleResult result = engine_.sampleNext(id_);
        all = all && !result.was_cancelled && result.token >= 0;
    }
    return all;
}

bool CxxHost::cross(uint32_t count) {
    bool all = true;
    for (uint32_t i = 0; i < count; ++i) {
        all = all && engine_.sampleNext(0).is_eos;
    }
    return all;
}

std::unique_ptr<CxxHost> new_host(rust::Str model) {
    return std::make_unique<CxxHost>(model);
}
